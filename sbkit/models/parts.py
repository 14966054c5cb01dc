"""The modules of the YAML between audio and states: how they are called, and what they return.

Legend: B utterances, S samples, T frames of features, U frames of the encoder, L tokens, M features
of a frame, D model width.

How a module is called follows from its signature. It takes lengths in one of these forms:
``lengths`` (B,) are absolute integers, on the CPU in training; ``wav_len`` or ``wav_lens`` are
SpeechBrain's fractions of the padded length, and so is ``lengths`` where SpeechBrain's own code
defines ``forward``; ``src_key_padding_mask`` (B, U) is PyTorch's, true past the end of an
utterance; ``attention_mask`` (B, U) is Hugging Face's, 1 within it. What takes no lengths gets
none. A module declares, by attributes of its class or of itself:

- ``audio_scale``: the largest amplitude of the audio that it takes: 1.0 as wav2vec 2 has it, or
  that of int16, 32768, as Kaldi has it, which is what it gets otherwise;
- ``precision = "fp32"``: autocast leaves it alone;
- ``frame_lengths(lengths)``: how many frames it makes of inputs of these lengths, (B,) -> (B,);
- ``samples_per_frame``, of a module that takes audio: the samples from one frame to the next.
  Without ``frame_lengths``, n samples have n // samples_per_frame frames.

Where a module declares no lengths and returns none, they are those of silence, found by trial.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from sbkit.audio.io import FULL_SCALE
from sbkit.audio.lengths import length_mask, to_relative
from sbkit.base.errors import SbkitError
from sbkit.base.units import SAMPLE_RATE
from sbkit.models.subsampling import Subsampling, as_evaluated, find_subsampling

# Children that only decoding runs: sbkit's three, and SpeechBrain's embedding of tokens.
DECODING_MODULES = ("embedding", "decoder", "decoder_norm", "custom_tgt_module")
TOKEN_EMBEDDINGS = ("token_embedding", "embedding", "custom_tgt_module")

LengthsForm = Callable[[Tensor, Tensor], Tensor]
"""Given x (B, U, ...) and absolute lengths (B,), return what a module takes."""


def absolute(x: Tensor, lengths: Tensor) -> Tensor:
    """Return the lengths as they are."""
    return lengths


def relative(x: Tensor, lengths: Tensor) -> Tensor:
    """Return fractions of the padded length: (B,)."""
    return to_relative(lengths, x.shape[1]).to(x.device, non_blocking=True)


FORMS: dict[str, LengthsForm] = {  # by the name of an argument
    **dict.fromkeys(("lengths", "audio_lengths", "frame_lengths"), absolute),
    **dict.fromkeys(("wav_len", "wav_lens"), relative),
    "src_key_padding_mask": lambda x, lengths: ~length_mask(lengths, x.shape[1], x.device),
    "attention_mask": lambda x, lengths: length_mask(lengths, x.shape[1], x.device).long(),
}


def lengths_argument(
    method: Callable[..., Any], *, part: str, signatures: str, others: tuple[str, ...] = ()
) -> tuple[str, LengthsForm | None]:
    """Read from its signature how a method takes lengths; ``others`` are known arguments.

    Raises SbkitError when it needs an argument that sbkit does not know.
    """
    parameters = {
        name: each
        for name, each in inspect.signature(method).parameters.items()
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }
    names = list(parameters)[1:]  # the first takes the data
    required = [name for name in names if parameters[name].default is inspect.Parameter.empty]
    if any(name not in (*FORMS, *others) for name in required):
        called = getattr(method, "__name__", "forward")
        raise_signature_error(part, signatures, f"its {called} takes ({', '.join(parameters)})")
    name = next((name for name in FORMS if name in names), "")
    is_relative = name == "lengths" and method.__module__.startswith("speechbrain.")
    return name, relative if is_relative else FORMS.get(name)


def raise_signature_error(part: str, signatures: str, came: str) -> NoReturn:
    """Raise the sentence that says what a part must be."""
    raise SbkitError(
        f"`{part}` must have {signatures}, but {came}. Change it, or wrap it in a module that has."
    )


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
        is_torchs = type(module).__module__.startswith("torch.")
        if is_torchs and any(getattr(m, "batch_first", True) is False for m in module.modules()):
            raise SbkitError(
                f"`{self.NAME}` must take the batch first, (B, U, D), but {type(module).__name__} "
                "takes time first. Add `batch_first: True` to it."
            )
        if getattr(module, "precision", "fp32") != "fp32":
            raise SbkitError(
                f"`precision` of `{self.NAME}` must be fp32, where autocast is to leave it alone, "
                f"but is {module.precision!r}. Take it out for the precision of the run."
            )
        self.module: Any = module
        self._found: Subsampling | None = None
        self._signed: Callable[..., Any] = getattr(module, self.METHOD, None) or module.forward
        self._method = module if self._signed == module.forward else self._signed
        self._argument, self._form = lengths_argument(
            self._signed, part=self.NAME, signatures=self.SIGNATURES, others=self.OTHERS
        )
        self._scale = getattr(module, "audio_scale", FULL_SCALE) / FULL_SCALE

    @property
    def accepts_lengths(self) -> bool:
        """Return whether it takes lengths as sbkit's do, so that padding changes nothing."""
        return self._form is absolute

    def declared_lengths(self, lengths: Tensor) -> Tensor | None:
        """Return the frames of inputs of these lengths as the module declares them: (B,) -> (B,).

        None where it declares nothing.
        """
        if callable(declared := getattr(self.module, "frame_lengths", None)):
            counted: Tensor = declared(lengths)
            return counted
        if isinstance(step := getattr(self.module, "samples_per_frame", None), int):
            return lengths // step
        return None

    def scaled(self, audio: Tensor) -> Tensor:
        """Convert audio to float32, in the scale that the module declares."""
        return audio.float() if self._scale == 1.0 else audio.float() * self._scale

    def _uncast(self, x: Tensor) -> tuple[AbstractContextManager[Any], Tensor]:
        """Turn autocast off for a module that declares fp32, and give it float32."""
        if getattr(self.module, "precision", None) is None:
            return nullcontext(), x
        return torch.autocast(x.device.type, enabled=False), x.float()

    def run(self, x: Tensor, lengths: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        """Return the frames (B, U, ...), and how many of them each utterance has (B,)."""
        output, y = self._call(x, lengths, **more)
        if y.ndim not in self.NDIMS or y.shape[0] != x.shape[0]:
            self._refuse(f"it returns a tensor of shape {tuple(y.shape)} for {tuple(x.shape)}")
        return y, self._frame_lengths(x, y, lengths, output)

    def _call(self, x: Tensor, lengths: Tensor, **more: Any) -> tuple[Any, Tensor]:
        """Return what the module does, and the tensor in it: alone, first, or the last states."""
        context, x = self._uncast(x)
        if self._form is not None:
            more[self._argument] = self._form(x, lengths)
        with context:
            output = self._method(x, **more)
        y = output[0] if isinstance(output, tuple | list) and output else output
        y = y.get("last_hidden_state") if isinstance(y, Mapping) else y
        y = getattr(y, "last_hidden_state", y)
        if not isinstance(y, Tensor):
            self._refuse(f"it returns an object of type {type(y).__name__}")
        return output, y

    def _refuse(self, came: str) -> NoReturn:
        raise_signature_error(self.NAME, self.SIGNATURES, came)

    def _frame_lengths(self, x: Tensor, y: Tensor, lengths: Tensor, output: Any) -> Tensor:
        """Return the lengths that came beside y, or are declared, or are found by trial."""
        second: Any = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        are_lengths = isinstance(second, Tensor) and not second.is_floating_point()
        came = are_lengths and second.shape == y.shape[:1]
        found: Tensor | None = second if came else self.declared_lengths(lengths)
        if found is None:
            return self.subsampling(x).count(lengths).clamp(max=y.shape[1])
        on_host = found.device.type == "cpu" and not torch.compiler.is_exporting()
        if on_host and (longest := max(found.tolist(), default=0)) > y.shape[1]:
            what = f"it returns {y.shape[1]} frames and has lengths up to {longest}"
            self._refuse(f"{what}: count what its strides leave")
        return found

    def subsampling(self, x: Tensor) -> Subsampling:
        """How many frames it makes: as it declares, else of silence like x (B, S, ...); once.

        Raises SbkitError where it keeps no constant stride.
        """

        def count(length: int) -> int:
            lengths = torch.tensor([length], device="cpu")
            declared = self.declared_lengths(lengths)
            if declared is not None:
                return int(declared)
            return self._call(x.new_zeros(1, length, *x.shape[2:]), lengths)[1].shape[1]

        if self._found is None:
            with as_evaluated(x.device, self.module):
                self._found = find_subsampling(
                    count, part=self.NAME, unit=self.UNIT, shortest=self.SHORTEST
                )
        return self._found


class FeatureExtractor(Part):
    """Compute features in float32, zero past each length: (B, S), (B,) -> (B, T, M), (B,)."""

    NAME = "compute_features"
    SIGNATURES = (
        "forward(audio, lengths) -> (features, lengths), or forward(audio) -> features, with audio "
        "(B, S), features (B, T, M) and lengths (B,) in whole samples and frames"
    )

    def __call__(self, audio: Tensor, audio_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Compute them, whatever the autocast state."""
        with torch.autocast(audio.device.type, enabled=False):
            features, frame_lengths = self.run(self.scaled(audio), audio_lengths)
        features = features.float()
        mask = length_mask(frame_lengths, features.shape[1], features.device)
        return features * mask.unsqueeze(-1), frame_lengths


class FrontEnd(Part):
    """Subsample features: (B, T, M), (B,) -> (B, U, D), (B,)."""

    NAME, NDIMS = "CNN", (3, 4)
    SIGNATURES = (
        "forward(features, lengths) -> (x, lengths), or forward(features) -> x, with features "
        "(B, T, M), x (B, U, D) or (B, U, C, F) and lengths (B,) in whole frames"
    )
    UNIT, SHORTEST = "frames", 400  # four seconds, longer than a kernel

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

    NAME, METHOD = "Transformer", "encode"
    SIGNATURES = (
        "encode(x, lengths) -> y, SpeechBrain's encode(src, wav_len, pad_idx) -> y, "
        "forward(x, lengths) -> y, or forward(x) -> y, with x and y (B, U, D), or y the first of a "
        "tuple, and lengths (B,) in whole frames"
    )
    OTHERS: ClassVar[tuple[str, ...]] = ("pad_idx",)

    def __init__(self, module: nn.Module, *, padding: int = 0) -> None:
        """Wrap the module; ``padding`` is the token that pads rows, for SpeechBrain's decoder."""
        super().__init__(module)
        self._padding = padding
        self._pads = "pad_idx" in inspect.signature(self._signed).parameters
        if self._pads:  # its decoder gives PyTorch a mask of bool beside one of float
            warnings.filterwarnings("ignore", "Support for mismatched key_padding_mask")

    def encode(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encode; raises SbkitError when the module returns another number of frames."""
        return self.run(x, lengths, **({"pad_idx": self._padding} if self._pads else {}))

    def _frame_lengths(self, x: Tensor, y: Tensor, lengths: Tensor, output: Any) -> Tensor:
        if y.shape[:2] != x.shape[:2]:
            self._refuse(f"it makes a tensor of shape {tuple(y.shape)} of x of {tuple(x.shape)}")
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
            states, decoded = self.module(x, tokens, relative(x, lengths), self._padding)
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

    NAME, OTHERS = "encoder", ()
    SIGNATURES = (
        "forward(audio, audio_lengths) -> (states, frame_lengths), or forward(audio) -> states, "
        "with audio (B, S), states (B, U, D) and lengths (B,) in whole samples and frames"
    )
    _frame_lengths = Part._frame_lengths


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
