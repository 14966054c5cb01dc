"""The results of a recognizer on a test set: its figures, and files for people and for programs.

`wer_SET.txt` has every utterance with its aligned errors. `utterances_SET.jsonl` has a line for
each utterance, sorted by id, with the texts that were scored. `normalized` has the texts of a
further normalizer, and `greedy` the text of greedy decoding if another decoder was used. Counts are
in words and characters, or only characters in a language without spaces. Times are in seconds.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

from sbkit.base.files import read_file, to_json, write_lines_atomically
from sbkit.base.messages import plural, printable
from sbkit.evaluate.calibration import Calibration, measure_calibration
from sbkit.evaluate.intervals import Interval, group_by_speaker, intervals_of, plain_intervals
from sbkit.evaluate.wer import (
    ERROR_RATES,
    ErrorCounts,
    FigureDict,
    ScoredUtterance,
    TextErrors,
    all_have_word_boundaries,
    counts_of_each,
    format_alignment,
    total_errors,
    word_correctness,
)
from sbkit.logs.metric import percent
from sbkit.text.recognized_word import Word

# A model that writes less than this share of the references' characters counts as silent.
MAX_SILENT_SHARE = 0.1
MAX_CHANGED_SHARE = 0.1  # of words that a normalizer usually splits or joins


def write_results(
    folder: Path,
    name: str,
    results: Sequence[ScoredUtterance],
    figures: "TextFigures",
    labels: object = None,
) -> FigureDict:
    """Write the utterances of a test set for people and for programs; return notes."""
    write_wer(folder / f"wer_{name}.txt", results, figures)
    write_utterances(utterances_file(folder, name), results)
    return {"notes": [*describe_silence(results)]}


# ---- for people


def write_wer(path: Path, utterances: Iterable[ScoredUtterance], figures: "TextFigures") -> None:
    """Write the error rates, then every utterance with its aligned errors, the worst first."""

    def rank(utterance: ScoredUtterance) -> tuple[int, int, str]:
        return -utterance.counts.errors, utterance.counts.reference_length, utterance.id

    rates = [
        f"{rate} {percent(counts.rate, 2)} ({counts.errors} errors / {counts.reference_length} "
        f"{ERROR_RATES[rate].units}: {counts.substitutions} S, {counts.deletions} D, "
        f"{counts.insertions} I)"
        for rate, counts in figures.counts.items()
    ]
    legend = (
        f"Utterances: {figures.errors.utterances}, the worst first. "
        "S: substituted, D: deleted, I: inserted, *: no counterpart."
    )
    if figures.normalized is not None:
        rates.append(figures.describe_normalized())
    blocks = chain.from_iterable(map(_describe_utterance, sorted(utterances, key=rank)))
    write_lines_atomically(path, chain(rates, ["", legend], blocks))


def _describe_utterance(utterance: ScoredUtterance) -> Iterator[str]:
    by_rate = utterance.errors.counts_by_rate(by_words=utterance.by_words)
    rates = [f"{rate} {percent(counts.rate, 2)} ({counts})" for rate, counts in by_rate.items()]
    yield ""
    yield f"{printable(utterance.id)}: {', '.join(rates)}"
    lines = format_alignment(utterance.reference, utterance.hypothesis, by_words=utterance.by_words)
    for name, line in zip(("reference", "hypothesis", ""), lines, strict=True):
        if name or line:
            yield f"  {name:<10}  {printable(line)}".rstrip()


def describe_silence(scored: Sequence[ScoredUtterance]) -> Iterator[str]:
    """Yield a note if greedy decoding wrote almost nothing, because the model has not learned."""
    greedy = greedy_of(scored)
    texts = [utterance.hypothesis.strip() for utterance in greedy or scored]
    num_written = sum(map(len, texts))
    num_spoken = sum(utterance.errors.characters.reference_length for utterance in scored)
    if num_written < MAX_SILENT_SHARE * num_spoken:
        by_beam = sum(len(utterance.hypothesis.strip()) for utterance in scored)
        beam = f"; the beam wrote {by_beam} characters" if greedy else ""
        yield (
            f"greedy decoding wrote {num_written} of {num_spoken} characters, and nothing for "
            f"{texts.count('')} of {plural(len(texts), 'utterance')}{beam}"
        )


# ---- figures


def greedy_of(utterances: Sequence[ScoredUtterance]) -> list[ScoredUtterance]:
    """Return the greedy result of each utterance that also has a beam result."""
    return [utterance.greedy for utterance in utterances if utterance.greedy is not None]


def normalized_of(utterances: Sequence[ScoredUtterance]) -> list[ScoredUtterance]:
    """Return each utterance with the texts that another normalizer wrote, if there is one."""
    return [utterance.normalized for utterance in utterances if utterance.normalized is not None]


def word_confidences(utterances: Iterable[ScoredUtterance]) -> tuple[list[float], list[bool]]:
    """Return the confidence of each word that has one, and whether the word is correct."""
    confidences: list[float] = []
    are_correct: list[bool] = []
    for utterance in utterances:
        texts = [word.text for word in utterance.words]
        correctness = word_correctness(utterance.reference.split(), texts)
        for word, is_correct in zip(utterance.words, correctness, strict=True):
            if word.confidence is not None:
                confidences.append(word.confidence)
                are_correct.append(is_correct)
    return confidences, are_correct


@dataclass(frozen=True, kw_only=True)
class TextFigures:
    """The figures of one decoder on a test set.

    by_words: whether there is a WER: False for a language without spaces between words.
    intervals: by the name of the rate.
    confidence: the quality of the words' confidences, if they have some.
    normalizer: the name and the hash of what normalized the texts; "" if unknown.
    normalized: the figures of texts that another normalizer wrote.
    references: SHA-256 of the ids and references; only results with the same hash are comparable.
    greedy: the figures of greedy decoding, if another decoder was used.
    """

    errors: TextErrors
    by_words: bool
    intervals: Mapping[str, Interval]
    confidence: Calibration | None = None
    normalizer: str = ""
    normalized: "TextFigures | None" = None
    references: str = ""
    greedy: "TextFigures | None" = None

    @property
    def counts(self) -> dict[str, ErrorCounts]:
        """The counts by the name of the rate."""
        return self.errors.counts_by_rate(by_words=self.by_words)

    def __str__(self) -> str:
        """Describe the figures in one line."""
        line = self._describe_rates()
        if self.normalized is not None:
            line += f"; {self.describe_normalized()}"
            before, after = (
                figures.counts["WER"].reference_length if figures.by_words else 0
                for figures in (self, self.normalized)
            )
            # In some languages Whisper's normalizer splits many words at vowel signs.
            if abs(after - before) > MAX_CHANGED_SHARE * before:
                counts = f"the normalizer makes {after} words of {before}"
                line += f" ({counts}, so the WER counts other words)"
        if self.greedy is not None:
            line += f"; greedily {self.greedy._describe_rates()}"
        if self.confidence is not None:
            line += f"; confidence {self.confidence}"
        return line

    def describe_normalized(self) -> str:
        """Describe the rates of texts that another normalizer wrote, if there are some."""
        if (figures := self.normalized) is None:
            return ""
        return f"normalized by {figures.normalizer}: {figures._describe_rates()}"

    def _describe_rates(self) -> str:
        return ", ".join(
            f"{rate} {percent(counts.rate)} ({counts} {ERROR_RATES[rate].units}; "
            f"{self.intervals[rate]})"
            for rate, counts in reversed(self.counts.items())
        )

    def plain(self) -> FigureDict:
        """Return plain data, as `summary.json` has it."""
        figures = rates_and_counts(self.errors, by_words=self.by_words)
        figures |= plain_intervals(self.intervals)
        further = {"normalizer": self.normalizer, "references": self.references}
        records = {"normalized": self.normalized, "greedy": self.greedy}
        if self.confidence is not None:
            figures["confidence"] = asdict(self.confidence)
        figures |= {name: text for name, text in further.items() if text}
        return figures | {name: item.plain() for name, item in records.items() if item is not None}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Read plain data of `plain`."""
        rates = {name: rate for name, rate in ERROR_RATES.items() if name in plain}
        counts = {
            rate.units: ErrorCounts(**plain[rate.error_key], reference_length=plain[rate.units])
            for rate in rates.values()
        }
        confidence = plain.get("confidence")
        normalized, greedy = (plain.get(name) for name in ("normalized", "greedy"))
        return cls(
            errors=TextErrors(utterances=plain["utterances"], **counts),
            by_words=all(name in rates for name in ERROR_RATES),
            intervals={name: Interval(**plain[f"{name}_interval"]) for name in rates},
            confidence=None if confidence is None else Calibration(**confidence),
            normalizer=plain.get("normalizer", ""),
            normalized=None if normalized is None else cls.from_plain(normalized),
            references=plain.get("references", ""),
            greedy=None if greedy is None else cls.from_plain(greedy),
        )


