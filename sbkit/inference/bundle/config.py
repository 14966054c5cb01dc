"""The configuration of a bundle, config.json: every field checked before anything is built."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from sbkit.audio.io import HIGHEST_RATE, LOWEST_RATE
from sbkit.base.errors import SbkitError
from sbkit.base.files import unique_keys
from sbkit.decoding.alignment import WordOffsets
from sbkit.decoding.confidence import GREEDY, Confidence
from sbkit.decoding.decoder import ATTENTION, KINDS, Weights
from sbkit.text.normalize import Orthography, read_stored_table, separates_words

FORMAT = 2
MODEL_CLASSES = ("sbkit.models.asr.AsrModel", "sbkit.models.classifier.UtteranceClassifier")
FEATURES = "compute_features"
LONGEST_WORD = 100  # characters
DIGEST = 64  # characters of a SHA-256
MOST_LABELS = 100_000
LONGEST_FRAME = 1 << 20  # samples
TEXTS, FRAME = "a list of different texts, or null", f"a number from 1 to {LONGEST_FRAME}, or null"
LARGEST_BEAM = 10_000
DEEPEST, MOST = 50, 100_000  # levels and values of a configuration

Plain = Any  # what JSON can hold


@dataclass(frozen=True)
class BundleConfig:
    """What a bundle says of itself.

    model_class: what its parts are put into, one of MODEL_CLASSES; model: the parts that the one
    ModuleList owns, in order; parts: every part as plain data; tokenizer: the SHA-256 of
    tokenizer.model, None without one; vocabulary: its tokens by id, and samples_per_frame: from one
    frame of CTC to the next, both None for a classifier, and of an earlier sbkit; labels: what a
    classifier tells apart; imports: modules of the exporter's own, which are named in a refusal and
    never imported from here; language: of the transcripts; normalizer: the version and the table
    that wrote them, by which references and hotwords are written, too, None for this sbkit's of the
    language; decoder: its kind, beam size, weights, how the attention decoder takes part, and what
    they reached on the validation set, None for greedy decoding; confidence: by decoder, what turns
    features of words into probabilities; a decoder may have none; word_offsets: from the frames of
    tokens to when words are said.
    """

    model_class: str
    sample_rate: int
    model: tuple[str, ...]
    parts: Mapping[str, Plain]
    tokenizer: str | None
    labels: tuple[str, ...] | None
    imports: tuple[str, ...]
    vocabulary: tuple[str, ...] | None = None
    samples_per_frame: int | None = None
    language: str | None = None
    normalizer: tuple[int, Orthography] | None = None
    decoder: Mapping[str, Any] | None = None
    confidence: Mapping[str, Confidence] = field(default_factory=dict)
    word_offsets: WordOffsets = field(default_factory=WordOffsets)

    @property
    def is_asr(self) -> bool:
        """Check whether it is a model that transcribes."""
        return self.model_class == MODEL_CLASSES[0]

    def refuse_other_frames(self, samples: int, *, of: Path) -> None:
        """Refuse a model of other frames than are declared; raises SbkitError."""
        if self.samples_per_frame not in (None, samples):
            raise SbkitError(
                f"`samples_per_frame` must be what the model does, but {of} has "
                f"{self.samples_per_frame} for a model with {samples}. Export it again."
            )

    @property
    def has_words(self) -> bool:
        """Check whether its language writes spaces between words."""
        return separates_words(self.language or "und")


def parse_config(content: bytes, *, of: str) -> BundleConfig:
    """Read config.json from its bytes; ``of`` names the file in a refusal.

    Raises SbkitError for anything that is missing, or of another type or size.
    """
    read = _Fields(_parse(content, of), of)
    read("format", lambda value: value == FORMAT and type(value) is int, f"the number {FORMAT}")
    config = BundleConfig(
        model_class=read(
            "model_class", lambda value: value in MODEL_CLASSES, " or ".join(MODEL_CLASSES)
        ),
        sample_rate=read(
            "sample_rate", _is_rate, f"a whole number from {LOWEST_RATE} to {HIGHEST_RATE}"
        ),
        model=tuple(read("model", _is_owned, "a list of names of parts")),
        parts=read("parts", _is_parts, f"a mapping of parts that has `{FEATURES}`"),
        tokenizer=read("tokenizer", _is_digest, "a SHA-256 in hexadecimal, or null", None),
        labels=_tuple(read("labels", _is_labels, TEXTS, None)),
        imports=tuple(read("imports", _is_names, "a list of names of modules", ())),
        vocabulary=_tuple(read("vocabulary", _is_labels, TEXTS, None)),
        samples_per_frame=read("samples_per_frame", _is_frame, FRAME, None),
        language=read("language", _is_word, "a short text, or null", None),
        normalizer=read.make(
            "normalizer", read_stored_table, "a version and a text table, or null", None
        ),
        decoder=read("decoder", _is_decoder, "a mapping with beam_size and weights, or null", None),
        word_offsets=read.make(
            "word_offsets", WordOffsets.of, "a mapping with start and end, or null", None
        )
        or WordOffsets(),
        confidence=read.make(
            "confidence", _confidences, "a mapping of decoders to weights, or null", None
        )
        or {},
    )
    _refuse_two_rates(config, of)
    missing = [name for name in config.model if name not in config.parts]
    if missing:
        raise SbkitError(
            f"`model` in {of} must name parts that are there, but has {missing[0]}. Export it "
            "again."
        )
    if config.is_asr and config.tokenizer is None:
        raise SbkitError(
            f"`tokenizer` must be the SHA-256 of one, but {of} has null. Export again."
        )
    if not config.is_asr and config.labels is None:
        raise SbkitError(f"`labels` must be a list of texts, but {of} has null. Export it again.")
    return config


def _refuse_two_rates(config: BundleConfig, of: str) -> None:
    """Refuse audio of one sample rate for features of another."""
    features = config.parts[FEATURES]
    arguments = features.get("arguments") if isinstance(features, dict) else None
    rate = arguments.get("sample_rate") if isinstance(arguments, dict) else None
    if isinstance(rate, int) and rate != config.sample_rate:
        raise SbkitError(
            f"`sample_rate` must be that of `{FEATURES}`, but {of} has {config.sample_rate} and "
            f"{rate}. Export it again."
        )


class _Fields:
    """Read the fields of a mapping, or raise what is wrong with one."""

    def __init__(self, values: Mapping[str, Any], of: str) -> None:
        self._values, self._of = values, of

    def __call__(self, name: str, fits: Callable[[Any], bool], what: str, *default: object) -> Any:
        """Return a field that fits."""

        def check(value: Any) -> Any:
            if not fits(value):
                raise ValueError
            return value

        return self.make(name, check, what, *default)

    def make(self, name: str, make: Callable[[Any], Any], what: str, *default: object) -> Any:
        """Return what is made of a field, or the default, which null stands for where it is None.

        Raises SbkitError where ``make`` raises an error of its own, or the field is missing.
        """
        value = self._values.get(name)
        if default and (name not in self._values or (value is None and default == (None,))):
            return default[0]
        with suppress(SbkitError, ValueError, TypeError, KeyError):
            if name in self._values:
                return make(value)
        came = repr(value)[:60] if name in self._values else "missing"
        raise SbkitError(
            f"`{name}` in {self._of} must be {what}, but is {came}. Export it again with this "
            "version of sbkit."
        )


def _parse(content: bytes, of: str) -> dict[str, Any]:
    try:
        values = json.loads(content.decode(), parse_constant=_refuse, object_pairs_hook=unique_keys)
        _refuse_bomb(values)
    except (ValueError, RecursionError) as error:
        why = "it is too deep" if isinstance(error, RecursionError) else str(error)
        raise SbkitError(
            f"{of} must be JSON, but cannot be read ({why}). Export it again."
        ) from error
    if not isinstance(values, dict):
        raise SbkitError(f"{of} must hold a mapping, but is something else. Export it again.")
    return values


def _refuse_bomb(plain: Plain) -> None:
    """Refuse data that is deeper or larger than a model's description; raises ValueError."""
    count, waiting = 0, [(plain, 0)]
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if depth > DEEPEST or count > MOST:
            raise ValueError(f"it has more than {DEEPEST} levels or {MOST} values")
        below = value.values() if isinstance(value, dict) else value
        if isinstance(value, dict | list):
            waiting += [(each, depth + 1) for each in below]


