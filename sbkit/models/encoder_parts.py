"""The parts of an encoder: how modules of any origin are called, from audio to states.

Legend: B utterances, S samples, T features, U frames of the encoder, L tokens, M values
of a feature, D model width.

A part takes a batch and its lengths, and returns frames and their number:

    forward(x, lengths=lengths) -> (y, lengths)

Lengths are whole numbers (B,), on the CPU in training. Audio is float in the scale of int16.
`docs/guide/own-parts.md` describes the attributes of a part.
"""

from collections.abc import Iterable, Mapping
from inspect import signature
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, nn

from sbkit.audio.lengths import Subsampling, append_silence, length_mask
from sbkit.base.errors import ConfigError

MAX_LISTED_LENGTHS = 5  # in an error
MAX_SPARE_FRAMES = 1  # at the end, where windows reach past the input
WRAPPER = "Wrap it in a class whose forward takes and returns both (docs/guide/own-parts.md)."


class EncoderPart:
    """A module of the YAML and its key: (B, T, ...), (B,) -> (B, U, D), (B,)."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self._is_layer = type(module).__module__.startswith("torch.nn.")
        if (getattr(module.forward, "__module__", None) or "").startswith("speechbrain."):
            raise ConfigError(
                f"`{name}` is {type(module).__name__} of SpeechBrain. Put it into "
                "SpeechBrainLayers or SpeechBrainTransformer of sbkit.models.speechbrain_parts.",
                keys=(name,),
            )
        if self._is_layer and any(hasattr(layer, "batch_first") for layer in module.modules()):
            raise ConfigError(
                f"`{name}` is {type(module).__name__} of torch.nn, whose layers see the padding or "
                f"mix utterances. {WRAPPER}",
                keys=(name,),
            )

    @property
    def subsampling(self) -> Subsampling:
        declared = getattr(self.module, "subsampling", 1)
        if isinstance(declared, int):
            return Subsampling(declared)
        if not isinstance(declared, Subsampling):
            raise ConfigError(
                f"`subsampling` of {type(self.module).__name__} in `{self.name}` must be a stride "
                f"or a Subsampling, but is a {type(declared).__name__}. Give it another name.",
                keys=(self.name,),
            )
        return declared

    def __call__(self, x: Tensor, lengths: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        try:
            output = self._call(x, lengths, **options)
        except TypeError as error:
            if extract_tb(error.__traceback__)[-1].filename != nn.modules.module.__file__:
                raise  # the module itself failed
            raise ConfigError(
                f"`{self.name}` is called with (x, lengths=lengths), which are whole numbers, but "
                f"{error}. {WRAPPER}",
                keys=(self.name,),
            ) from None
        is_pair = isinstance(output, tuple | list) and len(output) == 2
        if not is_pair or not all(isinstance(tensor, Tensor) for tensor in output):
            raise ConfigError(
                f"`{self.name}` must return (y, lengths), but returns an object of type "
                f"{type(output).__name__}. {WRAPPER}",
                keys=(self.name,),
            )
        y, frame_lengths = output
        if y.ndim != 3 or y.shape[0] != x.shape[0] or frame_lengths.shape != lengths.shape:
            raise ConfigError(
                f"`{self.name}` must return (B, T, D) and lengths (B,), but returns shape "
                f"{tuple(y.shape)} and {tuple(frame_lengths.shape)} for {tuple(x.shape)}. "
                f"{WRAPPER}",
                keys=(self.name,),
            )
        if frame_lengths.device.type == "cpu" and not torch.compiler.is_exporting():
            self._check_counts(x, lengths, y, frame_lengths)
        return y, frame_lengths

    def _call(self, x: Tensor, lengths: Tensor, **options: Any) -> Any:
        if self._is_layer:
            return self.module(x), lengths
        return self.module(x, lengths=lengths, **options)

    def _check_counts(self, x: Tensor, lengths: Tensor, y: Tensor, frame_lengths: Tensor) -> None:
        """Raise ConfigError unless there are as many frames as `subsampling` declares."""
        counts = frame_lengths.tolist()
        expected = self.subsampling.count(lengths).tolist()
        declared = int(self.subsampling.count(torch.tensor(x.shape[1])))
        num_spare = y.shape[1] - declared
        is_longer = max(counts, default=0) > y.shape[1]
        if counts != expected or is_longer or num_spare > MAX_SPARE_FRAMES:
            raise ConfigError(
                f"`{self.name}` returns {y.shape[1]} frames of {x.shape[1]}, with lengths "
                f"{counts[:MAX_LISTED_LENGTHS]}, but declares {declared} and "
                f"{expected[:MAX_LISTED_LENGTHS]}. Set `subsampling` of its class, or of "
                "SpeechBrainLayers (docs/guide/own-parts.md).",
                keys=(self.name,),
            )


class FeatureExtractor(EncoderPart):
    """Compute float32 features, zero in the padding: (B, S), (B,) -> (B, T, M), (B,).

    tail: zeros appended to each clip; a module with `normalizes_clips` excludes them from its
        measurements.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__("compute_features", module)

    def __call__(
        self, x: Tensor, lengths: Tensor, *, tail: int = 0, **options: Any
    ) -> tuple[Tensor, Tensor]:
        if tail and getattr(self.module, "normalizes_clips", False):
            options["measured"] = lengths
        audio, audio_lengths = append_silence(x.float(), lengths, tail)
        with torch.autocast(audio.device.type, enabled=False):
            features, frame_lengths = super().__call__(audio, audio_lengths, **options)
        features = features.float()
        mask = length_mask(frame_lengths, features.shape[1], features.device)
        return features * mask.unsqueeze(-1), frame_lengths


