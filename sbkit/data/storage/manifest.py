"""What a corpus lists: clips with their sentences and columns, and the rows that cannot be used."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from sbkit.base.errors import SbkitError
from sbkit.data.storage.audio_store import AUDIO
from sbkit.data.storage.clips import Clip, Clips
from sbkit.text.languages import primary

# What sbkit calls its own columns: those of a prepared split, then what a batch adds.
RESERVED_COLUMNS = ("id", "text", "sentence", "samples", AUDIO, "percent", "weight")
SPEAKER_COLUMNS = ("speaker", "client_id", "speaker_id", "spk_id", "spk")


@dataclass(frozen=True)
class BadRow:
    """One row that names no clip that can be used; ``id`` says where it stands."""

    id: str
    reason: str
    detail: str


@dataclass(frozen=True)
class Manifest:
    """The rows of one split, in the order of its corpus.

    stored: of clips whose audio is in shards already: samples, digest and place of each.
    """

    clips: Sequence[Clip] | Clips
    bad_rows: tuple[BadRow, ...]
    stored: pa.Table | None = None


def collect(rows: Iterable[Clip | BadRow], *bases: Path) -> Manifest:
    """Return the manifest of the rows read, in which every clip and every id comes once."""
    bad: list[BadRow] = []
    return distinct(Clips.of(_good(rows, bad)), bad, *bases)


def _good(rows: Iterable[Clip | BadRow], bad: list[BadRow]) -> Iterator[Clip]:
    for row in rows:
        if isinstance(row, BadRow):
            bad.append(row)
        else:
            yield row


def join_manifests(parts: Sequence[tuple[str, Manifest]], *bases: Path) -> Manifest:
    """Return the rows of all parts; their names say where a bad row of several is from."""
    bad = [
        replace(row, id=f"{name} {row.id}") if len(parts) > 1 else row
        for name, part in parts
        for row in part.bad_rows
    ]
    return distinct(Clips.join(Clips.of(part.clips) for _, part in parts), bad, *bases)


def distinct(clips: Clips, bad_rows: Sequence[BadRow], *bases: Path) -> Manifest:
    """Return a manifest in which every clip and every id comes once.

    A clip that is listed again is a bad row. Clips of different files that share an id are called
    by their path, relative to the first of ``bases`` where it lies.
    """
    bad, once = [*bad_rows], dict[str, int]()
    if len(pc.unique(clips.own["path"])) < len(clips):
        for place, path in enumerate(clips.paths):
            if once.setdefault(path, place) != place:
                detail = f"a row before it names {Path(path).name}"
                bad.append(BadRow(clips[place].id, "clip listed twice", detail))
        clips = clips.take([*once.values()])
    if len(pc.unique(clips.own["id"])) < len(clips):
        ids, counts = clips.ids, Counter(clips.ids)
        clips = clips.renamed(
            [
                id if counts[id] == 1 else _by_path(Path(path), bases)
                for id, path in zip(ids, clips.paths, strict=True)
            ]
        )
    return Manifest(clips, tuple(bad))


def _by_path(path: Path, bases: Sequence[Path]) -> str:
    inside = (path.relative_to(base) for base in bases if path.is_relative_to(base))
    return next(inside, path).as_posix()


def open_names(names: Sequence[str], used: Collection[str]) -> dict[str, str]:
    """Return what the columns that a clip keeps, all but those used, are called, by their names.

    The speaker's column is called ``speaker``. A name that prepared splits use themselves gets the
    prefix ``manifest_``.
    """
    kept = [name for name in names if name not in used]
    lower = {name.lower(): name for name in kept}
    speaker = next((lower[name] for name in SPEAKER_COLUMNS if name in lower), None)
    return {name: "speaker" if name == speaker else free_name(name) for name in kept}


def free_name(name: str) -> str:
    """Return what a column is called so that it is none of sbkit's own."""
    return f"manifest_{name}" if name in RESERVED_COLUMNS else name


def check_locale(manifest: Manifest, language: str) -> None:
    """Raise SbkitError where more than half of the rows with a locale have another one.

    Rows without a locale say nothing, and a region makes no difference.
    """
    columns = Clips.of(manifest.clips).columns
    if "locale" not in columns.column_names:
        return
    counts = Counter[str]()
    for entry in columns["locale"].value_counts().to_pylist():
        counts[(entry["values"] or "").strip()] += entry["counts"]
    del counts[""]
    others = {tag: n for tag, n in counts.items() if primary(tag) != primary(language)}
    if 2 * sum(others.values()) > counts.total():
        most = max(others, key=others.__getitem__)
        raise SbkitError(
            f"`language` must be the language of the manifest, but is {language} where "
            f"{others[most]} of {counts.total()} rows have the locale {most}. Pass "
            f"--language={most}."
        )
