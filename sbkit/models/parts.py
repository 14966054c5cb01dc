"""Adapters that call the YAML's modules, from audio to states, according to their signatures.

Legend: B utterances, S samples, T frames of features, U frames of the encoder, L tokens, M features
of a frame, D model width.

A module may take lengths in one of these forms:

- ``lengths`` (B,): absolute integers, on the CPU in training; fractions if SpeechBrain's own code
  defines ``forward``;
- ``wav_len`` or ``wav_lens`` (B,): SpeechBrain's fractions of the padded length;
- ``src_key_padding_mask`` (B, U): PyTorch's, true past the end of an utterance;
- ``attention_mask`` (B, U): Hugging Face's, 1 within an utterance.

A module, or its class, may declare these attributes:

- ``audio_scale``: the full scale of the audio that it takes: 1.0 as in wav2vec 2.0, or 32768 (the
  default) as in Kaldi, for the range of int16;
- ``precision = "fp32"``: it runs without autocast;
- ``frame_lengths(lengths)``: the frames that it returns for inputs of these lengths, (B,) -> (B,);
- ``samples_per_frame``, if it takes audio: the samples from one frame to the next. Without
  ``frame_lengths``, n samples have n // samples_per_frame frames.

If a module neither declares nor returns lengths, its frames are counted on silence.
"""

import inspect
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sbkit.audio.io import FULL_SCALE
from sbkit.audio.lengths import length_mask, to_relative
from sbkit.base.errors import ConfigError
from sbkit.base.units import SAMPLE_RATE

Lengths = TypeVar("Lengths", Tensor, npt.NDArray[np.int64])

CONTROL_FACTORS = (1.37, 2.4, 3.1013, 5.7)  # lengths to verify, in multiples of the shortest


@dataclass(frozen=True)
class Subsampling:
    """How many frames a stack of strided layers returns.

    Each layer turns n frames into floor((n + a) / s), padded or not, rounding down or up. So does
    their stack: it returns a frame every ``stride``, the first after ``stride - offset``.
    """

    stride: int
    offset: int

    def count(self, lengths: Lengths) -> Lengths:
        # Clipped first: integer division rounds towards zero in ONNX, and down in torch.
        return (lengths + self.offset).clip(min=0) // self.stride

    def then(self, other: "Subsampling") -> "Subsampling":
        return Subsampling(self.stride * other.stride, self.offset + other.offset * self.stride)


def find_subsampling(
    count: Callable[[int], int], *, part: str, unit: str, shortest: int
) -> Subsampling:
    """Find stride and offset from the frame counts of some twenty lengths, from ``shortest`` on."""
    first, second = count(shortest), count(2 * shortest)
    stride, offset = 1, 0
    if second > first:
        frames = second - first
        max_stride = shortest // (frames - 1) + 1 if frames > 1 else 2 * shortest
        lengths = range(shortest, shortest + 2 * max_stride)
        # The lengths at which the next two frames appear
        start, end = (shortest + bisect_left(lengths, first + n, key=count) for n in (1, 2))
        stride = max(end - start, 1)
        offset = (first + 1) * stride - start
    for length in (2 * shortest, *(int(shortest * factor) for factor in CONTROL_FACTORS)):
        counted = count(length)
        if counted != (length + offset) // stride or second <= first:
            raise ConfigError(
                f"`{part}` must return frames in proportion to its input, but has {first} for "
                f"{shortest} {unit}, {second} for {2 * shortest} and {counted} for {length}. "
                "Return (B, U, D) with time second, give its layers constant strides, or declare "
                "`frame_lengths(lengths)` in its class."
            )
    return Subsampling(stride, offset)


@contextmanager
def evaluation_mode(device: torch.device, *parts: nn.Module) -> Iterator[None]:
    """Run parts without gradients, dropout or autocast, then restore modes and random numbers."""
    modes = [(module, module.training) for part in parts for module in part.modules()]
    devices = [device] if device.type == "cuda" else []
    try:
        # Autocast would go on using casts of the weights that it made here, without gradients.
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=devices),
            torch.autocast(device.type, enabled=False),
        ):
            for part in parts:
                part.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training


# The children that only decoding runs: three of sbkit's, and SpeechBrain's token embedding.
DECODING_MODULES = ("embedding", "decoder", "decoder_norm", "custom_tgt_module")
TOKEN_EMBEDDINGS = ("token_embedding", "embedding", "custom_tgt_module")

# Converts absolute lengths (B,) of x (B, U, ...) to the form that a module takes.
LengthsForm = Callable[[Tensor, Tensor], Tensor]