def figures_of_test_set(results: Sequence[ScoredUtterance]) -> TextFigures:
    """Measure the results of a test set, also of greedy decoding if another decoder was used."""
    greedy = greedy_of(results)
    return replace(
        _figures_of_decoder(results),
        references=hash_references(results),
        greedy=_figures_of_decoder(greedy) if greedy else None,
    )


def _figures_of_decoder(utterances: Sequence[ScoredUtterance]) -> TextFigures:
    normalized = normalized_of(utterances)
    return TextFigures(
        errors=total_errors(utterances),
        by_words=all_have_word_boundaries(utterances),
        intervals=_intervals(utterances),
        confidence=measure_calibration(*word_confidences(utterances)),
        normalizer=utterances[0].normalizer if utterances else "",
        normalized=_figures_of_decoder(normalized) if normalized else None,
    )


def rates_and_counts(errors: TextErrors, *, by_words: bool = True) -> FigureDict:
    """Return the rates of a test set with their counts; the WER only if ``by_words``."""
    by_rate = errors.counts_by_rate(by_words=by_words)
    return {
        **errors.rates(by_words=by_words),
        "utterances": errors.utterances,
        **{ERROR_RATES[rate].units: counts.reference_length for rate, counts in by_rate.items()},
        **{ERROR_RATES[rate].error_key: counts.by_kind() for rate, counts in by_rate.items()},
    }


