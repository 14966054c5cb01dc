"""SpeechBrain's and Hugging Face's sides of `tools/bench_train` with `hparams/ctc_pretrained.yaml`.

SpeechBrain's side is its `recipes/CommonVoice/ASR/CTC/train_with_wav2vec.py`: its wrapper of
Hugging Face's model, three linear layers with batch norm, Adam and Adadelta, speed perturbation,
dropped frequencies and chunks, and batches of clips sorted by duration. Hugging Face's side is the
loop of `run_speech_recognition_ctc.py`: `Wav2Vec2ForCTC`, the batches of `group_by_length`, its
padding, and the step of its Trainer. From a Whisper, SpeechBrain's side has its wrapper of Whisper,
and Hugging Face's side `WhisperEncoder` and a head; both pad to 30 s. On both sides, a batch has as
many clips as sbkit's has on average, and the encoder is trained from the first step. Convolutions
are frozen; those of Whisper only on sbkit's side, unless `--freeze={}` is passed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import speechbrain as sb
import torch
import transformers
from speechbrain.augment.augmenter import Augmenter
from speechbrain.augment.time_domain import DropChunk, DropFreq, SpeedPerturb
from speechbrain.dataio.batch import PaddedBatch
from speechbrain.integrations.huggingface.wav2vec2 import Wav2Vec2
from speechbrain.integrations.huggingface.whisper import Whisper
from speechbrain.nnet.containers import Sequential
from speechbrain.nnet.linear import Linear
from speechbrain.nnet.losses import ctc_loss
from speechbrain.nnet.normalization import BatchNorm1d
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import LengthGroupedSampler

from sbkit.train.setup import RunSetup
from tools.bench_sides import items_of
from tools.bench_speechbrain import BLANK, RATE, SpeechBrainSide, read_wav

library: Any = transformers  # it has incomplete types
HEAD_DROPOUT = 0.15
HEAD_NEURONS = 1024
WHISPER_SECONDS = 30.0
NO_DROPOUT = ("attention_dropout", "activation_dropout", "hidden_dropout", "feat_proj_dropout")


def save_base(folder: Path) -> Path:
    """Save a wav2vec 2.0 `base` of 95 million random weights, without LayerDrop."""
    library.Wav2Vec2Model(library.Wav2Vec2Config(layerdrop=0.0)).save_pretrained(folder)
    library.Wav2Vec2FeatureExtractor(return_attention_mask=False).save_pretrained(folder)
    return folder


# -- SpeechBrain -------------------------------------------------------------------------------


class FineTuningBrain(sb.Brain):  # type: ignore[misc]
    """The Brain of the recipe, after the 500 steps in which it does not train the encoder."""

    def compute_forward(self, batch: Any, stage: sb.Stage) -> tuple[Tensor, None, Tensor]:
        audio, lengths = batch.sig
        if stage is sb.Stage.TRAIN:
            audio, lengths = self.hparams.augment(audio, lengths)
        if isinstance(self.modules.wav2vec2, Whisper):
            seconds = audio.shape[1] / RATE
            states = self.modules.wav2vec2(audio)
            lengths = lengths * seconds / WHISPER_SECONDS
        else:
            states = self.modules.wav2vec2(audio, lengths)
        encoded = self.modules.enc(states)
        return self.modules.ctc_lin(encoded).log_softmax(-1), None, lengths

    def compute_objectives(self, predictions: Any, batch: Any, stage: sb.Stage) -> Tensor:
        log_probs, _, lengths = predictions
        tokens, token_lengths = batch.tokens
        loss: Tensor = ctc_loss(log_probs, tokens, lengths, token_lengths, BLANK)
        return loss

    def init_optimizers(self) -> None:
        encoder, *head = (self.modules[name].parameters() for name in self.modules)
        self.optimizers_dict = {
            "wav2vec": torch.optim.Adam(encoder, lr=1e-4),
            "model": torch.optim.Adadelta([*head[0], *head[1]], lr=1.0, rho=0.95, eps=1e-8),
        }


class ShuffledBatches:
    """Batches of a fixed number of clips of similar durations, in random order.

    Both scripts sort batches by duration, Hugging Face's fifty at a time. A few seconds of training
    would then have only long clips, or only short ones.
    """

    def __init__(self, ordered: Iterable[int], num_clips: int) -> None:
        self._ordered = ordered
        self._num_clips = num_clips
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        ordered = [*self._ordered]
        starts = range(0, len(ordered), self._num_clips)
        generator = torch.Generator().manual_seed(self._epoch)
        for index in torch.randperm(len(starts), generator=generator).tolist():
            yield ordered[starts[index] : starts[index] + self._num_clips]


class SpeechBrainFineTuningSide(SpeechBrainSide):
    """Train as the recipe does, on the same clips and labels."""

    def make_brain(self, setup: RunSetup) -> FineTuningBrain:
        """Make the Brain of the encoder in `pretrained`; the augmentation is version 1.1's."""
        folder = setup.knobs["pretrained"]
        vocab_size = self._tokenizer.vocabulary.size
        if is_whisper(setup):
            encoder = Whisper(folder, folder, encoder_only=True)
        else:
            encoder = Wav2Vec2(folder, folder, output_norm=True, freeze_feature_extractor=True)
        head = Sequential(input_shape=[None, None, encoder.model.config.hidden_size])
        for _ in range(3):
            head.append(Linear, n_neurons=HEAD_NEURONS)
            head.append(BatchNorm1d)
            head.append(nn.LeakyReLU())
            head.append(nn.Dropout(HEAD_DROPOUT))
        augment = Augmenter(
            concat_original=False,
            min_augmentations=3,
            max_augmentations=3,
            augmentations=[SpeedPerturb(RATE, [95, 100, 105]), DropFreq(), DropChunk()],
        )
        ctc_lin = nn.Linear(HEAD_NEURONS, vocab_size)
        modules = {"wav2vec2": encoder, "enc": head, "ctc_lin": ctc_lin}
        options = {
            "device": str(setup.choose_placement().device),
            "precision": setup.knobs["precision"],
        }
        brain = FineTuningBrain(modules, hparams={"augment": augment}, run_opts=options)
        brain.init_optimizers()
        return brain

    def make_loader(self, dataset: Any, knobs: Mapping[str, Any]) -> Any:
        """Batch clips of similar durations."""
        seconds = [item["duration"] for item in dataset.data.values()]
        ordered = sorted(range(len(seconds)), key=seconds.__getitem__)
        return DataLoader(
            dataset,
            batch_sampler=ShuffledBatches(ordered, clips_in_batch(seconds, knobs)),
            collate_fn=PaddedBatch,
            num_workers=knobs["num_workers"],
        )


