"""How a module of the YAML is called: read from its signature, and refused in one sentence.

Legend: B utterances, S samples, T frames of features, U frames of the encoder, M features of a
frame, D model width.

A part takes lengths in one of these forms: ``lengths`` (B,) are absolute integers, on the CPU in
training; ``wav_len`` or ``wav_lens`` are SpeechBrain's fractions of the padded length, and so is
``lengths`` where SpeechBrain's own code defines ``forward``; ``src_key_padding_mask`` (B, U) is
PyTorch's, true past the end of an utterance; ``attention_mask`` (B, U) is Hugging Face's, 1 within
it. What takes no lengths gets none.
"""

import inspect
from collections.abc import Callable, Mapping
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
TRANSFORMER_SIGNATURES = (
    "encode(x, lengths) -> y, SpeechBrain's encode(src, wav_len, pad_idx) -> y, "
    "forward(x, lengths) -> y, or forward(x) -> y, with x and y (B, U, D), or y the first of a "
    "tuple, and lengths (B,) in whole frames"
)
ENCODER_SIGNATURES = (
    "forward(audio, audio_lengths) -> (states, frame_lengths), or forward(audio) -> states, with "
    "audio (B, S), states (B, U, D) and lengths (B,) in whole samples and frames"
)
POOLING_SIGNATURES = "forward(x, lengths) -> y, with x (B, U, D), lengths (B,) and y (B, D')"

Form = Literal["none", "absolute", "relative", "padding mask", "attention mask"]

FORMS: dict[str, Form] = {  # by the name of an argument
    **dict.fromkeys(("lengths", "audio_lengths", "frame_lengths"), "absolute"),
    **dict.fromkeys(("wav_len", "wav_lens"), "relative"),
    "src_key_padding_mask": "padding mask",
    "attention_mask": "attention mask",
}


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
            case "attention mask":
                return {self.name: length_mask(lengths, x.shape[1], x.device).long()}
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
    required = [name for name in names if parameters[name].default is inspect.Parameter.empty]
    if any(name not in (*FORMS, *others) for name in required):
        called = getattr(method, "__name__", "forward")
        raise_signature_error(part, signatures, f"its {called} takes ({', '.join(parameters)})")
    name = next((name for name in FORMS if name in names), "")
    if name == "lengths" and method.__module__.startswith("speechbrain."):
        return LengthsArgument(name, "relative")
    return LengthsArgument(name, FORMS.get(name, "none"))


def raise_signature_error(part: str, signatures: str, came: str) -> NoReturn:
    """Raise the sentence that says what a part must be."""
    raise SbkitError(
        f"`{part}` must have {signatures}, but {came}. Change it, or wrap it in a module that has."
    )


def first_tensor(output: Any, *, part: str, signatures: str) -> Tensor:
    """Return the tensor that a part gives: alone, first of a tuple, or as `last_hidden_state`."""
    x = output[0] if isinstance(output, tuple | list) and output else output
    x = x.get("last_hidden_state") if isinstance(x, Mapping) else x
    x = getattr(x, "last_hidden_state", x)
    if not isinstance(x, Tensor):
        raise_signature_error(part, signatures, f"it returns {described(output)}")
    return x


def described(output: Any) -> str:
    """Describe what a part returned: shapes of tensors, types of the rest."""
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    if isinstance(output, tuple | list):
        return f"{len(output)} values ({', '.join(map(described, output))})"
    return f"an object of type {type(output).__name__}"


def check_batch_first(part: nn.Module, name: str) -> None:
    """Raise SbkitError where a layer of torch.nn takes time before the batch."""
    is_torchs = type(part).__module__.startswith("torch.")
    if is_torchs and any(getattr(each, "batch_first", True) is False for each in part.modules()):
        raise SbkitError(
            f"`{name}` must take the batch first, (B, U, D), but {type(part).__name__} takes time "
            "first. Add `batch_first: True` to it."
        )
