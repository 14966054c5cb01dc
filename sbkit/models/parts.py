"""The modules of the YAML between audio and states: how they are called, and what they return.

Legend: B utterances, S samples, T frames of features, U frames of the encoder, L tokens, M features
of a frame, D model width.

How a module is called follows from its signature (`sbkit/models/signatures.py`). It declares, by
attributes of its class or of itself:

- ``audio_scale``: the largest amplitude of the audio that it takes: 1.0 as wav2vec 2 has it, or
  that of int16, 32768, as Kaldi has it, which is what it gets otherwise;
- ``precision = "fp32"``: autocast leaves it alone;
- ``frame_lengths(lengths)`` or ``output_lengths(lengths)``: how many frames it makes of inputs of
  these lengths, (B,) -> (B,);
- ``samples_per_frame``, of a module that takes audio: the samples from one frame to the next.
  Without ``frame_lengths``, n samples have n // samples_per_frame frames.

Where a module declares no lengths and returns none, they are those of silence, found by trial.
"""

import inspect
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sbkit.audio.io import FULL_SCALE
from sbkit.audio.lengths import length_mask, to_relative
from sbkit.base.errors import SbkitError
from sbkit.base.text import plural
from sbkit.base.units import SAMPLE_RATE
from sbkit.models.signatures import (
    ENCODER_SIGNATURES,
    FEATURE_SIGNATURES,
    FRONT_END_SIGNATURES,
    TRANSFORMER_SIGNATURES,
    check_batch_first,
    described,
    first_tensor,
    lengths_argument,
    raise_signature_error,
)
from sbkit.models.subsampling import Subsampling, as_evaluated, find_subsampling
from sbkit.models.transformer import raise_no_decoder

# Children that only decoding runs: sbkit's three, and SpeechBrain's embedding of tokens.
DECODING_MODULES = ("embedding", "decoder", "decoder_norm", "custom_tgt_module")
TOKEN_EMBEDDINGS = ("token_embedding", "embedding", "custom_tgt_module")
RELATIVE_POSITIONS = "RelPosMHAXL"  # SpeechBrain's attention that is given positions from outside