def is_whisper(setup: RunSetup) -> bool:
    """Return whether the sides fine-tune a Whisper."""
    return bool(setup.knobs["encoder_config"]["model_type"] == "whisper")


def clips_in_batch(seconds: Sequence[float], knobs: Mapping[str, Any]) -> int:
    """Return the number of clips in `batch_seconds`, on average."""
    return max(1, round(float(knobs["batch_seconds"]) * len(seconds) / sum(seconds)))


# -- Hugging Face ------------------------------------------------------------------------------


class HuggingFaceSide:
    """Train as the Trainer of the script does, on the same clips and labels.

    Each clip is decoded only once, as with `datasets`, which keep it on disk.
    """

    def __init__(self, setup: RunSetup) -> None:
        knobs = setup.knobs
        self._tokenizer = setup.prepare_labels()
        folder = setup.knobs["pretrained"]
        vocab_size = self._tokenizer.vocabulary.size
        self._extractor = library.AutoFeatureExtractor.from_pretrained(folder)
        if is_whisper(setup):
            self.model: Any = WhisperCtc(folder, vocab_size)
        else:
            self.model = library.Wav2Vec2ForCTC.from_pretrained(
                folder,
                vocab_size=vocab_size,
                pad_token_id=BLANK,
                ctc_loss_reduction="mean",
                **dict.fromkeys(NO_DROPOUT, 0.0),
            )
            self.model.freeze_feature_encoder()
        self._device = setup.choose_placement().device
        self.model.to(self._device).train()
        self._context = setup.choose_placement().autocast()
        self._inputs: dict[int, Any] = {}
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=3e-4, weight_decay=0.0, fused=True
        )
        items = items_of(setup)
        seconds = [item["duration"] for item in items.values()]
        num_clips = clips_in_batch(seconds, knobs)
        self._loader: Any = DataLoader(
            [*items.values()],  # type: ignore[arg-type]
            batch_sampler=ShuffledBatches(
                LengthGroupedSampler(num_clips, lengths=[int(s * RATE) for s in seconds]), num_clips
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
        if "input_features" in batch:
            return seconds, WHISPER_SECONDS * len(batch["labels"])
        return seconds, batch["input_values"].numel() / RATE

    def _collate(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        name = self._extractor.model_input_names[0]
        clips = [self._read(item["wav"]) for item in items]
        if isinstance(self.model, WhisperCtc):
            frames = [max(1, int(item["duration"] * 50)) for item in items]
            inputs = {name: torch.from_numpy(np.stack(clips)), "frames": torch.tensor(frames)}
        else:
            audio = [{name: clip} for clip in clips]
            inputs = self._extractor.pad(audio, padding="longest", return_tensors="pt")
        labels = [torch.tensor(self._tokenizer.encode(item["text"])) for item in items]
        return {
            **inputs,
            "labels": nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100),
            "seconds": sum(item["duration"] for item in items),
        }

    def _read(self, wav: str) -> Any:
        """Read and normalize a file; its copies in the corpus are links to one inode."""
        inode = Path(wav).stat().st_ino
        if inode not in self._inputs:
            extracted = self._extractor(read_wav(wav).numpy(), sampling_rate=RATE)
            self._inputs[inode] = next(iter(extracted.values()))[0]
        return self._inputs[inode]


class WhisperCtc(nn.Module):
    """`WhisperEncoder` and a linear head, trained as `Wav2Vec2ForCTC` computes its loss."""

    def __init__(self, folder: str, vocab_size: int) -> None:
        super().__init__()
        self.encoder = library.WhisperModel.from_pretrained(folder).encoder
        self.head = nn.Linear(self.encoder.config.d_model, vocab_size)

    def forward(self, input_features: Tensor, frames: Tensor, labels: Tensor) -> Any:
        """Compute the loss: (B, M, T), (B,), (B, L)."""
        logits = self.head(self.encoder(input_features).last_hidden_state)
        log_probs = logits.float().log_softmax(-1).transpose(0, 1)
        counts = (labels >= 0).sum(1)
        loss = nn.functional.ctc_loss(log_probs, labels.clamp(min=0), frames, counts, BLANK)
        return SimpleNamespace(loss=loss)


SIDES = {"speechbrain": SpeechBrainFineTuningSide, "huggingface": HuggingFaceSide}