class Backbone(EncoderPart):
    """The last part of an encoder, which returns the states, and may decode tokens against them.

    `docs/guide/own-parts.md` describes the optional methods of its module. One more,
    ``encode_and_decode``, is for a decoder that trains only together with its encoder.
    """

    def encode_with_intermediate(
        self, x: Tensor, lengths: Tensor, **sides: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the states of the middle and of the end: -> 2 x (B, U, D)."""
        method = getattr(self.module, "encode_with_intermediate", None)
        if method is None:
            raise ConfigError(
                f"`inter_ctc_weight` is above 0.0, but {type(self.module).__name__} has no "
                "encode_with_intermediate. Set it to 0.0.",
                keys=("inter_ctc_weight",),
            )
        return method(x, lengths, **sides)

    def encode_and_decode(
        self, x: Tensor, lengths: Tensor, tokens: Tensor, **sides: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Encode x, and decode tokens (B, L): -> (B, U, D), (B,), (B, L, D)."""
        method = getattr(self.module, "encode_and_decode", None)
        if method is not None:
            return method(x, lengths, tokens, **sides)
        states, lengths = self(x, lengths, **sides)
        return states, lengths, self.decode(tokens, states, lengths)

    def decode(self, tokens: Tensor, states: Tensor, frame_lengths: Tensor) -> Tensor:
        method = getattr(self.module, "decode", None)
        if method is None:
            raise ConfigError(
                f"{type(self.module).__name__} in `{self.name}` has no attention decoder. "
                "Train with `ctc_weight: 1.0`, or decode with `attention_rescoring: False`.",
                keys=("ctc_weight",),
            )
        return method(tokens, states, frame_lengths)


def sides_of(module: nn.Module, sides: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the side inputs that `forward` of a module names among its arguments."""
    names = signature(module.forward).parameters if sides else ()
    return {name: value for name, value in sides.items() if name in names}


def decoding_modules(part: object) -> list[nn.Module]:
    """Return the children that only decoding runs."""
    children = (getattr(part, name, None) for name in getattr(part, "decoding_modules", ()))
    return [child for child in children if isinstance(child, nn.Module)]


def generates_texts(part: object) -> bool:
    """Return whether a part is a decoder with labels of its own, such as Whisper's."""
    return hasattr(part, "generation")


def label_heads(hparams: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return those of the named heads that have an output for each label of the run.

    `seq_lin` of a decoder with labels of its own has an output for each of those.
    """
    has_own_labels = generates_texts(hparams.get("Transformer"))
    return {name: hparams.get(name) for name in names if not (has_own_labels and name == "seq_lin")}


def label_embedding(part: object) -> nn.Embedding | None:
    """Return the embedding of the decoder's labels; None if it has none, or labels of its own."""
    if generates_texts(part):
        return None
    modules = (module for child in decoding_modules(part) for module in child.modules())
    return next((module for module in modules if isinstance(module, nn.Embedding)), None)