def absolute_lengths(x: Tensor, lengths: Tensor) -> Tensor:
    """Return the lengths unchanged."""
    return lengths


def relative_lengths(x: Tensor, lengths: Tensor) -> Tensor:
    """Return fractions of the padded length: (B,)."""
    return to_relative(lengths, x.shape[1]).to(x.device, non_blocking=True)


FORMS: dict[str, LengthsForm] = {  # keyed by the name of the argument
    **dict.fromkeys(("lengths", "audio_lengths", "frame_lengths"), absolute_lengths),
    **dict.fromkeys(("wav_len", "wav_lens"), relative_lengths),
    "src_key_padding_mask": lambda x, lengths: ~length_mask(lengths, x.shape[1], x.device),
    "attention_mask": lambda x, lengths: length_mask(lengths, x.shape[1], x.device).long(),
}


def lengths_argument(
    method: Callable[..., object],
    *,
    part: str,
    signatures: str,
    other_arguments: tuple[str, ...] = (),
) -> tuple[str, LengthsForm | None]:
    """Return name and form of the argument that takes lengths; "" and None if there is none."""
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(method).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    names = list(parameters)[1:]  # the first takes the data
    required = [name for name in names if parameters[name].default is inspect.Parameter.empty]
    if not {*FORMS, *other_arguments}.issuperset(required):
        method_name = getattr(method, "__name__", "forward")
        raise_signature_error(
            part, signatures, f"its {method_name} takes ({', '.join(parameters)})"
        )
    name = next((name for name in FORMS if name in names), "")
    is_relative = name == "lengths" and method.__module__.startswith("speechbrain.")
    return name, relative_lengths if is_relative else FORMS.get(name)


def raise_signature_error(part: str, signatures: str, fault: str) -> NoReturn:
    """Raise ConfigError for a part that cannot be called, or returns the wrong thing."""
    raise ConfigError(
        f"`{part}` must have {signatures}, but {fault}. Change it, or wrap it in a module that "
        "does."
    )


