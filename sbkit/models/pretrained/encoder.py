"""A pretrained encoder as three modules of a YAML: features, front-end and Transformer.

Whisper's Transformer may also have its decoder, `PretrainedTransformer`.

Legend: B utterances, S samples, T features, U frames of the encoder, M values of a
feature, C channels, D width.

All take `config`, keyed as the `config.json` of the pretrained model. Each has a ``body`` that
implements a family, with the tensor names of its file.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sbkit.audio.io import FULL_SCALE
from sbkit.audio.lengths import Subsampling, length_mask
from sbkit.audio.random_draws import draw_for_step
from sbkit.base.errors import ConfigError
from sbkit.base.messages import listed
from sbkit.base.ranges import (
    Dropout,
    PositiveCount,
    Range,
    Share,
    constraint_of,
    require_in_range,
)
from sbkit.base.units import seconds_to_samples
from sbkit.models.pretrained.blocks import Config, mask_spans
from sbkit.models.pretrained.features import NormalizedAudio, WhisperFeatures
from sbkit.models.pretrained.lora import add_adapters
from sbkit.models.pretrained.transformers_encoder import (
    ExtractedFeatures,
    make_body,
    run_body,
    subsampling_of,
)
from sbkit.models.pretrained.wav2vec2 import ConvEncoder, Wav2Vec2
from sbkit.models.pretrained.whisper import WhisperBody, WhisperConvs, WhisperDecoder
from sbkit.text.decoder_tokenizer import GenerationSettings
from sbkit.text.languages import whisper_language

logger = logging.getLogger(__name__)

MAX_PADDING_EFFECT = 1e-3  # share of the largest state; with half a second of noise it is 1e-6
DeclaredConfig = Annotated[  # null until the folder is read
    Config, constraint_of(Config | None), "Name the encoder's folder as `pretrained`."
]
Lora = Annotated[
    Mapping[str, Any] | None, "Write {rank: 8, projections: [q_proj, v_proj]}, or null."
]
Layer = Annotated[int, Range(low=1, integer=True)]


class Family(NamedTuple):
    """The modules of a family of pretrained encoders, each built from a config."""

    features: Callable[[Config], nn.Module]
    front_end: Callable[[Config], nn.Module]
    body: Callable[[Config], Any]
    prefix: str  # stands before the names of the front-end's tensors in a file
    has_mask_vector: bool = True  # whether files have the vector that replaces masked frames


class WholeFrames(nn.Module):
    """Return the frames: encoders of transformers have a front-end of their own."""

    subsampling = Subsampling(1)

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return x, lengths


WAVEFORMS = Family(NormalizedAudio, ConvEncoder, Wav2Vec2, "feature_extractor.")
TRANSFORMERS = Family(ExtractedFeatures, WholeFrames, make_body, "")
FAMILIES = {  # keyed by the `model_type` of a `config.json`
    **dict.fromkeys(("wav2vec2", "hubert", "wavlm"), WAVEFORMS),
    "whisper": Family(WhisperFeatures, WhisperConvs, WhisperBody, "", has_mask_vector=False),
    "wav2vec2-bert": TRANSFORMERS,
    "parakeet_encoder": TRANSFORMERS._replace(has_mask_vector=False),
}


class PretrainedFeatures(nn.Module):
    """Compute the features that the encoder was trained on: (B, S), (B,) -> (B, T, M), (B,).

    For wav2vec 2.0, HuBERT and WavLM this is the normalized audio, (B, S, 1).

    Attributes:
        takes_tail: whether zeros follow a clip. They change the deviation of samples little, but
            not that of the log energies that an extractor of transformers normalizes.
    """

    body: Any

    def __init__(self, *, config: DeclaredConfig) -> None:
        super().__init__()
        self.sample_rate: int = config["sample_rate"]  # Hz
        self.body = FAMILIES[config["model_type"]].features(config)
        self.takes_tail = not isinstance(self.body, ExtractedFeatures)

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(audio / FULL_SCALE, lengths)

    @property
    def subsampling(self) -> Subsampling:
        return self.body.subsampling


class PretrainedFrontEnd(nn.Module):
    """Subsample features: (B, T, M), (B,) -> (B, U, C), (B,)."""

    body: Any

    def __init__(self, *, config: DeclaredConfig) -> None:
        super().__init__()
        family = FAMILIES[config["model_type"]]
        self.prefix = family.prefix
        self.body = family.front_end(config)
        self.subsampling: Subsampling = self.body.subsampling

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x, lengths)


class PretrainedEncoder(nn.Module):
    """Encode frames: (B, U, C), (B,) -> (B, U, D), (B,).

    An encoder of transformers takes features, (B, T, M), and subsamples them.

    layers: how many layers to use, from the first; null: all.
    intermediate_layer: the layer that an inter-CTC loss reads, from 1; null: the middle one.
    dropout, attention_dropout, activation_dropout: rates, in training.
    layerdrop: the probability that training skips a layer.
    mask_time_prob, mask_time_length: in training, the share of frames in masks, with overlaps
        counted twice, and the frames of a mask.
    mask_channel_prob, mask_channel_length: the same for channels.
    gradient_checkpointing: recompute the activations of each layer in the backward pass, with the
        same random numbers.
    lora: {rank: 8, alpha: 16, projections: [q_proj, v_proj]} freezes the encoder and trains
        adapters of the Linear layers with these names; null: no adapters.
    """

    def __init__(
        self,
        *,
        config: DeclaredConfig,
        layers: Annotated[Layer | None, "Pass null for all layers."] = None,
        intermediate_layer: Annotated[Layer | None, "Pass null for the middle one."] = None,
        dropout: Dropout = 0.0,
        attention_dropout: Dropout = 0.0,
        activation_dropout: Dropout = 0.1,
        layerdrop: Dropout = 0.1,
        mask_time_prob: Share = 0.65,
        mask_time_length: PositiveCount = 10,
        mask_channel_prob: Share = 0.5,
        mask_channel_length: PositiveCount = 64,
        gradient_checkpointing: bool = False,
        lora: Lora = None,
    ) -> None:
        super().__init__()
        family = FAMILIES[config["model_type"]]
        depth = config["num_hidden_layers"]
        count = depth if layers is None else layers
        middle = max(1, count // 2) if intermediate_layer is None else intermediate_layer
        for key, layer, last in (("layers", count, depth), ("intermediate_layer", middle, count)):
            valid = Range(low=1, high=last, integer=True, advice="Choose one of these layers.")
            require_in_range(key, layer, valid)
        self.num_layers = count
        self.intermediate_layer = middle
        self.rates = {"hidden_dropout": dropout, "attention_dropout": attention_dropout}
        self.rates["activation_dropout"] = activation_dropout
        sizes = {"num_hidden_layers": count, "layerdrop": layerdrop}
        self.body: Any = family.body({**config, **self.rates, **sizes})
        self.is_of_transformers = family.body is make_body
        self.subsampling = subsampling_of(self.body) if self.is_of_transformers else Subsampling(1)
        self.frame_masks = (mask_time_prob, mask_time_length)
        self.channel_masks = (mask_channel_prob, mask_channel_length)
        if mask_time_prob > 0 and family.has_mask_vector:
            self.body.masked_spec_embed = nn.Parameter(torch.zeros(config["hidden_size"]))
        if lora is not None:
            add_adapters(self.body, **lora)
        self.layerdrop = layerdrop
        self.gradient_checkpointing = gradient_checkpointing
        if self.is_of_transformers and gradient_checkpointing:
            self.body.activation_checkpointing_enable(
                activation_checkpointing_kwargs={"use_reentrant": False}
            )

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        states, _ = self._encode(x, lengths, None)
        return states, self.subsampling.count(lengths)

    def encode_with_intermediate(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states after the intermediate layer, and after all: -> 2 x (B, U, D).

        Both pass the same norm, so that one head can read either (Lee and Watanabe 2021).
        """
        states, middle = self._encode(x, lengths, self.intermediate_layer)
        return middle, states

    def _encode(self, x: Tensor, lengths: Tensor, middle: int | None) -> tuple[Tensor, Any]:
        """Return the final states, and those after the layer ``middle``."""
        if self.is_of_transformers:
            mask_input = partial(self._mask_input, lengths=self.subsampling.count(lengths))
            states, middle_states = run_body(self.body, x, lengths, mask_input, middle)
            if self.training and self.layerdrop > 0:
                states = states + zero_of(self.body)
            return states, middle_states
        middle_states = None
        for index, states in enumerate(self._states(x, lengths)):
            if index == middle:
                middle_states = self.body.normalize_output(states)
        return self.body.normalize_output(states), middle_states

    def _mask_input(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mask spans of the input of the first layer, in training."""
        if not self.training:
            return x
        vector = getattr(self.body, "masked_spec_embed", None)
        return mask_spans(
            x, lengths, frames=self.frame_masks, channels=self.channel_masks, vector=vector
        )

    def _states(self, x: Tensor, lengths: Tensor) -> Iterator[Tensor]:
        """Yield the input of the first layer, and the output of each."""
        mask = length_mask(lengths, x.shape[1], x.device)  # (B, U)
        x = self._mask_input(self.body.project(x), lengths)
        x, positions = self.body.embed_positions(x, mask)
        yield x
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        skipped = [False] * len(self.body.layers)
        if self.training and self.layerdrop > 0:  # the same layers on every rank
            skipped = (draw_for_step(len(skipped)) < self.layerdrop).tolist()
        for layer, is_skipped in zip(self.body.layers, skipped, strict=True):
            if is_skipped:
                x = x + zero_of(layer)
            elif recompute:
                x = checkpoint(layer, x, mask, positions, use_reentrant=False)
            else:
                x = layer(x, mask, positions)
            yield x


def zero_of(module: nn.Module) -> Any:
    """Return zero times the parameters that learn, because DDP waits for all their gradients."""
    return 0 * sum(p.sum() for p in module.parameters() if p.requires_grad)


class PretrainedTransformer(PretrainedEncoder):
    """Encode frames, and decode the tokens of their text, as Whisper does.

    language: of the texts, such as `en` or `pt-BR`; the model must know its first part.
    decoder_task: transcribe, or translate into English.
    context_seconds: shorter clips are padded with silence to this length. At 30, the decoder writes
        what Whisper's does; at 0, it repeats itself without end unless it is fine-tuned.

    The other arguments are those of `PretrainedEncoder`, but by default nothing is masked, dropped
    or skipped. The decoder shares the rates and `lora`.

    Attributes:
        generation: the tokens that the decoder may write; vocab_size: the number of all its tokens.
    """

    decoding_modules = ("decoder",)

    def __init__(
        self,
        *,
        config: DeclaredConfig,
        language: str,
        decoder_task: Literal["transcribe", "translate"] = "transcribe",
        context_seconds: Annotated[
            float, Range(low=0, high=30, advice="Pass 30 for what Whisper was trained on.")
        ] = 0.0,
        lora: Lora = None,
        **options: Any,
    ) -> None:
        defaults = dict.fromkeys(("activation_dropout", "layerdrop"), 0.0)
        defaults |= dict.fromkeys(("mask_time_prob", "mask_channel_prob"), 0.0)
        super().__init__(config=config, layers=None, lora=lora, **defaults | options)
        tokens = text_decoder_of(config)
        self.generation = GenerationSettings(
            start=text_start(tokens, language, decoder_task),
            end=tokens["end"],
            suppressed=tokens["suppressed"],
            suppressed_first=tokens["suppressed_first"],
            max_tokens=config["max_target_positions"],
            max_frames=config["max_source_positions"],
        )
        self.context_samples = seconds_to_samples(context_seconds, config["sample_rate"])
        self.vocab_size: int = config["vocab_size"]
        self.decoder = WhisperDecoder({**config, **self.rates})
        if lora is not None:
            add_adapters(self.decoder, **lora)

    def decode(self, tokens: Tensor, states: Tensor, lengths: Tensor) -> Tensor:
        """Decode whole texts: (B, L), (B, U, D), (B,) -> (B, L, D)."""
        return self.decoder(tokens, self.decoder.start(states, lengths))[0]


@torch.no_grad()
def warn_of_padding(features: Any, encoder: Any) -> None:
    """Log a warning if transformers runs the encoder, and padding changes the states of a clip."""
    if not getattr(encoder, "is_of_transformers", False):
        return
    samples = features.sample_rate
    audio = 3000 * torch.randn(2, samples, generator=torch.Generator().manual_seed(0))
    short = samples // 2
    was_training = encoder.training
    encoder.eval()
    batch, _ = encoder(*features(audio, torch.tensor([samples, short])))
    single, frames = encoder(*features(audio[1:, :short], torch.tensor([short])))
    encoder.train(was_training)
    padded, alone = batch[1, : int(frames)], single[0, : int(frames)]
    difference = float((padded - alone).abs().max() / alone.abs().max())
    if difference > MAX_PADDING_EFFECT:
        logger.warning(
            f"{type(encoder.body).__name__} of transformers sees the padding of a batch: a state "
            f"changed by {difference:.1%} of the largest. A text may depend on the clips that are "
            "recognized together."
        )


def fill_output_layer(hparams: Mapping[str, Any]) -> None:
    """Copy the embedding of a pretrained decoder to `seq_lin`: Whisper has one matrix for both."""
    transformer, seq_lin = hparams.get("Transformer"), hparams.get("seq_lin")
    if isinstance(transformer, PretrainedTransformer) and isinstance(seq_lin, nn.Linear):
        seq_lin.load_state_dict({"weight": transformer.decoder.embed_tokens.weight}, strict=False)
        if seq_lin.bias is not None:
            nn.init.zeros_(seq_lin.bias)


def text_decoder_of(config: Config) -> Mapping[str, Any]:
    """Return the special tokens of a decoder; raises ConfigError if the model has none."""
    tokens: Mapping[str, Any] | None = config.get("text_tokens")
    if tokens is None:
        raise ConfigError(
            f"`pretrained` must be a Whisper with its decoder, but is {config['model_type']}, or "
            "its folder has no generation_config.json. Without a decoder, train "
            "hparams/ctc_pretrained.yaml.",
            keys=("pretrained",),
        )
    return tokens


def text_start(tokens: Mapping[str, Any], language: str, task: str) -> list[int]:
    """Return the tokens that begin a text in a language."""
    code = whisper_language(language)
    languages, tasks = tokens["languages"], tokens["tasks"]
    if code not in (languages or ("en",)):
        raise ConfigError(
            f"`language` must be one of the model's, but is {language}. It has "
            f"{listed(languages, max_names=100) if languages else 'only en'}.",
            keys=("language",),
        )
    if not languages and task != "transcribe":
        raise ConfigError(
            "A Whisper of English only transcribes. Set `decoder_task: transcribe`.",
            keys=("decoder_task",),
        )
    chosen = [languages[code], tasks[task]] if languages else []
    return [tokens["start"], *chosen, tokens["no_times"]]
