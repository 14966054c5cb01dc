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
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sbkit.audio.io import FULL_SCALE
from sbkit.audio.lengths import length_mask, to_relative
from sbkit.base.errors import ConfigError
from sbkit.base.units import SAMPLE_RATE

Lengths = TypeVar("Lengths", Tensor, npt.NDArray[np.int64])
# Converts absolute lengths (B,) of x (B, U, ...) to the form that a module takes.
LengthConverter = Callable[[Tensor, Tensor], Tensor]

VERIFICATION_FACTORS = (1.37, 2.4, 3.1013, 5.7)  # lengths to verify, in multiples of the shortest
# The children that only decoding runs: three of sbkit's, and SpeechBrain's token embedding.
DECODING_MODULES = ("embedding", "decoder", "decoder_norm", "custom_tgt_module")
TOKEN_EMBEDDINGS = ("token_embedding", "embedding", "custom_tgt_module")


# The form of the lengths that a module takes


def absolute_lengths(x: Tensor, lengths: Tensor) -> Tensor:
    """Return the lengths unchanged."""
    return lengths


def relative_lengths(x: Tensor, lengths: Tensor) -> Tensor:
    """Return fractions of the padded length: (B,)."""
    return to_relative(lengths, x.shape[1]).to(x.device, non_blocking=True)


LENGTH_CONVERTERS: dict[str, LengthConverter] = {  # by the name of the argument
    "lengths": absolute_lengths,
    "audio_lengths": absolute_lengths,
    "frame_lengths": absolute_lengths,
    "wav_len": relative_lengths,
    "wav_lens": relative_lengths,
    "src_key_padding_mask": lambda x, lengths: ~length_mask(lengths, x.shape[1], x.device),
    "attention_mask": lambda x, lengths: length_mask(lengths, x.shape[1], x.device).long(),
}


class LengthsArgument(NamedTuple):
    """The argument of a method that takes lengths."""

    name: str
    convert: LengthConverter


def lengths_argument(
    method: Callable[..., object],
    *,
    part: str,
    signatures: str,
    other_arguments: tuple[str, ...] = (),
) -> LengthsArgument | None:
    """Return the argument that takes lengths; None if there is none.

    Raises ConfigError if the method requires more than data, lengths and ``other_arguments``.
    """
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(method).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    names = list(parameters)[1:]  # the first takes the data
    required = [name for name in names if parameters[name].default is inspect.Parameter.empty]
    if not {*LENGTH_CONVERTERS, *other_arguments}.issuperset(required):
        method_name = getattr(method, "__name__", "forward")
        raise_signature_error(
            part, signatures, f"its {method_name} takes ({', '.join(parameters)})"
        )
    for name, convert in LENGTH_CONVERTERS.items():
        if name in names:
            is_speechbrain = method.__module__.startswith("speechbrain.")
            takes_fractions = name == "lengths" and is_speechbrain
            return LengthsArgument(name, relative_lengths if takes_fractions else convert)
    return None


def raise_signature_error(part: str, signatures: str, fault: str) -> NoReturn:
    """Raise ConfigError for a part that cannot be called, or returns the wrong thing."""
    raise ConfigError(
        f"`{part}` must have {signatures}, but {fault}. Change it, or wrap it in a module that "
        "does."
    )


# The number of frames


@dataclass(frozen=True)
class Subsampling:
    """The number of frames that strided layers return: (n + offset) // stride for n inputs.

    This holds for a single layer, whether or not it pads and whether it rounds down or up.
    Therefore it holds for a stack of layers. There is a frame every ``stride`` inputs, the first
    one after ``stride - offset`` inputs.
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
    """Find stride and offset by calling ``count`` for about twenty input lengths.

    ``count`` returns the number of frames for a length, and ``shortest`` is the shortest length
    that it is called with. Raises ConfigError if the frames are not in proportion to the length.
    """
    first = count(shortest)
    second = count(2 * shortest)

    def refuse(length: int, counted: int) -> NoReturn:
        raise ConfigError(
            f"`{part}` must return frames in proportion to its input, but has {first} for "
            f"{shortest} {unit}, {second} for {2 * shortest} and {counted} for {length}. "
            "Return (B, U, D) with time second, give its layers constant strides, or declare "
            "`frame_lengths(lengths)` in its class."
        )

    num_new = second - first
    if num_new <= 0:
        refuse(4 * shortest, count(4 * shortest))
    max_stride = 2 * shortest if num_new == 1 else shortest // (num_new - 1) + 1
    lengths = range(shortest, shortest + 2 * max_stride)
    next_frame_at = shortest + bisect_left(lengths, first + 1, key=count)
    frame_after_at = shortest + bisect_left(lengths, first + 2, key=count)
    stride = max(frame_after_at - next_frame_at, 1)
    offset = (first + 1) * stride - next_frame_at
    for factor in (2, *VERIFICATION_FACTORS):
        length = int(shortest * factor)
        counted = count(length)
        if counted != (length + offset) // stride:
            refuse(length, counted)
    return Subsampling(stride, offset)


def declared_lengths(module: nn.Module, lengths: Tensor) -> Tensor | None:
    """Count frames as the module declares; None if it does not: (B,) -> (B,)."""
    count_frames = getattr(module, "frame_lengths", None)
    if callable(count_frames):
        return count_frames(lengths)
    samples_per_frame = getattr(module, "samples_per_frame", None)
    if isinstance(samples_per_frame, int | np.integer):
        return lengths // int(samples_per_frame)
    return None


def returned_lengths(output: object, y: Tensor) -> Tensor | None:
    """Return the second element of a module's output if it can be the lengths of y: (B,)."""
    if not isinstance(output, tuple | list) or len(output) < 2:
        return None
    lengths = output[1]
    if not isinstance(lengths, Tensor) or lengths.is_floating_point():
        return None
    return lengths if lengths.shape == y.shape[:1] else None


