"""The other sides of `tools/bench_train` with `hparams/ctc_pretrained.yaml`.

SpeechBrain's is the composition of its `recipes/CommonVoice/ASR/CTC/train_with_wav2vec.py`: its
wrapper of Hugging Face's model, three linear layers with batch norm, Adam and Adadelta, speed
perturbation and dropped frequencies and chunks, clips sorted by duration, so many in a batch.
Hugging Face's is the loop of `run_speech_recognition_ctc.py`: `Wav2Vec2ForCTC`, batches of
`group_by_length`, its padding, the step of its Trainer. Both have as many clips in a batch as
sbkit has in the mean, the convolutions frozen, and the encoder trained from the first step.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import speechbrain as sb
import torch
import transformers
from speechbrain.augment.augmenter import Augmenter
from speechbrain.augment.time_domain import DropChunk, DropFreq, SpeedPerturb
from speechbrain.dataio.batch import PaddedBatch
from speechbrain.integrations.huggingface.wav2vec2 import Wav2Vec2
from speechbrain.nnet.containers import Sequential
from speechbrain.nnet.linear import Linear
from speechbrain.nnet.losses import ctc_loss
from speechbrain.nnet.normalization import BatchNorm1d
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import LengthGroupedSampler

from sbkit.evaluate.wer import ScoredUtterance, total_scores
from sbkit.train.run import Run
from tools.bench_sides import Theirs, items_of
from tools.bench_speechbrain import BLANK, RATE, decode

library: Any = transformers  # without the types that it lacks
DROPPED = 0.15  # by the linear layers
NEURONS = 1024  # of each of them
NO_DROPOUT = ("attention_dropout", "activation_dropout", "hidden_dropout", "feat_proj_dropout")


def save_base(folder: Path) -> Path:
    """Save a wav2vec 2.0 `base` of 95 million random weights, whose layers are never left out."""
    library.Wav2Vec2Model(library.Wav2Vec2Config(layerdrop=0.0)).save_pretrained(folder)
    library.Wav2Vec2FeatureExtractor(return_attention_mask=False).save_pretrained(folder)
    return folder


# -- SpeechBrain -------------------------------------------------------------------------------


class FineTuned(sb.Brain):  # type: ignore[misc]
    """The Brain of the recipe, after its 500 steps in which the encoder is not trained."""

    def compute_forward(self, batch: Any, stage: sb.Stage) -> tuple[Tensor, None, Tensor]:
        """Compute log-probabilities from the audio."""
        audio, lengths = batch.sig
        if stage is sb.Stage.TRAIN:
            audio, lengths = self.hparams.augment(audio, lengths)
        encoded = self.modules.enc(self.modules.wav2vec2(audio, lengths))
        return self.modules.ctc_lin(encoded).log_softmax(-1), None, lengths

    def compute_objectives(self, predictions: Any, batch: Any, stage: sb.Stage) -> Tensor:
        """Compute the loss."""
        log_probs, _, lengths = predictions
        tokens, token_lengths = batch.tokens
        loss: Tensor = ctc_loss(log_probs, tokens, lengths, token_lengths, BLANK)
        return loss

    def init_optimizers(self) -> None:
        """Make an optimizer for the encoder, and one for the new layers."""
        encoder, *head = (self.modules[name].parameters() for name in self.modules)
        self.optimizers_dict = {
            "wav2vec": torch.optim.Adam(encoder, lr=1e-4),
            "model": torch.optim.Adadelta([*head[0], *head[1]], lr=1.0, rho=0.95, eps=1e-8),
        }


def make_brain(folder: str, vocab_size: int, *, device: str, precision: str) -> FineTuned:
    """Make the Brain of a folder's model, with the head, optimizers and augmentation of the recipe.

    The augmentation is that of version 1.1: speed, then dropped frequencies and chunks.
    """
    encoder = Wav2Vec2(folder, folder, output_norm=True, freeze_feature_extractor=True)
    head = Sequential(input_shape=[None, None, encoder.model.config.hidden_size])
    for _ in range(3):
        head.append(Linear, n_neurons=NEURONS)
        head.append(BatchNorm1d)
        head.append(nn.LeakyReLU())
        head.append(nn.Dropout(DROPPED))
    augment = Augmenter(
        concat_original=False,
        min_augmentations=3,
        max_augmentations=3,
        augmentations=[SpeedPerturb(RATE, [95, 100, 105]), DropFreq(), DropChunk()],
    )
    modules = {"wav2vec2": encoder, "enc": head, "ctc_lin": nn.Linear(NEURONS, vocab_size)}
    options = {"device": device, "precision": precision}
    brain = FineTuned(modules, hparams={"augment": augment}, run_opts=options)
    brain.init_optimizers()
    return brain


class Shuffled:
    """Batches of a fixed number of clips of similar durations, in random order.

    Both scripts go through batches in the order of their durations, Hugging Face's through fifty at
    a time: a window of some seconds would hear long clips only, or short ones.
    """

    def __init__(self, ordered: Iterable[int], clips: int) -> None:
        self._ordered, self._clips, self._epoch = ordered, clips, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the clip indices of each batch."""
        ordered = [*self._ordered]
        starts = range(0, len(ordered), self._clips)
        generator = torch.Generator().manual_seed(self._epoch)
        for at in torch.randperm(len(starts), generator=generator).tolist():
            yield ordered[starts[at] : starts[at] + self._clips]


