"""Timed words as annotations of ELAN (.eaf) and Praat (.TextGrid).

The tiers are `utterances`, `words` and, if the model knows them, `confidences` of the words; with
channels, each speaker has its own, such as `words@2`.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from mimetypes import guess_type
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sbkit.base.imports import require_package
from sbkit.text.normalization import join_segments
from sbkit.text.recognized_word import Word

MAX_PAUSE_MS = 1000  # between two words of an utterance
Annotation = tuple[int, int, str]  # start and end in milliseconds, text


def annotation_tiers(words: Sequence[Word], *, spaces: bool = True) -> dict[str, list[Annotation]]:
    """Return the annotations of each tier; none is empty, and those of a tier do not overlap.

    spaces: see `join_segments`.
    """
    tiers: dict[str, list[Annotation]] = {}
    in_channels = sorted(words, key=lambda word: (word.channel or 0, word.start))
    for channel, spoken in groupby(in_channels, key=attrgetter("channel")):
        suffix = "" if channel is None else f"@{channel}"
        timed = [*_timed(spoken)]
        tiers[f"utterances{suffix}"] = [
            (group[0][0], group[-1][1], join_segments([w.text for *_, w in group], spaces=spaces))
            for group in _utterances(timed)
        ]
        tiers[f"words{suffix}"] = [(start, end, word.text) for start, end, word in timed]
        if any(word.confidence is not None for *_, word in timed):
            tiers[f"confidences{suffix}"] = [
                (start, end, f"{word.confidence:.3f}")
                for start, end, word in timed
                if word.confidence is not None
            ]
    return tiers


def _timed(words: Iterable[Word]) -> Iterator[tuple[int, int, Word]]:
    """Round times to milliseconds; a word begins after the one before it, and is not empty."""
    last = 0
    for word in words:
        start = max(round(1000 * word.start), last)
        last = max(round(1000 * word.end), start + 1)
        yield start, last, word


def _utterances(words: Iterable[tuple[int, int, Word]]) -> list[list[tuple[int, int, Word]]]:
    groups: list[list[tuple[int, int, Word]]] = []
    for word in words:
        if not groups or word[0] - groups[-1][-1][1] > MAX_PAUSE_MS:
            groups.append([])
        groups[-1].append(word)
    return groups


def to_eaf(words: Sequence[Word], recording: Path, *, spaces: bool = True) -> str:
    """Return a document of ELAN that names the recording."""
    document: Any = require_package("pympi", extra="corpora").Elan.Eaf(author="sbkit")
    document.remove_tier("default")
    for type in ("utterance", "word", "confidence"):
        document.add_linguistic_type(type)
    url = recording.absolute().as_uri()
    kind = guess_type(recording.name)[0] or "audio/*"
    document.add_linked_file(url, f"./{recording.name}", mimetype=kind)
    for name, annotations in annotation_tiers(words, spaces=spaces).items():
        type, _, channel = name.partition("@")
        document.add_tier(name, type.removesuffix("s"), part=channel or None)
        for start, end, text in annotations:
            document.add_annotation(name, start, end, text)
    with TemporaryDirectory() as folder:  # pympi writes files only
        file = Path(folder, "words.eaf")
        document.to_file(str(file))
        return file.read_text("utf-8")


def to_textgrid(words: Sequence[Word], seconds: float, *, spaces: bool = True) -> str:
    """Return a TextGrid of a recording, in Praat's long form."""
    textgrid: Any = require_package("praatio.textgrid", extra="corpora")
    grid = textgrid.Textgrid()
    for name, annotations in annotation_tiers(words, spaces=spaces).items():
        spans = [(start / 1000, end / 1000, text) for start, end, text in annotations]
        length = max(seconds, spans[-1][1])
        grid.addTier(textgrid.IntervalTier(name, spans, 0, length), reportingMode="silence")
    with TemporaryDirectory() as folder:  # praatio writes files only
        file = Path(folder, "words.TextGrid")
        grid.save(str(file), "long_textgrid", includeBlankSpaces=True)
        return file.read_text("utf-8")
