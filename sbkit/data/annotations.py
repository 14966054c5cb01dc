"""Annotations of ELAN (.eaf) and Praat (.TextGrid) as tables: a row for each one of some tiers.

    a.eaf, a.TextGrid -> tiers -> those that `tier` names -> rows: path, times, text, speaker, tier

An annotation of ELAN without times of its own has those of its parent, or its share of them. Times
that a person has left open lie evenly between their neighbors, as ELAN shows them. The recording
lies where a file of ELAN says, or beside the file of annotations; no address is fetched.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa

from sbkit.audio.io import SUFFIXES
from sbkit.base.errors import ConfigError, DataError
from sbkit.base.imports import require_package
from sbkit.base.messages import listed, plural
from sbkit.data.manifest import Excluded
from sbkit.data.tables import Table, TableOptions, open_text, read_table

ELAN, PRAAT = ".eaf", ".textgrid"
ANNOTATION_SUFFIXES = (ELAN, PRAAT)
MAX_LISTED_TIERS = 30
Span = tuple[float, float, str]  # start and end in milliseconds, text


@dataclass(frozen=True)
class Tier:
    """A tier: its annotations in the order of their starts."""

    name: str
    spans: Sequence[Span]
    type: str = ""  # of ELAN
    speaker: str = ""  # ELAN's participant

    def is_named(self, names: Sequence[str]) -> bool:
        """Check whether a name is that of the tier, of its type or of its participant."""
        return not {self.name, self.type, self.speaker}.isdisjoint(names)

    def describe(self) -> str:
        notes = (self.type and f"type {self.type}", self.speaker and f"participant {self.speaker}")
        count = plural(len(self.spans), "annotation")
        return f"{self.name} ({', '.join([*filter(None, notes), count])})"


def read_table_or_annotations(file: str, options: TableOptions) -> Table:
    """Read a table of text, or annotations if the name of the file says so."""
    if is_annotation_file(file):
        return read_annotations(file, options)
    return read_table(file, options.encoding)


def is_annotation_file(name: str) -> bool:
    """Check whether a file is one of ELAN or Praat by its name."""
    return name.lower().endswith(ANNOTATION_SUFFIXES)


def read_annotations(file: str, options: TableOptions) -> Table:
    """Read the annotations of the chosen tiers of a file as a table.

    Raises DataError for a file that is damaged or whose recording is missing, and ConfigError if
    several tiers have annotations and `tier` names none.
    """
    if "://" in file:
        raise DataError(f"{file}: annotations are read from disks only. Copy them.", file=file)
    if file.lower().endswith(ELAN):
        tiers, audio = _read_elan(file)
    else:
        tiers, (audio, _) = _read_praat(file, options.encoding), find_recording(file)
    if options.tiers:
        chosen = [tier for tier in tiers if tier.is_named(options.tiers)]
    else:
        chosen = [tier for tier in tiers if tier.spans]
    descriptions = listed([tier.describe() for tier in tiers], max_names=MAX_LISTED_TIERS)
    if len(chosen) > 1 and not options.tiers:
        raise ConfigError(
            f"{file} has several tiers: {descriptions}. Name one by `tier`, or tiers of one type "
            "or participant by that, as in tier: TYPE.",
            keys=("tier",),
        )
    detail = f"tiers: {descriptions or 'none'}"
    excluded = [] if chosen else [Excluded(Path(file).name, "no such tier", detail)]
    rows = [(tier, *span) for tier in chosen for span in tier.spans]
    columns: dict[str, list[str]] = {
        "path": [audio] * len(rows),
        "start_ms": [f"{start:.3f}" for _, start, _, _ in rows],
        "end_ms": [f"{end:.3f}" for _, _, end, _ in rows],
        "text": [text for *_, text in rows],
        "tier": [tier.name for tier, *_ in rows],
    }
    if any(tier.speaker for tier in chosen):
        columns["speaker"] = [tier.speaker for tier, *_ in rows]
    table = pa.table({column: pa.array(texts, pa.string()) for column, texts in columns.items()})
    return Table(file, table, range(1, len(rows) + 1), excluded)


def find_recording(file: str, media: Sequence[Mapping[str, str]] = ()) -> tuple[str, int]:
    """Return the recording of annotations, and the time in it where they begin, in milliseconds.

    media: what a file of ELAN says about its recordings, the one to prefer first.

    Raises DataError if there is none: at a path that ELAN names, or beside the file.
    """
    names: list[str] = []
    for item in media:
        for url in filter(None, map(item.get, ("RELATIVE_MEDIA_URL", "MEDIA_URL"))):
            is_address = "://" in url and not url.startswith("file:")
            path = unquote(urlsplit(url).path if url.startswith("file:") else url)
            names.append(re.split(r"[/\\]", path)[-1])  # it may have been moved with the file
            for candidate in (*([] if is_address else [path]), names[-1]):
                if (recording := Path(file).parent / candidate).is_file():
                    return str(recording), int(item.get("TIME_ORIGIN") or 0)
    for recording in map(Path(file).with_suffix, SUFFIXES):
        if recording.is_file():
            return str(recording), 0
    wanted = listed([*dict.fromkeys(names)]) or f"{Path(file).stem}{SUFFIXES[0]}"
    raise DataError(
        f"{file}: its recording, {wanted}, is missing. Put it beside the file.", file=file
    )


# ---- ELAN


def _read_elan(file: str) -> tuple[list[Tier], str]:
    pympi = require_package("pympi", extra="corpora")
    try:
        document: Any = pympi.Elan.Eaf(file, suppress_version_warning=True)
        slots = _fill_times(document.timeslots)
        spans = _spans_by_id(document, slots)
        tiers = [
            Tier(
                name,
                sorted((spans[id] for id in (*aligned, *references)), key=lambda span: span[:2]),
                attributes.get("LINGUISTIC_TYPE_REF", ""),
                attributes.get("PARTICIPANT", ""),
            )
            for name, (aligned, references, attributes, _) in document.tiers.items()
        ]
        media = sorted(document.media_descriptors, key=_is_video)
    except Exception as error:  # pympi reads what the file says, which may be anything
        raise DataError(
            f"{file} cannot be read as a file of ELAN ({type(error).__name__}: {error}).", file=file
        ) from error
    recording, origin = find_recording(file, media)
    shifted = [
        Tier(
            tier.name,
            [(start + origin, end + origin, text) for start, end, text in tier.spans],
            tier.type,
            tier.speaker,
        )
        for tier in tiers
    ]
    return shifted, recording


def _is_video(media: Mapping[str, str]) -> bool:
    return media.get("MIME_TYPE", "").startswith("video")


def _fill_times(slots: Mapping[str, int | None]) -> dict[str, float]:
    """Return the time of each slot; slots without one lie evenly between their neighbors."""
    known = {index: ms for index, ms in enumerate(slots.values()) if ms is not None}
    if not known:
        return {}
    times = np.interp(range(len(slots)), [*known], [*known.values()])
    return dict(zip(slots, times.tolist(), strict=True))


def _spans_by_id(document: Any, slots: Mapping[str, float]) -> dict[str, Span]:
    """Return the span of each annotation; those that refer to one share its time."""
    spans: dict[str, Span] = {}
    children: dict[tuple[str, str], list[tuple[str, str, str | None]]] = {}
    for name, (aligned, references, *_) in document.tiers.items():
        for id, (start, end, text, _) in aligned.items():
            spans[id] = (slots[start], slots[end], text)
        for id, (parent, text, previous, _) in references.items():
            children.setdefault((parent, name), []).append((id, text, previous))
    waiting = dict(children)
    while ready := [key for key in waiting if key[0] in spans]:
        for key in ready:
            start, end, _ = spans[key[0]]
            chain = _in_order(waiting.pop(key))
            step = (end - start) / len(chain)
            for place, (id, text) in enumerate(chain):
                spans[id] = (start + place * step, start + (place + 1) * step, text)
    if waiting:
        raise ValueError(f"{listed([key[0] for key in waiting])} is no annotation")
    return spans


def _in_order(siblings: Sequence[tuple[str, str, str | None]]) -> list[tuple[str, str]]:
    """Sort the annotations of a parent: each names the one before it."""
    following = {previous: (id, text) for id, text, previous in siblings if previous}
    chain: list[tuple[str, str]] = []
    for id, text, previous in siblings:
        item: tuple[str, str] | None = None if previous else (id, text)
        while item is not None:
            chain.append(item)
            item = following.pop(item[0], None)
    if len(chain) < len(siblings):
        raise ValueError("an annotation follows one that is missing")
    return chain


# ---- Praat


def _read_praat(file: str, encoding: str | None) -> list[Tier]:
    parser = require_package("praatio.utilities.textgrid_io", extra="corpora")
    with open_text(file, encoding) as lines:
        text = lines.read()
    try:
        content = parser.parseTextgridStr(text.replace("\r\n", "\n"), includeEmptyIntervals=True)
        return [
            Tier(
                tier["name"],
                [
                    (1000 * float(start), 1000 * float(end), label)
                    for start, end, label in tier["entries"]
                    if label.strip()  # the rest of the recording
                ],
            )
            for tier in content["tiers"]
            if tier["class"] == "IntervalTier"
        ]
    except Exception as error:  # praatio parses text, and raises whatever it meets
        raise DataError(
            f"{file} cannot be read as a TextGrid ({type(error).__name__}: {error}).", file=file
        ) from error