class FineTunedTheirs(Theirs):
    """Train as the recipe does, on the same clips and labels."""

    def make_brain(self, run: Run) -> FineTuned:
        """Make the Brain of `pretrained`."""
        return make_brain(
            run.knobs["pretrained"],
            run.prepare_labels().vocabulary.size,
            device=str(run.choose_placement().device),
            precision=run.knobs["precision"],
        )

    def make_loader(self, dataset: Any, knobs: Mapping[str, Any]) -> Any:
        """Batch clips of similar durations."""
        seconds = [item["duration"] for item in dataset.data.values()]
        ordered = sorted(range(len(seconds)), key=seconds.__getitem__)
        return DataLoader(
            dataset,
            batch_sampler=Shuffled(ordered, clips_in_batch(seconds, knobs)),
            collate_fn=PaddedBatch,
            num_workers=knobs["num_workers"],
        )


def clips_in_batch(seconds: Sequence[float], knobs: Mapping[str, Any]) -> int:
    """Count the clips of the mean length that `batch_seconds` holds."""
    return max(1, round(float(knobs["batch_seconds"]) * len(seconds) / sum(seconds)))


# -- Hugging Face ------------------------------------------------------------------------------


class HuggingFace:
    """Train as the Trainer of the script does, on the same clips and labels.

    Each clip is decoded once and kept, as `datasets` does on the disk.
    """

    def __init__(self, run: Run) -> None:
        knobs, self._tokenizer, folder = run.knobs, run.prepare_labels(), run.knobs["pretrained"]
        self._extractor = library.Wav2Vec2FeatureExtractor.from_pretrained(folder)
        self.model: Any = library.Wav2Vec2ForCTC.from_pretrained(
            folder,
            vocab_size=self._tokenizer.vocabulary.size,
            pad_token_id=BLANK,
            ctc_loss_reduction="mean",
            **dict.fromkeys(NO_DROPOUT, 0.0),
        )
        self.model.freeze_feature_encoder()
        self._device = run.choose_placement().device
        self.model.to(self._device).train()
        self._context = run.choose_placement().autocast()
        self._decoded = dict[int, Any]()
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=3e-4, weight_decay=0.0, fused=True
        )
        self._dev_items = items_of(run, "dev")
        items = items_of(run, "train")
        seconds = [item["duration"] for item in items.values()]
        clips = clips_in_batch(seconds, knobs)
        self._loader: Any = DataLoader(
            [*items.values()],  # type: ignore[arg-type]
            batch_sampler=Shuffled(
                LengthGroupedSampler(clips, lengths=[int(s * RATE) for s in seconds]), clips
            ),
            collate_fn=self._collate,
            num_workers=knobs["num_workers"],
        )
        self.batches = chain.from_iterable(repeat(self._loader))

    def step(self, batch: dict[str, Any]) -> tuple[float, float]:
        """Train one step, and return its seconds of audio without and with padding."""
        seconds = batch.pop("seconds")
        inputs = {name: value.to(self._device) for name, value in batch.items()}
        with self._context:
            loss = self.model(**inputs).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self.model.zero_grad()
        return seconds, batch["input_values"].numel() / RATE

    @torch.no_grad()
    def cer(self) -> float:
        """Return the character error rate of the first validation set, greedy, clip by clip."""
        self.model.eval()
        scored = list[ScoredUtterance]()
        for name, item in self._dev_items.items():
            audio = torch.from_numpy(self._audio(item["wav"])).to(self._device)
            best = self.model(audio.unsqueeze(0)).logits[0].argmax(-1).unique_consecutive()
            text = self._tokenizer.decode(best[best != BLANK].tolist())
            scored.append(ScoredUtterance(name, item["text"], text))
        self.model.train()
        return total_scores(scored).cer

    def _collate(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        audio = [{"input_values": self._audio(item["wav"])} for item in items]
        labels = [torch.tensor(self._tokenizer.encode(item["text"])) for item in items]
        return {
            **self._extractor.pad(audio, padding="longest", return_tensors="pt"),
            "labels": nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100),
            "seconds": sum(item["duration"] for item in items),
        }

    def _audio(self, wav: str) -> Any:
        """Decode, resample and normalize a file; its copies in the corpus are links."""
        file = Path(wav).stat().st_ino
        if file not in self._decoded:
            audio = decode(wav).numpy()
            inputs = self._extractor(audio, sampling_rate=RATE).input_values
            self._decoded[file] = inputs[0]
        return self._decoded[file]