def _is_rate(value: Any) -> bool:
    return type(value) is int and LOWEST_RATE <= value <= HIGHEST_RATE


def _is_frame(value: Any) -> bool:
    return type(value) is int and 1 <= value <= LONGEST_FRAME


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _tuple(value: list[str] | None) -> tuple[str, ...] | None:
    return None if value is None else tuple(value)


def _is_names(value: Any) -> bool:
    return _is_labels(value) and all(
        part.isidentifier() for name in value for part in name.split(".")
    )


def _is_owned(value: Any) -> bool:
    """Check names of which one may be there twice: a part may stand twice in a ModuleList."""
    texts = isinstance(value, list) and all(isinstance(each, str) for each in value)
    return texts and _is_names(sorted({*value}))


def _is_labels(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MOST_LABELS
        and all(isinstance(each, str) for each in value)
        and len(set(value)) == len(value)
    )


def _is_parts(value: Any) -> bool:
    return isinstance(value, dict) and FEATURES in value


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value) <= LONGEST_WORD


def _is_decoder(value: Any) -> bool:
    if not isinstance(value, dict) or type(value.get("beam_size")) is not int:
        return False
    try:
        Weights.of(value.get("weights"))
    except SbkitError:
        return False
    attention = value.get("attention")
    is_known = attention is None or (isinstance(attention, str) and attention in ATTENTION)
    is_known = is_known and value.get("kind", KINDS[0]) in KINDS
    return bool(1 <= value["beam_size"] <= LARGEST_BEAM and is_known)


def _confidences(value: Any) -> dict[str, Confidence]:
    if not isinstance(value, dict) or not value.keys() <= {GREEDY, *KINDS}:
        raise ValueError
    found = {name: each["weights"] for name, each in value.items()}
    return {name: Confidence.of(each) for name, each in found.items() if each is not None}


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) == DIGEST and set(value) <= set("0123456789abcdef")
