"""What a client may choose of a realtime session."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from sbkit.base.messages import listed
from sbkit.serve.fields import (
    check_number,
    phrases_of,
    recognizer_for,
    take,
    take_texts,
    wrong_field,
)
from sbkit.serve.models import Models
from sbkit.serve.recognizer import Recognizer

FORMATS = {  # of audio: what libsndfile calls it, samples a second, bytes of a sample
    "audio/pcm": ("PCM_16", 24_000, 2),
    "audio/pcmu": ("ULAW", 8_000, 1),
    "audio/pcma": ("ALAW", 8_000, 1),
}
LONGEST_PROMPT = 1 << 16  # characters, with keywords


@dataclass(frozen=True)
class Options:
    """The options of a session.

    plain: all of them, as ``audio.input`` of OpenAI's API; format: one of FORMATS; phrases: to
    expect; silence: seconds that end a turn, None where the client commits it.
    """

    plain: Mapping[str, Any]
    recognizer: Recognizer
    format: tuple[str, int, int]
    phrases: tuple[str, ...]
    silence: float | None

    @classmethod
    def parse(cls, given: Mapping[str, Any], models: Models, model: str) -> Self:
        """Read ``audio.input``; model: the name of the one that it has where it names none.

        Raises:
            ApiError: a field has another value than the API or the model allows.
        """
        audio = take(given, "format", dict)
        spoken = {"model": model, **take(given, "transcription", dict)}
        kind = take(audio, "type", str) or "audio/pcm"
        if kind not in FORMATS:
            raise wrong_field("format", listed(FORMATS), kind)
        rate = FORMATS[kind][1]
        if take(audio, "rate", int, rate) != rate:
            raise wrong_field("rate", f"{rate} with {kind}", str(audio["rate"]))
        languages = [take(spoken, "language", str), *take_texts(spoken, "languages")]
        recognizer = recognizer_for(models, take(spoken, "model", str), languages)
        silence = _parse_silence(given, recognizer.silence)
        phrases = [take(spoken, "prompt", str), *take_texts(spoken, "keywords")]
        if sum(map(len, phrases)) > LONGEST_PROMPT:
            raise wrong_field("prompt", f"at most {LONGEST_PROMPT} characters", "longer")
        ms = silence and round(1000 * silence)
        plain = {
            "format": {"type": kind, "rate": rate},
            "transcription": spoken,
            "turn_detection": ms and {"type": "server_vad", "silence_duration_ms": ms},
            "noise_reduction": None,
        }
        return cls(plain, recognizer, FORMATS[kind], phrases_of("\n".join(phrases)), silence)


def _parse_silence(given: Mapping[str, Any], default: float | None) -> float | None:
    """Read ``turn_detection``; default: None of a recognizer that finds no ends of turns."""
    if "turn_detection" not in given:
        return default
    if given["turn_detection"] is None:
        return None
    chosen = take(given, "turn_detection", dict)
    kind = take(chosen, "type", str) or "server_vad"
    if default is None or kind != "server_vad":
        must = "null, as the model takes whole clips" if default is None else "server_vad or null"
        raise wrong_field("turn_detection", must, kind)
    ms = take(chosen, "silence_duration_ms", int, round(1000 * default))
    return check_number("silence_duration_ms", ms, 1, 60_000) / 1000
