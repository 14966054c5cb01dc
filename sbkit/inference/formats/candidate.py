"""What a format's writer gives back to be compared with the trained model before it is kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sbkit.decoding.confidence import GREEDY
from sbkit.inference.runtime.onnx_runtime import Counts, Floats, LogProbs


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How far a format may be from the trained model; None where there is no limit.

    difference: of log-probabilities; same_tokens: of greedy decoding; word_error_rate: difference
    on held-out clips, as a fraction, in a language without words that of characters; frames: the
    least share of frames with the same best token, where there are no such clips.
    """

    difference: float | None = None
    same_tokens: bool = False
    word_error_rate: float | None = None
    frames: float | None = None


WORD_ERROR_RATE = 0.01
EXACT = Limits(difference=1e-4, same_tokens=True)
QUANTIZED = Limits(word_error_rate=WORD_ERROR_RATE, frames=0.99)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A written format, or one of its precisions, as whoever uses it would run it.

    name: within its format; files: what is removed where it misses its limits; log_probs: of audio
    (B, S) between -1 and 1 and lengths (B,); transcribe: clips (S,) of such audio, where its user
    has a decoder of its own; decoder: the bundle's that this one is to be like.
    """

    name: str
    files: Sequence[str]
    limits: Limits
    log_probs: Callable[[Floats, Counts], LogProbs]
    transcribe: Callable[[Sequence[Floats]], list[str]] | None = None
    decoder: str = GREEDY