# Calling a module


@contextmanager
def evaluation_mode(device: torch.device, *parts: nn.Module) -> Iterator[None]:
    """Run parts without gradients, dropout or autocast, then restore modes and random numbers."""
    modes = [(module, module.training) for part in parts for module in part.modules()]
    devices = [device] if device.type == "cuda" else []
    try:
        # Autocast caches its casts of the weights. Casts made here would have no gradients, and
        # training would go on to use them.
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


def check_attributes(module: nn.Module, part: str) -> None:
    """Raise ConfigError for a `batch_first` or a `precision` that is not supported."""
    is_torch_module = type(module).__module__.startswith("torch.")
    if is_torch_module and any(getattr(m, "batch_first", True) is False for m in module.modules()):
        raise ConfigError(
            f"`{part}` must take the batch first, (B, U, D), but {type(module).__name__} "
            "takes time first. Add `batch_first: True` to it."
        )
    if getattr(module, "precision", "fp32") != "fp32":
        raise ConfigError(
            f"`precision` of `{part}` can only be fp32, which turns autocast off, but is "
            f"{module.precision!r}. Remove it to use the precision of the run."
        )


def output_tensor(output: object) -> object:
    """Return a module's output, or its first element, or the `last_hidden_state` of either."""
    if isinstance(output, tuple | list) and output:
        output = output[0]
    if isinstance(output, Mapping):
        return output.get("last_hidden_state")
    return getattr(output, "last_hidden_state", output)


