"""What a request for a transcript may choose, as OpenAI's API has it; the rest is ignored."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import FormData, UploadFile

from sbkit.base.messages import listed
from sbkit.serve.errors import ApiError
from sbkit.serve.models import Models
from sbkit.serve.recognizer import Recognizer
from sbkit.text.languages import primary

FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
STREAMED = ("json", "text")  # formats of which text can come bit by bit
GRANULARITIES = ("segment", "word")
MOST_PHRASES = 100  # of a prompt
KINDS = {dict: "an object", str: "a text", list: "a list", int: "a whole number"}


@dataclass(frozen=True, kw_only=True)
class Fields:
    """What a client asks for.

    granularities: of verbose_json; phrases: to expect; is_streamed: the text comes as events.
    """

    file: UploadFile
    recognizer: Recognizer
    format: str
    granularities: Sequence[str]
    phrases: tuple[str, ...]
    is_streamed: bool

    @classmethod
    def parse(cls, form: FormData, models: Models) -> "Fields":
        """Read a form.

        Raises:
            ApiError: a field is missing or has another value than the API or the model allows.
        """
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise wrong_field("file", "an audio file", "missing" if file is None else "a text")
        text = {name: str(form.get(name, "")) for name in ("model", "prompt", "temperature")}
        languages = [*form.getlist("language"), *form.getlist("languages[]")]
        recognizer = recognizer_for(models, text["model"], languages)
        # The search has no chance in it, so that a temperature changes nothing.
        check_number("temperature", text["temperature"] or 0, 0, 1)
        format = choose("response_format", form.get("response_format", "json"), FORMATS)
        granularities = [str(each) for each in form.getlist("timestamp_granularities[]")]
        if strange := [
            each for each in granularities if format != "verbose_json" or each not in GRANULARITIES
        ]:
            must, came = "word or segment, with verbose_json", f"{strange[0]} with {format}"
            raise wrong_field("timestamp_granularities[]", must, came)
        is_streamed = choose("stream", form.get("stream", "false"), ("false", "true")) == "true"
        if is_streamed and format not in STREAMED:
            raise wrong_field("stream", f"false with {format}, or the format json", "true")
        return cls(
            file=file,
            recognizer=recognizer,
            format=format,
            granularities=granularities or GRANULARITIES[:1],
            phrases=phrases_of(text["prompt"]),
            is_streamed=is_streamed,
        )


def recognizer_for(models: Models, name: str, languages: Sequence[Any]) -> Recognizer:
    """Return the recognizer of a name; raises ApiError, also where it has none of the languages.

    One whose language is und, which says nothing, takes any.
    """
    found = models.pick(Recognizer, name)
    own, tags = primary(found.language or "und"), [str(each) for each in languages if each]
    if tags and own != "und" and own not in map(primary, tags):
        raise wrong_field("language", f"{own}, as the model has it", listed(tags))
    return found


def choose(name: str, value: Any, choices: Sequence[str]) -> str:
    """Return a value that is one of several, in lower case; raises ApiError for another one."""
    if str(value).lower() not in choices:
        raise wrong_field(name, " or ".join(choices), str(value))
    return str(value).lower()


def check_number(name: str, value: Any, least: float, most: float) -> float:
    """Return a number, or a text of one; raises ApiError for another value."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):  # the last of 400 digits
        number = math.nan
    if not least <= number <= most:
        raise wrong_field(name, f"from {least:g} to {most:g}", str(value))
    return number


def phrases_of(prompt: str) -> tuple[str, ...]:
    """Cut a prompt at punctuation and line ends."""
    parts = (each.strip() for each in re.split(r"[,;:.!?\n]+", prompt))
    return tuple(dict.fromkeys(filter(None, parts)))[:MOST_PHRASES]


def take(content: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """Return a field of some kind, or the default where it is null or missing: by itself, empty.

    Raises:
        ApiError: it is of another kind.
    """
    value = content.get(name)
    if value is None:
        return kind() if default is None else default
    if not isinstance(value, kind) or isinstance(value, bool):  # which is an int for Python
        raise wrong_field(name, KINDS[kind], str(value))
    return value


def take_texts(content: Mapping[str, Any], name: str) -> list[str]:
    """Return a field that is a list of texts; raises ApiError for another one."""
    texts: list[str] = take(content, name, list)
    if strange := [text for text in texts if not isinstance(text, str)]:
        raise wrong_field(name, "a list of texts", str(strange[0]))
    return texts


def wrong_field(name: str, must: str, came: str) -> ApiError:
    """Return the error over a field with another value than it must have."""
    return ApiError(400, f"`{name}` must be {must}, but is {came[:100]}. Correct it.", name)
