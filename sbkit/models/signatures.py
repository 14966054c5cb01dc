"""How a part of the user's is called: told by its signature, and refused with one sentence.

Legend: B utterances, S samples, T frames of features, U frames after the front-end, M features of
a frame, D model width, L tokens.

A part takes lengths in one of three forms: ``lengths`` (B,) are absolute whole numbers, on the CPU
in training; ``wav_len`` or ``wav_lens`` are SpeechBrain's fractions of the padded length, and so is
``lengths`` where SpeechBrain's own code defines ``forward``; ``src_key_padding_mask`` (B, U) is
PyTorch's, true past the end of an utterance. What takes no lengths gets none.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from torch import Tensor, nn

from sbkit.audio.lengths import length_mask, to_relative
from sbkit.base.errors import SbkitError

FEATURE_SIGNATURES = (
    "forward(audio, lengths) -> (features, lengths), or forward(audio) -> features, with audio "
    "(B, S), features (B, T, M) and lengths (B,) in whole samples and frames"
)
FRONT_END_SIGNATURES = (
    "forward(features, lengths) -> (x, lengths), or forward(features) -> x, with features "
    "(B, T, M), x (B, U, D) or (B, U, C, F) and lengths (B,) in whole frames"
)
ENCODER_SIGNATURES = (
    "encode(x, lengths) -> y, SpeechBrain's encode(src, wav_len, pad_idx) -> y, "
    "forward(x, lengths) -> y, or forward(x) -> y, with x and y (B, U, D), or y the first of a "
    "tuple, and lengths (B,) in whole frames"
)
POOLING_SIGNATURES = "forward(x, lengths) -> y, with x (B, U, D), lengths (B,) and y (B, D')"
AUGMENTATIONS = {  # keys of the YAML, for training only
    "wave_augment": "forward(audio, lengths) -> (audio, lengths), with audio (B, S)",
    "spec_augment": "forward(features, lengths) -> features, with features (B, T, M)",
}

Form = Literal["none", "absolute", "relative", "padding mask"]

RELATIVE = ("wav_len", "wav_lens")
PADDING_MASK = "src_key_padding_mask"


@dataclass(frozen=True)
class LengthsArgument:
    """The argument of a method that takes the lengths, and their form."""

    name: str
    form: Form

    def of(self, x: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        """Make the argument for x (B, U, ...) of these absolute lengths (B,)."""
        match self.form:
            case "absolute":
                return {self.name: lengths}
            case "relative":
                fractions = to_relative(lengths, x.shape[1])
                return {self.name: fractions.to(x.device, non_blocking=True)}
            case "padding mask":
                return {self.name: ~length_mask(lengths, x.shape[1], x.device)}
        return {}


def lengths_argument(
    method: Callable[..., Any], *, part: str, signatures: str, others: tuple[str, ...] = ()
) -> LengthsArgument:
    """Read from its signature how a method takes lengths; ``others`` are known arguments.

    Raises SbkitError when it needs an argument that sbkit does not know.
    """
    parameters = {
        name: each
        for name, each in inspect.signature(method).parameters.items()
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }
    names = list(parameters)[1:]  # the first takes the data
    known = ("lengths", *RELATIVE, PADDING_MASK, *others)
    unknown = [
        name
        for name in names
        if parameters[name].default is inspect.Parameter.empty and name not in known
    ]
    if unknown:
        refuse(part, signatures, f"its {_name(method)} takes ({', '.join(parameters)})")
    if "lengths" in names:
        return LengthsArgument("lengths", "relative" if _is_speechbrains(method) else "absolute")
    for name in RELATIVE:
        if name in names:
            return LengthsArgument(name, "relative")
    if PADDING_MASK in names:
        return LengthsArgument(PADDING_MASK, "padding mask")
    return LengthsArgument("", "none")


def refuse_other_augmentation(hparams: Any) -> None:
    """Raise SbkitError where an augmentation of a Brain's hparams takes no lengths, or more."""
    for key, signature in AUGMENTATIONS.items():
        part = getattr(hparams, key, None)
        if part is not None:
            called = getattr(part, "forward", part)
            signed = inspect.signature(called)
            if _is_speechbrains(called) and "lengths" in signed.parameters:
                refuse(
                    key,
                    signature,
                    "SpeechBrain's takes lengths as fractions, not in samples or frames",
                )
            try:
                signed.bind("audio or features", "lengths")
            except TypeError:
                refuse(key, signature, f"its forward takes ({', '.join(signed.parameters)})")


def refuse(part: str, signatures: str, came: str) -> NoReturn:
    """Raise the sentence that says what a part must be."""
    raise SbkitError(
        f"`{part}` must have {signatures}, but {came}. Change it, or wrap it in a module that has."
    )


def first_tensor(output: Any, *, part: str, signatures: str) -> Tensor:
    """Return the tensor that a part gives, alone or first of a tuple."""
    x = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(x, Tensor):
        refuse(part, signatures, f"it returns {described(output)}")
    return x


def described(output: Any) -> str:
    """Describe what a part returned: shapes of tensors, types of the rest."""
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    if isinstance(output, tuple | list):
        return f"{len(output)} values ({', '.join(map(described, output))})"
    return f"an object of type {type(output).__name__}"


def refuse_time_first(part: nn.Module, name: str) -> None:
    """Raise SbkitError where a layer of torch.nn takes time before the batch."""
    is_torchs = type(part).__module__.startswith("torch.")
    if is_torchs and any(getattr(each, "batch_first", True) is False for each in part.modules()):
        raise SbkitError(
            f"`{name}` must take the batch first, (B, U, D), but {type(part).__name__} takes time "
            "first. Add `batch_first: True` to it."
        )


def _name(method: Callable[..., Any]) -> str:
    return str(getattr(method, "__name__", "forward"))


def _is_speechbrains(method: Callable[..., Any]) -> bool:
    return str(getattr(method, "__module__", "")).partition(".")[0] == "speechbrain"