class PartAdapter:
    """Call a module of the YAML with the lengths that it takes."""

    NAME: ClassVar[str]
    SIGNATURES: ClassVar[str]
    NDIMS: ClassVar[tuple[int, ...]] = (3,)  # dimensions that its output may have
    UNIT: ClassVar[str] = "samples"  # of its input lengths
    FIRST_LENGTH: ClassVar[int] = SAMPLE_RATE  # the shortest length that is measured
    OTHER_ARGUMENTS: ClassVar[tuple[str, ...]] = ()  # required arguments besides lengths
    METHOD: ClassVar[str] = "forward"  # the method to call, if the module has it

    def __init__(self, module: nn.Module) -> None:
        is_torchs = type(module).__module__.startswith("torch.")
        if is_torchs and any(getattr(m, "batch_first", True) is False for m in module.modules()):
            raise ConfigError(
                f"`{self.NAME}` must take the batch first, (B, U, D), but {type(module).__name__} "
                "takes time first. Add `batch_first: True` to it."
            )
        if getattr(module, "precision", "fp32") != "fp32":
            raise ConfigError(
                f"`precision` of `{self.NAME}` can only be fp32, which turns autocast off, but is "
                f"{module.precision!r}. Remove it to use the precision of the run."
            )
        self.module = module
        self._subsampling: Subsampling | None = None
        self._method: Callable[..., object] = getattr(module, self.METHOD, None) or module.forward
        self._callable = module if self._method == module.forward else self._method  # runs hooks
        self._argument, self._form = lengths_argument(
            self._method,
            part=self.NAME,
            signatures=self.SIGNATURES,
            other_arguments=self.OTHER_ARGUMENTS,
        )
        self._scale = getattr(module, "audio_scale", FULL_SCALE) / FULL_SCALE

    @property
    def accepts_lengths(self) -> bool:
        """Return whether it takes absolute lengths, so that padding changes nothing."""
        return self._form is absolute_lengths

    def declared_lengths(self, lengths: Tensor) -> Tensor | None:
        """Count frames as the module declares; None if it does not: (B,) -> (B,)."""
        if callable(count_frames := getattr(self.module, "frame_lengths", None)):
            return count_frames(lengths)
        if isinstance(step := getattr(self.module, "samples_per_frame", None), int):
            return lengths // step
        return None

    def scaled(self, audio: Tensor) -> Tensor:
        """Convert audio to float32 in the scale of the module."""
        return audio.float() if self._scale == 1.0 else audio.float() * self._scale

    def _invoke(self, method: Callable[..., Any], *inputs: Tensor, **options: object) -> Any:
        """Call a method of the module; in float32 without autocast, if the module declares fp32."""
        if getattr(self.module, "precision", None) is None:
            return method(*inputs, **options)
        with torch.autocast(inputs[0].device.type, enabled=False):
            return method(*(x.float() if x.is_floating_point() else x for x in inputs), **options)

    def run(self, x: Tensor, lengths: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        """Return the frames (B, U, ...) and the number of frames of each utterance (B,)."""
        output, y = self._call(x, lengths, **options)
        if y.ndim not in self.NDIMS or y.shape[0] != x.shape[0]:
            self._refuse(f"it returns a tensor of shape {tuple(y.shape)} for {tuple(x.shape)}")
        return y, self._frame_lengths(x, y, lengths, output)

    def _call(self, x: Tensor, lengths: Tensor, **options: object) -> tuple[object, Tensor]:
        """Return the module's output, and its tensor: all, the first, or `last_hidden_state`."""
        if self._form is not None:
            options[self._argument] = self._form(x, lengths)
        output = self._invoke(self._callable, x, **options)
        y = output[0] if isinstance(output, tuple | list) and output else output
        y = y.get("last_hidden_state") if isinstance(y, Mapping) else y
        y = getattr(y, "last_hidden_state", y)
        if not isinstance(y, Tensor):
            self._refuse(f"it returns an object of type {type(y).__name__}")
        return output, y

    def _refuse(self, fault: str) -> NoReturn:
        raise_signature_error(self.NAME, self.SIGNATURES, fault)

    def _frame_lengths(self, x: Tensor, y: Tensor, lengths: Tensor, output: object) -> Tensor:
        """Return the lengths that came with y, else those declared, else those measured."""
        frame_lengths = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if (
            not isinstance(frame_lengths, Tensor)
            or frame_lengths.is_floating_point()
            or frame_lengths.shape != y.shape[:1]
        ):
            frame_lengths = self.declared_lengths(lengths)
        if frame_lengths is None:
            return self.subsampling(x).count(lengths).clamp(max=y.shape[1])
        on_host = frame_lengths.device.type == "cpu" and not torch.compiler.is_exporting()
        if on_host and (longest := max(frame_lengths.tolist(), default=0)) > y.shape[1]:
            self._refuse(
                f"it returns {y.shape[1]} frames with lengths of up to {longest}: it must count "
                "what its strides leave"
            )
        return frame_lengths

    def subsampling(self, x: Tensor) -> Subsampling:
        """Return the subsampling: as declared, or else measured once, on silence shaped like x."""

        def count(length: int) -> int:
            lengths = torch.tensor([length], device="cpu")
            declared = self.declared_lengths(lengths)
            if declared is not None:
                return int(declared)
            return self._call(x.new_zeros(1, length, *x.shape[2:]), lengths)[1].shape[1]

        if self._subsampling is None:
            with evaluation_mode(x.device, self.module):
                self._subsampling = find_subsampling(
                    count, part=self.NAME, unit=self.UNIT, shortest=self.FIRST_LENGTH
                )
        return self._subsampling


class FeatureExtractor(PartAdapter):
    """Compute float32 features, zero in the padding: (B, S), (B,) -> (B, T, M), (B,)."""

    NAME = "compute_features"
    SIGNATURES = (
        "forward(audio, lengths) -> (features, lengths), or forward(audio) -> features, with audio "
        "(B, S), features (B, T, M) and lengths (B,) in whole samples and frames"
    )

    def __call__(self, audio: Tensor, audio_lengths: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(audio.device.type, enabled=False):
            features, frame_lengths = self.run(self.scaled(audio), audio_lengths)
        features = features.float()
        mask = length_mask(frame_lengths, features.shape[1], features.device)
        return features * mask.unsqueeze(-1), frame_lengths


class FrontEnd(PartAdapter):
    """Subsample features: (B, T, M), (B,) -> (B, U, D), (B,)."""

    NAME, NDIMS = "CNN", (3, 4)
    SIGNATURES = (
        "forward(features, lengths) -> (x, lengths), or forward(features) -> x, with features "
        "(B, T, M), x (B, U, D) or (B, U, C, F) and lengths (B,) in whole frames"
    )
    UNIT, FIRST_LENGTH = "frames", 400  # four seconds, longer than any kernel

    def __call__(self, features: Tensor, frame_lengths: Tensor) -> tuple[Tensor, Tensor]:
        x, frame_lengths = self.run(features, frame_lengths)
        return x.flatten(2), frame_lengths


class Backbone(PartAdapter):
    """The last part of an encoder, which returns the states, and may decode tokens against them.

    The module may have two more methods: ``encode_with_intermediate(x, lengths)`` for inter-CTC,
    which returns the states after its middle and after its end, and ``decode(tokens, states,
    lengths)``. Its attribute ``decoding_modules`` names the children that only decoding runs; the
    default is DECODING_MODULES.
    """

    METHOD = "encode"

    def __init__(self, module: nn.Module, *, padding: int = 0) -> None:
        super().__init__(module)
        self._pad_option: dict[str, object] = {}
        if "pad_idx" in inspect.signature(self._method).parameters:  # SpeechBrain's
            self._pad_option["pad_idx"] = padding  # the token that pads rows
            # Its decoder passes PyTorch a bool mask and a float mask.
            warnings.filterwarnings("ignore", "Support for mismatched key_padding_mask")

    def encode(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return self.run(x, lengths, **self._pad_option)

    def encode_with_intermediate(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states of the middle and the end, and their lengths: 2 x (B, U, D), (B,)."""
        method = getattr(self.module, "encode_with_intermediate", None)
        if method is None:
            raise ConfigError(
                f"`inter_ctc_weight` is above 0.0, but {type(self.module).__name__} has no method "
                "encode_with_intermediate(x, lengths). Set it to 0.0, or use sbkit's Transformer."
            )
        intermediate, states = self._invoke(method, x, lengths)
        return intermediate, states, self._frame_lengths(x, states, lengths, None)

    def encode_and_decode(
        self, x: Tensor, lengths: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Encode x, and decode tokens (B, L): -> (B, U, D), (B,), (B, L, D)."""
        if self._pad_option:
            states, decoded = self.module(
                x, tokens, relative_lengths(x, lengths), **self._pad_option
            )
            return states, lengths, decoded
        states, lengths = self.encode(x, lengths)
        return states, lengths, self.decode(tokens, states, lengths)

    def decode(self, tokens: Tensor, states: Tensor, frame_lengths: Tensor) -> Tensor:
        method = getattr(self.module, "decode", None)
        if not callable(method):
            raise ConfigError(
                f"{type(self.module).__name__} in `{self.NAME}` has no decode(tokens, states, "
                "lengths), the attention decoder. Add it, or use CTC only: train with "
                "--ctc_weight=1.0, decode with attention_rescoring: False."
            )
        if self._pad_option:
            frame_lengths = frame_lengths.to(states.device, non_blocking=True)
        output = self._invoke(method, tokens, states, frame_lengths)
        # SpeechBrain's decoder also returns its attention weights.
        return output[0] if isinstance(output, tuple) else output

    def decoding_modules(self) -> tuple[nn.Module, ...]:
        names = getattr(self.module, "decoding_modules", DECODING_MODULES)
        children = (getattr(self.module, name, None) for name in names)
        return tuple(child for child in children if isinstance(child, nn.Module))


class TransformerPart(Backbone):
    """Encode frames: (B, U, D), (B,) -> (B, U, D), (B,)."""

    NAME, OTHER_ARGUMENTS = "Transformer", ("pad_idx",)
    SIGNATURES = (
        "encode(x, lengths) -> y, SpeechBrain's encode(src, wav_len, pad_idx) -> y, "
        "forward(x, lengths) -> y, or forward(x) -> y, with x and y (B, U, D), or y the first of a "
        "tuple, and lengths (B,) in whole frames"
    )

    def _frame_lengths(self, x: Tensor, y: Tensor, lengths: Tensor, output: object) -> Tensor:
        if y.shape[:2] != x.shape[:2]:
            self._refuse(f"it returns a tensor of shape {tuple(y.shape)} for {tuple(x.shape)}")
        return lengths


class WaveformPart(Backbone):
    """Encode audio: (B, S) in the scale that it declares, (B,) -> (B, U, D), (B,)."""

    NAME = "encoder"
    SIGNATURES = (
        "forward(audio, audio_lengths) -> (states, frame_lengths), or forward(audio) -> states, "
        "with audio (B, S), states (B, U, D) and lengths (B,) in whole samples and frames"
    )


def token_embedding(part: object) -> nn.Embedding | None:
    """Return the embedding of the decoder's tokens, if any; others may have any size."""
    if not callable(getattr(part, "decode", None)):
        return None
    children = (getattr(part, name, None) for name in TOKEN_EMBEDDINGS)
    modules = (m for child in children if isinstance(child, nn.Module) for m in child.modules())
    return next((module for module in modules if isinstance(module, nn.Embedding)), None)
