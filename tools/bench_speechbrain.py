"""SpeechBrain's side of `tools/bench_train`: its CommonVoice transformer recipe.

Brain, dynamic items (mp3 decoded and resampled every epoch), DynamicBatchSampler, Fbank,
ConvolutionFrontEnd, Conformer encoder and Transformer decoder, joint CTC and attention loss, Adam
and Noam are the recipe's. The text and its tokenizer are sbkit's, so that both learn the same
labels.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any

import speechbrain as sb
import torch
from speechbrain.augment.augmenter import Augmenter
from speechbrain.augment.freq_domain import SpectrogramDrop
from speechbrain.dataio.batch import PaddedBatch
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.dataio.sampler import DynamicBatchSampler
from speechbrain.lobes.features import Fbank
from speechbrain.lobes.models.convolution import ConvolutionFrontEnd
from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR
from speechbrain.nnet.losses import ctc_loss, kldiv_loss
from speechbrain.nnet.schedulers import NoamScheduler
from speechbrain.processing.features import InputNormalization
from torch import Tensor, nn
from torchaudio.transforms import Resample

from sbkit.data.corpus import corpus_of
from sbkit.data.splits import read_column, sample_counts
from sbkit.text.tokenizer import Tokenizer
from sbkit.train.setup import PreparedRun

BLANK, UNKNOWN, BOS, EOS = 0, 1, 2, 3  # of sbkit's tokenizers
RATE = 16_000


class JointBrain(sb.Brain):  # type: ignore[misc]
    """The Brain of the recipe."""

    def compute_forward(self, batch: Any, stage: sb.Stage) -> tuple[Tensor, Tensor | None, Tensor]:
        audio, lengths = batch.sig
        features = self.modules.normalize(self.hparams.compute_features(audio), lengths)
        if stage is sb.Stage.TRAIN:
            features, lengths = self.hparams.augment(features, lengths)
        targets = batch.tokens_bos[0] if self.hparams.ctc_weight < 1 else None
        encoded, decoded = self.modules.Transformer(
            self.modules.CNN(features), targets, lengths, pad_idx=BLANK
        )
        ctc = self.modules.ctc_lin(encoded).log_softmax(-1)
        seq = None if targets is None else self.modules.seq_lin(decoded).log_softmax(-1)
        return ctc, seq, lengths

    def compute_objectives(self, predictions: Any, batch: Any, stage: sb.Stage) -> Tensor:
        ctc, seq, lengths = predictions
        tokens, token_lengths = batch.tokens
        ctc_part: Tensor = ctc_loss(ctc, tokens, lengths, token_lengths, BLANK)
        if seq is None:
            return ctc_part
        attention = kldiv_loss(seq, *batch.tokens_eos, label_smoothing=0.1)
        weight: float = self.hparams.ctc_weight
        loss: Tensor = weight * ctc_part + (1 - weight) * attention
        return loss

    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Any, should_step: bool) -> None:
        if should_step:
            self.hparams.noam(self.optimizer)


def make_modules(settings: Mapping[str, Any], vocab_size: int, d_ffn: int) -> nn.ModuleDict:
    """Build the recipe's model; the Conformer's d_ffn adjusts the number of parameters."""
    d_model = settings["d_model"]
    cnn = ConvolutionFrontEnd(
        input_shape=(8, 10, 80),
        num_blocks=2,
        num_layers_per_block=1,
        out_channels=(64, 32),
        kernel_sizes=(3, 3),
        strides=(2, 2),
        residuals=(False, False),
    )
    transformer = TransformerASR(
        tgt_vocab=vocab_size,
        input_size=640,
        d_model=d_model,
        nhead=settings["nhead"],
        num_encoder_layers=settings["num_encoder_layers"],
        num_decoder_layers=settings["num_decoder_layers"],
        d_ffn=d_ffn,
        dropout=0.1,
        activation=nn.GELU,
        encoder_module="conformer",
        attention_type="RelPosMHAXL",
        normalize_before=True,
        causal=False,
    )
    return nn.ModuleDict(
        {
            "normalize": InputNormalization(norm_type="global", update_until_epoch=4),
            "CNN": cnn,
            "Transformer": transformer,
            "ctc_lin": nn.Linear(d_model, vocab_size),
            "seq_lin": nn.Linear(d_model, vocab_size),
        }
    )


def modules_of_size(
    settings: Mapping[str, Any], vocab_size: int, num_parameters: int
) -> nn.ModuleDict:
    """Build a model with a given number of parameters, which grows linearly with d_ffn."""
    small, large = (
        sum(p.numel() for p in make_modules(settings, vocab_size, width).parameters())
        for width in (8, 16)
    )
    width = 8 + round((num_parameters - small) / (large - small) * 8)
    return make_modules(settings, vocab_size, width)


def make_dataset(items: Mapping[str, Any], tokenizer: Tokenizer) -> Any:
    """Make a dataset that reads the audio and encodes the text of items (wav, text, duration)."""

    def encode(text: str) -> Iterator[Tensor]:
        ids = tokenizer.encode(text)
        yield torch.LongTensor([BOS, *ids])
        yield torch.LongTensor([*ids, EOS])
        yield torch.LongTensor(ids)

    pipeline: Any = sb.utils.data_pipeline
    labels = ("tokens_bos", "tokens_eos", "tokens")
    pipelines = [
        pipeline.takes("wav")(pipeline.provides("sig")(read_wav)),
        pipeline.takes("text")(pipeline.provides(*labels)(encode)),
    ]
    return DynamicItemDataset(items, pipelines, ["id", "sig", *labels, "duration"])


def read_wav(wav: str) -> Tensor:
    """Read and resample a file as the recipe does."""
    info = sb.dataio.dataio.read_audio_info(wav)
    return torch.Tensor(Resample(info.sample_rate, RATE)(sb.dataio.dataio.read_audio(wav)))


def items_of(setup: PreparedRun) -> dict[str, dict[str, Any]]:
    """Return the training clips of sbkit, with their normalized texts, by id."""
    paths = {clip.id: clip.path for clip in corpus_of(setup.spec.settings).clips("train")}
    rows = setup.splits.train
    ids, texts = (read_column(rows, name) for name in ("id", "text"))
    seconds = sample_counts(rows) / setup.spec.settings["sample_rate"]
    return {
        id: {"wav": str(paths[id]), "text": text, "duration": duration}
        for id, text, duration in zip(ids, texts, seconds.tolist(), strict=True)
    }


def make_loader(dataset: Any, settings: Mapping[str, Any]) -> Any:
    """Make a loader whose batches have at most `batch_seconds`, as the recipe does."""
    sampler = DynamicBatchSampler(
        dataset,
        max_batch_length=settings["batch_seconds"],
        num_buckets=200,
        length_func=lambda item: item["duration"],
        shuffle=True,
        batch_ordering="random",
        max_batch_ex=256,
    )
    return sb.dataio.dataloader.SaveableDataLoader(
        dataset, batch_sampler=sampler, collate_fn=PaddedBatch, num_workers=settings["num_workers"]
    )


class SpeechBrainSide:
    """Train as SpeechBrain's `Brain.fit` does, on the same clips and labels as sbkit."""

    def __init__(self, setup: PreparedRun) -> None:
        self._tokenizer = setup.labels
        self.brain = self._make_brain(setup)
        self.model = self.brain.modules.train()
        dataset = make_dataset(items_of(setup), self._tokenizer)
        self._loader = make_loader(dataset, setup.spec.settings)
        self.batches = self._batches()

    def _make_brain(self, setup: PreparedRun) -> Any:
        """Make the recipe's Brain with as many parameters as the run's model."""
        settings = setup.spec.settings
        device = str(setup.placement.device)
        num_parameters = sum(p.numel() for p in setup.hparams["model"].parameters())
        modules = modules_of_size(settings, self._tokenizer.vocabulary.size, num_parameters)
        drop = partial(SpectrogramDrop, drop_count_low=2, drop_count_high=5, replace="zeros")
        augment = Augmenter(
            parallel_augment=False,
            concat_original=False,
            min_augmentations=2,
            max_augmentations=2,
            augmentations=[
                drop(drop_length_low=5, drop_length_high=15, dim=1),
                drop(drop_length_low=25, drop_length_high=35, dim=2),
            ],
        )
        hparams = {
            "compute_features": Fbank(sample_rate=RATE, n_fft=400, n_mels=80).to(device),
            "augment": augment,
            "ctc_weight": settings["ctc_weight"],
            "noam": NoamScheduler(lr_initial=0.0008, n_warmup_steps=2000),
        }
        options = {"device": device, "precision": settings["precision"]}
        optimizer = partial(torch.optim.Adam, lr=0.0008, betas=(0.9, 0.98), eps=1e-9)
        brain = JointBrain(dict(modules), optimizer, hparams, options)
        brain.init_optimizers()
        return brain

    def _batches(self) -> Iterator[Any]:
        for epoch in count(1):
            self._loader.batch_sampler.set_epoch(epoch)
            yield from self._loader

    def step(self, batch: Any) -> tuple[float, float]:
        """Train one step, and return its seconds of audio without and with padding."""
        brain = self.brain
        brain.step += 1
        loss = brain.fit_batch(batch.to(brain.device))
        brain.avg_train_loss = brain.update_average(loss, brain.avg_train_loss)
        return float(batch.duration.sum()), batch.sig.data.numel() / RATE
