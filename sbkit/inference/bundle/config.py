"""The configuration of a bundle, config.json: every field checked before anything is built."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from sbkit.audio.io import HIGHEST_RATE, LOWEST_RATE
from sbkit.base.errors import SbkitError
from sbkit.decoding.alignment import WordOffsets
from sbkit.decoding.confidence import GREEDY, Confidence
from sbkit.decoding.decoder import ATTENTION, KINDS, Weights
from sbkit.text.normalize import Orthography, read_stored_table, separates_words

FORMAT = 3
LARGEST_BEAM = 10_000

Plain = Any  # what JSON can hold


@dataclass(frozen=True)
class BundleConfig:
    """What a bundle says of itself.

    task: the dotted path of its `sbkit.tasks.task.Task`; model: the parts that the one ModuleList
    owns, in order; parts: every part as plain data; labels: the names of the outputs by id, those
    of the file of labels; language: of the transcripts; normalizer: the version and the table that
    wrote them, by which references and hotwords are written, too, None for this sbkit's of the
    language; decoder: its kind, beam size, weights, how the attention decoder takes part, and what
    they reached on the validation set, None for greedy decoding; confidence: by decoder, what turns
    features of words into probabilities; word_offsets: from the frames of tokens to when words are
    said.
    """

    task: str
    sample_rate: int
    model: tuple[str, ...]
    parts: Mapping[str, Plain]
    labels: tuple[str, ...] | None = None
    language: str | None = None
    normalizer: tuple[int, Orthography] | None = None
    decoder: Mapping[str, Any] | None = None
    confidence: Mapping[str, Confidence] = field(default_factory=dict)
    word_offsets: WordOffsets = field(default_factory=WordOffsets)

    @property
    def has_words(self) -> bool:
        """Check whether its language writes spaces between words."""
        return separates_words(self.language or "und")


def parse_config(content: bytes, *, of: str) -> BundleConfig:
    """Read config.json from its bytes; ``of`` names the file in a refusal.

    Raises SbkitError for anything that is missing, or of another type or size.
    """
    read = partial(_read_field, _parse(content, of), of)
    read("format", _number(FORMAT, FORMAT), f"the number {FORMAT}")
    config = BundleConfig(
        task=read("task", _text, "the dotted path of a task"),
        sample_rate=read(
            "sample_rate",
            _number(LOWEST_RATE, HIGHEST_RATE),
            f"a whole number from {LOWEST_RATE} to {HIGHEST_RATE}",
        ),
        model=read("model", _texts, "a list of names of parts"),
        parts=read("parts", _mapping, "a mapping of parts"),
        labels=read("labels", _texts, "a list of texts, or null", None),
        language=read("language", _text, "a text, or null", None),
        normalizer=read(
            "normalizer", read_stored_table, "a version and a text table, or null", None
        ),
        decoder=read("decoder", _decoder, "a mapping with beam_size and weights, or null", None),
        confidence=read(
            "confidence", _confidences, "a mapping of decoders to weights, or null", {}
        ),
        word_offsets=read(
            "word_offsets", WordOffsets.of, "a mapping with start and end, or null", WordOffsets()
        ),
    )
    missing = [name for name in config.model if name not in config.parts]
    if missing:
        raise SbkitError(
            f"`model` in {of} must name parts that are there, but has {missing[0]}. Export it "
            "again."
        )
    return config


def _read_field(
    values: Mapping[str, Any],
    of: str,
    name: str,
    make: Callable[[Any], Any],
    what: str,
    *default: object,
) -> Any:
    """Return what is made of a field, or the default where it is missing or null.

    Raises SbkitError where ``make`` raises an error of its own, or a field without a default is
    missing.
    """
    value = values.get(name)
    if value is None and default:
        return default[0]
    try:
        return make(value)
    except (SbkitError, ValueError, TypeError, KeyError) as error:
        came = repr(value)[:60] if name in values else "missing"
        raise SbkitError(
            f"`{name}` in {of} must be {what}, but is {came}. Export it again with this version of "
            "sbkit."
        ) from error


def _parse(content: bytes, of: str) -> Mapping[str, Any]:
    try:
        return _mapping(json.loads(content.decode(), parse_constant=_refuse))
    except (ValueError, RecursionError) as error:
        raise SbkitError(
            f"{of} must be a mapping in JSON, but cannot be read ({error}). Export it again."
        ) from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _number(least: int, most: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise ValueError
        return value

    return check


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError
    return tuple(value)


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("it holds something else")
    return value


def _decoder(value: Any) -> dict[str, Any]:
    _number(1, LARGEST_BEAM)(value["beam_size"])
    Weights.of(value.get("weights"))
    if value.get("attention") not in (None, *ATTENTION) or value.get("kind", KINDS[0]) not in KINDS:
        raise ValueError
    return _mapping(value)


def _confidences(value: Any) -> dict[str, Confidence]:
    if not _mapping(value).keys() <= {GREEDY, *KINDS}:
        raise ValueError
    found = {name: each["weights"] for name, each in value.items()}
    return {name: Confidence.of(each) for name, each in found.items() if each is not None}