class PartAdapter:
    """Call a module of the YAML with the lengths that it takes, and count its frames."""

    NAME: ClassVar[str]
    SIGNATURES: ClassVar[str]
    NDIMS: ClassVar[tuple[int, ...]] = (3,)  # the numbers of dimensions that its output may have
    UNIT: ClassVar[str] = "samples"  # that its input lengths are counted in
    SHORTEST_MEASURED: ClassVar[int] = SAMPLE_RATE  # the shortest length for `find_subsampling`
    OTHER_ARGUMENTS: ClassVar[tuple[str, ...]] = ()  # required arguments besides lengths
    METHOD: ClassVar[str] = "forward"  # the method to call, if the module has it

    def __init__(self, module: nn.Module) -> None:
        check_attributes(module, self.NAME)
        self.module = module
        self._subsampling: Subsampling | None = None
        self._method: Callable[..., object] = getattr(module, self.METHOD, None) or module.forward
        # Calling the module, instead of its forward, also runs its hooks.
        self._callable = module if self._method == module.forward else self._method
        self._lengths_argument = lengths_argument(
            self._method,
            part=self.NAME,
            signatures=self.SIGNATURES,
            other_arguments=self.OTHER_ARGUMENTS,
        )
        self._scale = getattr(module, "audio_scale", FULL_SCALE) / FULL_SCALE

    @property
    def takes_absolute_lengths(self) -> bool:
        """Return whether the module takes absolute lengths, so that padding changes nothing."""
        argument = self._lengths_argument
        return argument is not None and argument.convert is absolute_lengths

    def scaled(self, audio: Tensor) -> Tensor:
        """Convert audio to float32 in the scale of the module."""
        return audio.float() if self._scale == 1.0 else audio.float() * self._scale

    def run(self, x: Tensor, lengths: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        """Return the frames (B, U, ...) and the number of frames of each utterance (B,)."""
        output, y = self._call(x, lengths, **options)
        self._check_shape(x, y)
        return y, self._frame_lengths(x, y, lengths, output)

    def _call(self, x: Tensor, lengths: Tensor, **options: object) -> tuple[object, Tensor]:
        """Return the module's whole output, and the tensor of frames in it."""
        if self._lengths_argument is not None:
            options[self._lengths_argument.name] = self._lengths_argument.convert(x, lengths)
        output = self._invoke(self._callable, x, **options)
        y = output_tensor(output)
        if not isinstance(y, Tensor):
            self._refuse(f"it returns an object of type {type(y).__name__}")
        return output, y

    def _invoke(self, method: Callable[..., Any], *inputs: Tensor, **options: object) -> Any:
        """Call a method of the module; in float32 without autocast, if the module declares fp32."""
        if getattr(self.module, "precision", None) is None:
            return method(*inputs, **options)
        with torch.autocast(inputs[0].device.type, enabled=False):
            return method(*(x.float() if x.is_floating_point() else x for x in inputs), **options)

    def _check_shape(self, x: Tensor, y: Tensor) -> None:
        if y.ndim not in self.NDIMS or y.shape[0] != x.shape[0]:
            self._refuse(f"it returns a tensor of shape {tuple(y.shape)} for {tuple(x.shape)}")

    def _refuse(self, fault: str) -> NoReturn:
        raise_signature_error(self.NAME, self.SIGNATURES, fault)

    def _frame_lengths(self, x: Tensor, y: Tensor, lengths: Tensor, output: object) -> Tensor:
        """Return the lengths that came with y, else those declared, else those measured."""
        frame_lengths = returned_lengths(output, y)
        if frame_lengths is None:
            frame_lengths = declared_lengths(self.module, lengths)
        if frame_lengths is None:
            return self.subsampling(x).count(lengths).clamp(max=y.shape[1])
        if frame_lengths.device.type == "cpu" and not torch.compiler.is_exporting():
            longest = max(frame_lengths.tolist(), default=0)
            if longest > y.shape[1]:
                self._refuse(
                    f"it returns {y.shape[1]} frames with lengths of up to {longest}: it must "
                    "count what its strides leave"
                )
        return frame_lengths

    def subsampling(self, x: Tensor) -> Subsampling:
        """Return the subsampling: as declared, or else measured once, on silence shaped like x."""

        def count(length: int) -> int:
            lengths = torch.tensor([length], device="cpu")
            declared = declared_lengths(self.module, lengths)
            if declared is not None:
                return int(declared)
            _, y = self._call(x.new_zeros(1, length, *x.shape[2:]), lengths)
            return y.shape[1]

        if self._subsampling is None:
            with evaluation_mode(x.device, self.module):
                self._subsampling = find_subsampling(
                    count, part=self.NAME, unit=self.UNIT, shortest=self.SHORTEST_MEASURED
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

    NAME = "CNN"
    NDIMS = (3, 4)
    SIGNATURES = (
        "forward(features, lengths) -> (x, lengths), or forward(features) -> x, with features "
        "(B, T, M), x (B, U, D) or (B, U, C, F) and lengths (B,) in whole frames"
    )
    UNIT = "frames"
    SHORTEST_MEASURED = 400  # four seconds, longer than any kernel

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
        self._check_shape(x, states)
        return intermediate, states, self._frame_lengths(x, states, lengths, None)

    def encode_and_decode(
        self, x: Tensor, lengths: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Encode x, and decode tokens (B, L): -> (B, U, D), (B,), (B, L, D)."""
        if self._pad_option:
            fractions = relative_lengths(x, lengths)
            states, decoded = self._invoke(self.module, x, tokens, fractions, **self._pad_option)
            self._check_shape(x, states)
            return states, self._frame_lengths(x, states, lengths, None), decoded
        states, lengths = self.encode(x, lengths)
        return states, lengths, self.decode(tokens, states, lengths)

    def decode(self, tokens: Tensor, states: Tensor, frame_lengths: Tensor) -> Tensor:
        method = getattr(self.module, "decode", None)
        if not callable(method):
            raise ConfigError(
                f"{type(self.module).__name__} in `{self.NAME}` has no decode(tokens, states, "
                "lengths), the attention decoder. Add it, or use CTC only: train with "
                "`ctc_weight: 1.0`, decode with `attention_rescoring: False`."
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

    NAME = "Transformer"
    OTHER_ARGUMENTS = ("pad_idx",)
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
    """Return the embedding of the decoder's tokens; None for a part that does not decode.

    Only the children in TOKEN_EMBEDDINGS are searched: the size of another embedding need not be
    that of the vocabulary.
    """
    if not callable(getattr(part, "decode", None)):
        return None
    for name in TOKEN_EMBEDDINGS:
        child = getattr(part, name, None)
        if isinstance(child, nn.Module):
            for module in child.modules():
                if isinstance(module, nn.Embedding):
                    return module
    return None
