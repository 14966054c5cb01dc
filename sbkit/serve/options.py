"""What a client may choose of a realtime session."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from sbkit.base.text import listed
from sbkit.live.endpoint import EndpointRules
from sbkit.serve.fields import check_languages, phrases_of, unknown_model, wrong_field
from sbkit.serve.recognizer import Recognizer

FORMATS = {  # of audio: what libsndfile calls it, samples a second, bytes of a sample
    "audio/pcm": ("PCM_16", 24_000, 2),
    "audio/pcmu": ("ULAW", 8_000, 1),
    "audio/pcma": ("ALAW", 8_000, 1),
}
LONGEST_PROMPT = 1 << 16  # characters, with keywords
KINDS = {dict: "an object", str: "a text", list: "a list", int: "a whole number"}


@dataclass(frozen=True)
class Options:
    """The options of a session.

    plain: all of them, as ``audio.input`` of OpenAI's API; format: one of FORMATS; phrases: to
    expect; rules: by which turns end, None where the client commits them.
    """

    plain: Mapping[str, Any]
    format: tuple[str, int, int]
    phrases: tuple[str, ...]
    rules: EndpointRules | None

    @classmethod
    def parse(cls, given: Mapping[str, Any], names: Sequence[str], recognizer: Recognizer) -> Self:
        """Read ``audio.input``; names: of the model.

        Raises:
            ApiError: a field has another value than the API or the model allows.
        """
        audio, spoken = take(given, "format", dict), take(given, "transcription", dict)
        kind = take(audio, "type", str) or "audio/pcm"
        if kind not in FORMATS:
            raise wrong_field("format", listed(FORMATS), kind)
        rate = FORMATS[kind][1]
        if (take(audio, "rate", int) or rate) != rate:
            raise wrong_field("rate", f"{rate} with {kind}", str(audio["rate"]))
        model = take(spoken, "model", str) or names[0]
        if model not in names:
            raise unknown_model(model, names)
        languages = [take(spoken, "language", str), *take(spoken, "languages", list)]
        check_languages(languages, recognizer.language)
        rules = None if recognizer.live is None else recognizer.live.rules
        if "turn_detection" in given:
            rules = _parse_rules(given, rules)
        phrases = "\n".join(
            [take(spoken, "prompt", str), *map(str, take(spoken, "keywords", list))]
        )
        if len(phrases) > LONGEST_PROMPT:
            raise wrong_field("prompt", f"at most {LONGEST_PROMPT} characters", "longer")
        silence = rules and round(1000 * rules.silence)
        plain = {
            "format": {"type": kind, "rate": rate},
            "transcription": {**spoken, "model": model},
            "turn_detection": rules and {"type": "server_vad", "silence_duration_ms": silence},
            "noise_reduction": None,
        }
        return cls(plain, FORMATS[kind], phrases_of(phrases), rules)


def _parse_rules(given: Mapping[str, Any], rules: EndpointRules | None) -> EndpointRules | None:
    if given["turn_detection"] is None:
        return None
    chosen = take(given, "turn_detection", dict)
    kind = take(chosen, "type", str) or "server_vad"
    if rules is None or kind != "server_vad":
        must = "server_vad or null" if rules else "null, as the model takes whole clips"
        raise wrong_field("turn_detection", must, kind)
    ms = take(chosen, "silence_duration_ms", int) or round(1000 * rules.silence)
    if not 0 < ms <= 60_000:
        raise wrong_field("silence_duration_ms", "from 1 to 60000", str(ms))
    return replace(rules, silence=ms / 1000)


def take(content: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return a field of some kind, or an empty one where it is null or missing.

    Raises:
        ApiError: it is of another kind.
    """
    value = content.get(name)
    if value is not None and not isinstance(value, kind):
        raise wrong_field(name, KINDS[kind], str(value))
    return kind() if value is None else value
