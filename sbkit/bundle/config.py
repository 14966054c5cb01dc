"""The configuration of a bundle, config.json, as typed fields."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sbkit.audio.io import HIGHEST_RATE, LOWEST_RATE
from sbkit.base.files import reading
from sbkit.decoding.alignment import WordOffsets
from sbkit.decoding.confidence import Confidence
from sbkit.evaluate.utterances import PROVENANCE
from sbkit.text.normalize import Orthography, read_stored_table, separates_words

FORMAT = 3

Plain = Any  # what JSON can hold


@dataclass(frozen=True)
class BundleConfig:
    """The fields of config.json that running a bundle needs.

    task: the dotted path of its `sbkit.tasks.task.Task`; model: the parts that the one ModuleList
    owns, in order; parts: every part as plain data; language: of the transcripts; normalizer: the
    table that wrote them, by which references and hotwords are written, too, None for this sbkit's
    of the language; decoder: its kind, beam size, weights, how the attention
    decoder takes part, and what they reached on the validation set, None for greedy decoding;
    confidence: by decoder, what turns features of words into probabilities; word_offsets: from the
    frames of tokens to when words are said; provenance: the record that scores of it have.
    """

    task: str
    sample_rate: int
    model: tuple[str, ...]
    parts: Mapping[str, Plain]
    language: str | None = None
    normalizer: Orthography | None = None
    decoder: Mapping[str, Any] | None = None
    confidence: Mapping[str, Confidence] = field(default_factory=dict)
    word_offsets: WordOffsets = field(default_factory=WordOffsets)
    provenance: Mapping[str, Any] | None = None

    @property
    def has_words(self) -> bool:
        """Check whether its language writes spaces between words."""
        return separates_words(self.language or "und")


def parse_config(content: bytes, *, of: Path) -> BundleConfig:
    """Read config.json from its bytes; ``of`` is the file that an error names.

    Raises SbkitError where a field is missing, or is not what an export writes.
    """
    fix = "Export it again with this version of sbkit."
    with reading(of, must="be what `sbkit export` writes", fix=fix):
        values = json.loads(content)
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']}, not {FORMAT}")
        rate, language = values["sample_rate"], values.get("language")
        if type(rate) is not int or not LOWEST_RATE <= rate <= HIGHEST_RATE:
            raise ValueError(f"its sample rate is {str(rate)[:20]}")
        if not isinstance(language, str | None):
            raise ValueError("its language is no text")
        normalizer, confidence = values.get("normalizer"), values.get("confidence") or {}
        return BundleConfig(
            task=str(values["task"]),
            sample_rate=rate,
            model=tuple(values["model"]),
            parts=dict(values["parts"]),
            language=language,
            normalizer=None if normalizer is None else read_stored_table(normalizer)[1],
            decoder=values.get("decoder"),
            confidence={
                name: Confidence.of(each["weights"])
                for name, each in confidence.items()
                if each["weights"] is not None
            },
            word_offsets=WordOffsets.of(values.get("word_offsets") or {}),
            provenance=values.get(PROVENANCE),
        )