class Part:
    """A module of the YAML, called with the lengths that it takes."""

    NAME: ClassVar[str]
    SIGNATURES: ClassVar[str]
    NDIMS: ClassVar[tuple[int, ...]] = (3,)  # of what it returns
    UNIT: ClassVar[str] = "samples"  # of what it is given
    SHORTEST: ClassVar[int] = SAMPLE_RATE  # length that is tried first
    OTHERS: ClassVar[tuple[str, ...]] = ()  # arguments besides lengths that it may need
    METHOD: ClassVar[str] = "forward"  # that is called, where the module has it

    def __init__(self, module: nn.Module) -> None:
        check_batch_first(module, self.NAME)
        self.module: Any = module
        self._found: Subsampling | None = None  # by trial
        self._signed: Callable[..., Any] = getattr(module, self.METHOD, None) or module.forward
        self._method = module if self._signed == module.forward else self._signed
        self._takes = lengths_argument(
            self._signed, part=self.NAME, signatures=self.SIGNATURES, others=self.OTHERS
        )
        if getattr(module, "precision", "fp32") != "fp32":
            raise SbkitError(
                f"`precision` of `{self.NAME}` must be fp32, where autocast is to leave it alone, "
                f"but is {module.precision!r}. Take it out for the precision of the run."
            )

    @property
    def accepts_lengths(self) -> bool:
        """Return whether it takes lengths as sbkit's do, so that padding changes nothing."""
        return self._takes.form == "absolute"

    def declared_lengths(self, lengths: Tensor) -> Tensor | None:
        """Return the frames of inputs of these lengths as the module declares them: (B,) -> (B,).

        None where it declares nothing.
        """
        for name in ("frame_lengths", "output_lengths"):
            if callable(declared := getattr(self.module, name, None)):
                counted: Tensor = declared(lengths)
                return counted
        if isinstance(step := getattr(self.module, "samples_per_frame", None), int):
            return lengths // step
        return None

    def _uncast(self, x: Tensor) -> tuple[AbstractContextManager[Any], Tensor]:
        """Turn autocast off for a module that declares fp32, and give it float32."""
        if getattr(self.module, "precision", None) is None:
            return nullcontext(), x
        return torch.autocast(x.device.type, enabled=False), x.float()

    def run(self, x: Tensor, lengths: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        """Return the frames (B, U, ...), and how many of them each utterance has (B,)."""
        context, x = self._uncast(x)
        with context:
            output = self._method(x, **self._takes.of(x, lengths), **more)
        y = first_tensor(output, part=self.NAME, signatures=self.SIGNATURES)
        if y.ndim not in self.NDIMS or y.shape[0] != x.shape[0]:
            came = f"it returns {described(y)} for {plural(x.shape[0], 'utterance')}"
            raise_signature_error(self.NAME, self.SIGNATURES, came)
        return y, self._frame_lengths(x, y, lengths, output)

    def _frame_lengths(self, x: Tensor, y: Tensor, lengths: Tensor, output: Any) -> Tensor:
        """Return the lengths that came beside y, or are declared, or are found by trial."""
        second: Any = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        are_lengths = isinstance(second, Tensor) and not second.is_floating_point()
        if are_lengths and second.shape == y.shape[:1]:
            found: Tensor | None = second
        else:
            found = self.declared_lengths(lengths)
        if found is None:
            return self._measured(x).count(lengths).clamp(max=y.shape[1])
        self._compare(y, found)
        return found

    def _compare(self, y: Tensor, lengths: Tensor) -> None:
        """Refuse lengths beyond the frames, where the host has them and no exporter traces."""
        if lengths.device.type != "cpu" or torch.compiler.is_exporting() or not len(lengths):
            return
        if (longest := int(lengths.max())) > y.shape[1]:
            came = f"it returns {y.shape[1]} frames and has lengths up to {longest}"
            what = f"{came}: count what its strides leave"
            raise_signature_error(self.NAME, self.SIGNATURES, what)

    def _measured(self, x: Tensor) -> Subsampling:
        """Measure, once, what it leaves of silent inputs (1, S, ...) like x."""
        if self._found is None:
            with as_evaluated(x.device, self.module):
                self._found = self._measure(x)
        return self._found

    def _measure(self, x: Tensor) -> Subsampling:
        def count(length: int) -> int:
            silence = x.new_zeros(1, length, *x.shape[2:])
            lengths = torch.tensor([length], device="cpu")
            output = self._method(silence, **self._takes.of(silence, lengths))
            return first_tensor(output, part=self.NAME, signatures=self.SIGNATURES).shape[1]

        shortest = self.SHORTEST
        for factor in (4, 4):  # a kernel may be longer than what is tried first
            try:
                count(shortest)
            except RuntimeError:
                shortest *= factor
        return find_subsampling(count, part=self.NAME, unit=self.UNIT, shortest=shortest)


def scale_of(module: nn.Module, name: str) -> float:
    """Return the factor from int16's scale to the one that a module declares."""
    declared: Any = getattr(module, "audio_scale", FULL_SCALE)
    if not isinstance(declared, int | float) or not declared > 0:
        raise SbkitError(
            f"`audio_scale` of `{name}` must be the largest amplitude that it takes, such as 1.0 "
            f"or {FULL_SCALE}, but is {declared!r}. Correct it in its class."
        )
    return declared / FULL_SCALE


def scaled(audio: Tensor, scale: float) -> Tensor:
    """Convert audio to float32, in the scale that is declared."""
    return audio.float() if scale == 1.0 else audio.float() * scale


class FeatureExtractor(Part):
    """Compute features in float32, zero past each length: (B, S), (B,) -> (B, T, M), (B,)."""

    NAME, SIGNATURES = "compute_features", FEATURE_SIGNATURES

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._scale = scale_of(module, self.NAME)

    def __call__(self, audio: Tensor, audio_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Compute them, whatever the autocast state."""
        with torch.autocast(audio.device.type, enabled=False):
            features, frame_lengths = self.run(scaled(audio, self._scale), audio_lengths)
        features = features.float()
        mask = length_mask(frame_lengths, features.shape[1], features.device)
        return features * mask.unsqueeze(-1), frame_lengths


class FrontEnd(Part):
    """Subsample features: (B, T, M), (B,) -> (B, U, D), (B,)."""

    NAME, SIGNATURES, NDIMS = "CNN", FRONT_END_SIGNATURES, (3, 4)
    UNIT, SHORTEST = "frames", 100  # one second

    def __call__(self, features: Tensor, frame_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Call the module; raises SbkitError when what it returns has another shape."""
        x, frame_lengths = self.run(features, frame_lengths)
        return x.flatten(2), frame_lengths


class TransformerPart(Part):
    """Encode frames, and decode tokens against them: (B, U, D), (B,) -> (B, U, D), (B,).

    The module may have two methods more: ``encode_with_intermediate(x, lengths)``, which returns
    the states of its middle first, for inter-CTC, and ``decode(tokens, states, lengths)``. What
    only decoding runs is named by ``decoding_modules``, a tuple of the names of its children;
    without it, the usual names count.
    """

    NAME, SIGNATURES = "Transformer", TRANSFORMER_SIGNATURES
    METHOD = "encode"
    OTHERS: ClassVar[tuple[str, ...]] = ("pad_idx", "pos_embs")

    def __init__(self, module: nn.Module, *, padding: int = 0) -> None:
        """Wrap the module; ``padding`` is the token that pads rows, for SpeechBrain's decoder."""
        super().__init__(module)
        self._padding = padding
        parameters = inspect.signature(self._signed).parameters
        self._pads = "pad_idx" in parameters
        self._positions = (
            "pos_embs" in parameters and getattr(module, "attention_type", "") == RELATIVE_POSITIONS
        )
        if self._pads:  # its decoder gives PyTorch a mask of bool beside one of float
            warnings.filterwarnings("ignore", "Support for mismatched key_padding_mask")

    def encode(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encode; raises SbkitError when the module returns another number of frames."""
        more: dict[str, Any] = {"pad_idx": self._padding} if self._pads else {}
        if self._positions:
            more["pos_embs"] = _positions(x.shape[-1], x.device)(x)
        return self.run(x, lengths, **more)

    def _frame_lengths(self, x: Tensor, y: Tensor, lengths: Tensor, output: Any) -> Tensor:
        if y.shape[:2] != x.shape[:2]:
            came = f"it makes {described(y)} of x of shape {tuple(x.shape)}"
            raise_signature_error(self.NAME, self.SIGNATURES, came)
        return lengths

    def encode_with_intermediate(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode, and return the states of the middle first: -> 2 x (B, U, D), (B,)."""
        method = getattr(self.module, "encode_with_intermediate", None)
        if method is None:
            raise SbkitError(
                f"`inter_ctc_weight` must be 0.0 for a module without `encode_with_intermediate`, "
                f"such as {type(self.module).__name__}, but is more. Set it to 0.0, or take "
                "sbkit.models.transformer.Transformer."
            )
        context, x = self._uncast(x)
        with context:
            intermediate, states = method(x, lengths)
        return intermediate, states, self._frame_lengths(x, states, lengths, None)

    def encode_and_decode(
        self, x: Tensor, lengths: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Encode, and decode (B, L) tokens: -> (B, U, D), (B,), (B, L, D)."""
        if self._pads:
            if not hasattr(self.module, "decoder"):
                raise_no_decoder()
            fractions = to_relative(lengths, x.shape[1]).to(x.device, non_blocking=True)
            states, decoded = self.module(x, tokens, fractions, self._padding)
            return states, lengths, decoded
        states, lengths = self.encode(x, lengths)
        return states, lengths, self.decode(tokens, states, lengths)

    def decode(self, tokens: Tensor, states: Tensor, frame_lengths: Tensor) -> Tensor:
        """Decode with teacher forcing: (B, L), (B, U, D), (B,) -> (B, L, D)."""
        if not callable(getattr(self.module, "decode", None)):
            raise SbkitError(
                f"`{self.NAME}` must have decode(tokens, states, lengths) while ctc_weight is "
                f"below 1.0, but {type(self.module).__name__} has none. Add it, or set "
                "--ctc_weight=1.0 to train CTC alone."
            )
        if self._pads:
            frame_lengths = frame_lengths.to(states.device, non_blocking=True)
        context, states = self._uncast(states)
        with context:
            output = self.module.decode(tokens, states, frame_lengths)
        # SpeechBrain's returns its attentions, too.
        decoded: Tensor = output[0] if isinstance(output, tuple) else output
        return decoded

    def decoding_modules(self) -> tuple[nn.Module, ...]:
        """Return the children that only decoding runs."""
        names = getattr(self.module, "decoding_modules", DECODING_MODULES)
        children = (getattr(self.module, name, None) for name in names)
        return tuple(each for each in children if isinstance(each, nn.Module))


class WaveformPart(TransformerPart):
    """Encode audio: (B, S) in the scale that it declares, (B,) -> (B, U, D), (B,)."""

    NAME, SIGNATURES = "encoder", ENCODER_SIGNATURES
    OTHERS = ()
    _frame_lengths = Part._frame_lengths

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.scale = scale_of(module, self.NAME)


def token_embedding(part: Any) -> nn.Embedding | None:
    """Return the embedding that is given tokens, if there is one; others may be any size."""
    if not callable(getattr(part, "decode", None)):
        return None
    children = (getattr(part, name, None) for name in TOKEN_EMBEDDINGS)
    for child in children:
        for module in child.modules() if isinstance(child, nn.Module) else ():
            if isinstance(module, nn.Embedding):
                return module
    return None


@lru_cache(maxsize=8)
def _positions(d_model: int, device: torch.device) -> nn.Module:
    """Make SpeechBrain's relative positions, which learn nothing."""
    from speechbrain.nnet.attention import RelPosEncXL

    made: nn.Module = RelPosEncXL(d_model).to(device)
    return made
