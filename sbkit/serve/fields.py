"""The fields of a request for a transcript, as OpenAI's API has them; others are ignored."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import FormData, UploadFile

from sbkit.base.text import listed
from sbkit.serve.errors import ApiError
from sbkit.text.languages import primary

FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
STREAMED = ("json", "text")  # formats of which text can come bit by bit
GRANULARITIES = ("segment", "word")
MOST_PHRASES = 100  # of a prompt


@dataclass(frozen=True, kw_only=True)
class Fields:
    """What a client asks for.

    file: the audio; granularities: of verbose_json; phrases: of the prompt; is_streamed: whether
    the text comes as events.
    """

    file: UploadFile
    format: str = "json"
    granularities: Sequence[str] = GRANULARITIES[:1]
    phrases: tuple[str, ...] = ()
    is_streamed: bool = False

    @property
    def has_times(self) -> bool:
        """Check whether words must be timed."""
        return self.format not in STREAMED


def parse_fields(form: FormData, *, names: Sequence[str], language: str | None) -> Fields:
    """Read a form; names: of the model; language: of its transcripts.

    Raises:
        ApiError: a field is missing or has another value than the API or the model allows.
    """
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise wrong_field("file", "an audio file", "missing" if file is None else "a text")
    model = form.get("model", names[0])
    if model not in names:
        raise unknown_model(str(model), names)
    check_languages([*form.getlist("language"), *form.getlist("languages[]")], language)
    _check_temperature(str(form.get("temperature", "0")))
    format = _choose(form, "response_format", FORMATS, default="json")
    granularities = form.getlist("timestamp_granularities[]")
    for each in granularities:
        if each not in GRANULARITIES or format != "verbose_json":
            came = f"{each} with {format}"
            raise wrong_field(
                "timestamp_granularities[]", "word or segment, with verbose_json", came
            )
    is_streamed = _choose(form, "stream", ("false", "true"), default="false") == "true"
    if is_streamed and format not in STREAMED:
        raise wrong_field("stream", f"false with {format}, or the format json", "true")
    return Fields(
        file=file,
        format=format,
        granularities=[str(each) for each in granularities] or GRANULARITIES[:1],
        phrases=phrases_of(str(form.get("prompt", ""))),
        is_streamed=is_streamed,
    )


def unknown_model(name: str, names: Sequence[str]) -> ApiError:
    """Return the error over a model that is not served."""
    known = listed(names, most=10)
    told = f"`model` must be one of {known}, but is {name[:100]}. Choose one of them."
    return ApiError(404, told, "model")


def _choose(form: FormData, name: str, choices: Sequence[str], *, default: str) -> str:
    value = str(form.get(name, default)).lower()
    if value not in choices:
        raise wrong_field(name, " or ".join(choices), value)
    return value


def check_languages(asked: Sequence[Any], language: str | None) -> None:
    """Refuse languages that are not the model's; und, which says nothing, is any."""
    own, tags = primary(language or "und"), [str(each) for each in asked if each]
    if tags and own != "und" and own not in map(primary, tags):
        raise wrong_field("language", f"{own}, as the model has it", listed(tags))


def _check_temperature(value: str) -> None:
    """Refuse what is none; the search has no chance in it, so that any other changes nothing."""
    try:
        fits = 0 <= float(value or 0) <= 1
    except ValueError:
        fits = False
    if not fits:
        raise wrong_field("temperature", "from 0 to 1", value)


def phrases_of(prompt: str) -> tuple[str, ...]:
    """Cut a prompt at punctuation and line ends."""
    parts = (each.strip() for each in re.split(r"[,;:.!?\n]+", prompt))
    return tuple(dict.fromkeys(filter(None, parts)))[:MOST_PHRASES]


def wrong_field(name: str, must: str, came: str) -> ApiError:
    """Return the error over a field with another value than it must have."""
    return ApiError(400, f"`{name}` must be {must}, but is {came[:100]}. Correct it.", name)