def slice_figures(results: Sequence[ScoredUtterance]) -> FigureDict:
    """Return the rates of a slice of a test set with their lengths and 95 % intervals."""
    by_words = all_have_word_boundaries(results)
    counts = total_errors(results).counts_by_rate(by_words=by_words)
    figures: FigureDict = {rate: counts[rate].rate for rate in counts}
    figures |= {ERROR_RATES[rate].units: counts[rate].reference_length for rate in counts}
    if normalized := normalized_of(results):
        rates = total_errors(normalized).rates(by_words=by_words)
        figures |= {f"normalized_{rate}": value for rate, value in rates.items()}
    return figures | plain_intervals(_intervals(results))


def _intervals(utterances: Sequence[ScoredUtterance]) -> Mapping[str, Interval]:
    ids, speakers = ([getattr(u, name) for u in utterances] for name in ("id", "speaker"))
    counts = counts_of_each(utterances, by_words=all_have_word_boundaries(utterances))
    return intervals_of(counts, group_by_speaker(ids, speakers))


# ---- for programs


def utterances_file(folder: Path, split: str) -> Path:
    """Return the path of a test set's utterances."""
    return folder / f"utterances_{split}.jsonl"


def write_utterances(path: Path, scored: Iterable[ScoredUtterance]) -> None:
    """Write a line for every utterance, sorted by id."""
    ordered = sorted(scored, key=lambda utterance: utterance.id)
    write_lines_atomically(path, (to_json(_to_row(utterance)) for utterance in ordered))


def _to_row(utterance: ScoredUtterance) -> FigureDict:
    row: FigureDict = {
        "id": utterance.id,
        "reference": utterance.reference,
        "hypothesis": utterance.hypothesis,
        "by_words": utterance.by_words,
    }
    by_rate = utterance.errors.counts_by_rate(by_words=utterance.by_words)
    for rate, counts in by_rate.items():
        row[f"reference_{ERROR_RATES[rate].units}"] = counts.reference_length
        row[ERROR_RATES[rate].error_key] = counts.by_kind()
    if utterance.greedy is not None:
        row["greedy"] = utterance.greedy.hypothesis
    if (normalized := utterance.normalized) is not None:
        texts = {"reference": normalized.reference, "hypothesis": normalized.hypothesis}
        row["normalized"] = texts
    return row | {
        "seconds": utterance.seconds,
        "speaker": utterance.speaker or None,
        "words": [word.plain() for word in utterance.words],
    }


def read_utterances(path: Path) -> list[ScoredUtterance]:
    """Read a file of `write_utterances`."""
    lines = filter(None, read_file(path).split(b"\n"))
    return [_from_row(json.loads(line)) for line in lines]


def _from_row(row: FigureDict) -> ScoredUtterance:
    utterance = ScoredUtterance(
        row["id"],
        row["reference"],
        row["hypothesis"],
        speaker=row["speaker"] or "",
        seconds=row["seconds"],
        words=tuple(Word(**word) for word in row["words"]),
        by_words=row["by_words"],
    )
    if (greedy := row.get("greedy")) is not None:
        utterance = replace(utterance, greedy=replace(utterance, words=(), hypothesis=greedy))
    if (normalized := row.get("normalized")) is None:
        return utterance
    return replace(utterance, normalized=replace(utterance, words=(), **normalized))


def hash_references(scored: Iterable[ScoredUtterance]) -> str:
    """Return the SHA-256 of all ids and references, independently of their order."""
    keys = sorted(utterance.key for utterance in scored)
    return hashlib.sha256(to_json(keys).encode()).hexdigest()
