"""SpeechBrain's side of `tools/bench_train`: what its CommonVoice transformer recipe trains with.

Its Brain, dynamic items (mp3 decoded and resampled every epoch), DynamicBatchSampler, Fbank,
ConvolutionFrontEnd, Conformer encoder and Transformer decoder, joint CTC and attention loss, Adam
and Noam. The text and its tokenizer are sbkit's, so that both learn the same labels.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import speechbrain as sb
import torch
from speechbrain.augment.augmenter import Augmenter
from speechbrain.augment.freq_domain import SpectrogramDrop
from speechbrain.dataio.batch import PaddedBatch
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.dataio.sampler import DynamicBatchSampler
from speechbrain.decoders import ctc_greedy_decode
from speechbrain.lobes.features import Fbank
from speechbrain.lobes.models.convolution import ConvolutionFrontEnd
from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR
from speechbrain.nnet.losses import ctc_loss, kldiv_loss
from speechbrain.nnet.schedulers import NoamScheduler
from speechbrain.processing.features import InputNormalization
from torch import Tensor, nn
from torchaudio.transforms import Resample

from sbkit.text.tokenizer import Tokenizer

BLANK, UNKNOWN, BOS, EOS = 0, 1, 2, 3  # of sbkit's tokenizers
RATE = 16_000


class Joint(sb.Brain):  # type: ignore[misc]
    """The Brain of the recipe."""

    def compute_forward(self, batch: Any, stage: sb.Stage) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the outputs of both heads from the audio."""
        audio, lengths = batch.sig
        features = self.modules.normalize(self.hparams.compute_features(audio), lengths)
        if stage is sb.Stage.TRAIN:
            features, lengths = self.hparams.augment(features, lengths)
        encoded, decoded = self.modules.Transformer(
            self.modules.CNN(features), batch.tokens_bos[0], lengths, pad_idx=BLANK
        )
        ctc = self.modules.ctc_lin(encoded).log_softmax(-1)
        return ctc, self.modules.seq_lin(decoded).log_softmax(-1), lengths

    def compute_objectives(self, predictions: Any, batch: Any, stage: sb.Stage) -> Tensor:
        """Weigh both losses."""
        ctc, seq, lengths = predictions
        tokens, token_lengths = batch.tokens
        attention = kldiv_loss(seq, *batch.tokens_eos, label_smoothing=0.1)
        share: float = self.hparams.ctc_weight
        one: Tensor = ctc_loss(ctc, tokens, lengths, token_lengths, BLANK)
        loss: Tensor = share * one + (1 - share) * attention
        return loss

    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Any, should_step: bool) -> None:
        """Set the rate for the next step."""
        if should_step:
            self.hparams.noam(self.optimizer)


def make_modules(knobs: Mapping[str, Any], vocab_size: int, d_ffn: int) -> nn.ModuleDict:
    """Build the parts of the recipe; the Conformer's d_ffn adjusts the number of parameters."""
    d_model = knobs["d_model"]
    front = ConvolutionFrontEnd(
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
        nhead=knobs["nhead"],
        num_encoder_layers=knobs["num_encoder_layers"],
        num_decoder_layers=knobs["num_decoder_layers"],
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
            "CNN": front,
            "Transformer": transformer,
            "ctc_lin": nn.Linear(d_model, vocab_size),
            "seq_lin": nn.Linear(d_model, vocab_size),
        }
    )


def modules_of_size(knobs: Mapping[str, Any], vocab_size: int, parameters: int) -> nn.ModuleDict:
    """Build a model with a given number of parameters, which grows linearly with d_ffn."""
    small, large = (
        sum(p.numel() for p in make_modules(knobs, vocab_size, width).parameters())
        for width in (8, 16)
    )
    width = 8 + round((parameters - small) / (large - small) * 8)
    return make_modules(knobs, vocab_size, width)


def make_dataset(items: Mapping[str, Any], tokenizer: Tokenizer) -> Any:
    """Make a dataset that decodes, resamples and encodes items (wav, text, duration) lazily."""

    def text(words: str) -> Iterator[Tensor]:
        ids = tokenizer.encode(words)
        yield torch.LongTensor([BOS, *ids])
        yield torch.LongTensor([*ids, EOS])
        yield torch.LongTensor(ids)

    pipeline: Any = sb.utils.data_pipeline
    labels = ("tokens_bos", "tokens_eos", "tokens")
    pipelines = [
        pipeline.takes("wav")(pipeline.provides("sig")(decode)),
        pipeline.takes("text")(pipeline.provides(*labels)(text)),
    ]
    return DynamicItemDataset(items, pipelines, ["id", "sig", *labels, "duration"])


def decode(wav: str) -> Tensor:
    """Read a file, and resample it as the recipe does."""
    info = sb.dataio.dataio.read_audio_info(wav)
    return torch.Tensor(Resample(info.sample_rate, RATE)(sb.dataio.dataio.read_audio(wav)))


def make_loader(dataset: Any, seconds: float, workers: int) -> Any:
    """Batch by seconds, as the recipe does."""
    sampler = DynamicBatchSampler(
        dataset,
        max_batch_length=seconds,
        num_buckets=200,
        length_func=lambda item: item["duration"],
        shuffle=True,
        batch_ordering="random",
        max_batch_ex=256,
    )
    return sb.dataio.dataloader.SaveableDataLoader(
        dataset, batch_sampler=sampler, collate_fn=PaddedBatch, num_workers=workers
    )


def make_brain(modules: nn.ModuleDict, *, device: str, precision: str, ctc_weight: float) -> Joint:
    """Make the Brain, with the optimizer and the augmentation of the recipe."""
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
        "ctc_weight": ctc_weight,
        "noam": NoamScheduler(lr_initial=0.0008, n_warmup_steps=2000),
    }
    options = {"device": device, "precision": precision}
    optimizer = partial(torch.optim.Adam, lr=0.0008, betas=(0.9, 0.98), eps=1e-9)
    brain = Joint(dict(modules), optimizer, hparams, options)
    brain.init_optimizers()
    return brain


@torch.no_grad()
def transcribe(brain: Joint, loader: Any, tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """Decode the best CTC path of every utterance: its id and text."""
    brain.modules.eval()
    for batch in loader:
        ctc, _, lengths = brain.compute_forward(batch.to(brain.device), sb.Stage.VALID)
        for name, ids in zip(batch.id, ctc_greedy_decode(ctc, lengths, BLANK), strict=True):
            yield name, tokenizer.decode(ids)
    brain.modules.train()
