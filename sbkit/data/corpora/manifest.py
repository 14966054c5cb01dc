"""What a corpus lists: clips with their sentences and columns, and the rows that cannot be used."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pyarrow as pa

from sbkit.base.errors import SbkitError
from sbkit.data.corpora.clips import Clip, Clips
from sbkit.data.storage.audio_store import AUDIO
from sbkit.text.languages import primary

# What sbkit calls its own columns: those of a prepared split, then what a batch adds.
RESERVED_COLUMNS = (
    *("id", "text", "sentence", "samples", AUDIO),
    *("percent", "weight"),
)
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

    stored: of clips whose audio lies in shards already: samples, digest and place of each.
    """

    clips: Sequence[Clip]
    bad_rows: tuple[BadRow, ...]
    stored: pa.Table | None = None


def collect(rows: Iterable[Clip | BadRow], *bases: Path) -> Manifest:
    """Return the manifest of the rows read, in which every clip and every id comes once.

    A clip that is listed again is a bad row. Clips of different files that share an id are called
    by their path, relative to the first of ``bases`` where it lies.
    """
    bad: list[BadRow] = []
    clips = Clips.of(_once(rows, bad))
    return Manifest(clips.renamed(_unique_ids(clips, bases)), tuple(bad))


def _once(rows: Iterable[Clip | BadRow], bad: list[BadRow]) -> Iterator[Clip]:
    """Yield the clips of the rows, each once, and note the bad rows."""
    seen = set[str]()
    for row in rows:
        if isinstance(row, BadRow):
            bad.append(row)
        elif (path := str(row.path)) in seen:
            bad.append(
                BadRow(row.id, "clip listed twice", f"a row before it names {row.path.name}")
            )
        else:
            seen.add(path)
            yield row


def _unique_ids(clips: Clips, bases: Sequence[Path]) -> list[str]:
    ids = clips.ids
    if len(set(ids)) == len(ids):
        return ids
    counts = Counter(ids)
    return [
        id if counts[id] == 1 else _by_path(Path(path), bases)
        for id, path in zip(ids, clips.paths, strict=True)
    ]


def _by_path(path: Path, bases: Sequence[Path]) -> str:
    inside = (path.relative_to(base) for base in bases if path.is_relative_to(base))
    return next(inside, path).as_posix()


def require_transcripts(
    rows: Iterable[Clip | BadRow], source: Path, column: str
) -> Iterator[Clip | BadRow]:
    """Yield the rows of a source; raises SbkitError where there are clips, and none has a sentence.

    The error comes after the last row.
    """
    clips, spoken = 0, False
    for row in rows:
        if isinstance(row, Clip):
            clips += 1
            spoken = spoken or bool(row.sentence.strip())
        yield row
    if clips and not spoken:
        raise SbkitError(
            f"The column `{column}` of {source} must hold transcripts, but is empty in all of its "
            f"rows ({clips}). Fill it, or name another column with --text_column."
        )


def open_columns(fields: Mapping[str, str], used: Iterable[str]) -> dict[str, str]:
    """Return the columns that a clip keeps: all but those that were used.

    The speaker's column is called ``speaker``. A name that prepared splits use themselves gets the
    prefix ``manifest_``.
    """
    names = open_names(tuple(fields), tuple(used))
    return {new: fields[old] for old, new in names.items()}


@lru_cache
def open_names(names: tuple[str, ...], used: tuple[str, ...]) -> Mapping[str, str]:
    """Return what the columns that a clip keeps are called, by their names in the manifest."""
    kept = [name for name in names if name not in used]
    lower = {name.lower(): name for name in kept}
    speaker = next((lower[name] for name in SPEAKER_COLUMNS if name in lower), None)
    return {name: "speaker" if name == speaker else free_name(name) for name in kept}


def free_name(name: str) -> str:
    """Return what a column is called so that it is none of sbkit's own."""
    return f"manifest_{name}" if name in RESERVED_COLUMNS else name


def check_locale(manifest: Manifest, language: str) -> str | None:
    """Return a note if some rows have another locale than the language; None if none has.

    Rows without a locale say nothing, and a region makes no difference.

    Raises:
        SbkitError: more than half of the rows that have a locale have another one.
    """
    locales = _count_locales(Clips.of(manifest.clips))
    del locales[""]
    others = Counter(
        {locale: n for locale, n in locales.items() if primary(locale) != primary(language)}
    )
    if not others:
        return None
    most, count = others.most_common(1)[0]
    total, other = locales.total(), others.total()
    if 2 * other > total:
        raise SbkitError(
            f"`language` must be the language of the manifest, but is {language} where {count} of "
            f"{total} rows have the locale {most}. Pass --language={most}."
        )
    rows = "1 row has" if other == 1 else f"{other} rows have"
    return f"{rows} another locale than {language} (of {total}; most often {most})"


def _count_locales(clips: Clips) -> Counter[str]:
    if "locale" not in clips.columns.column_names:
        return Counter()
    counts = Counter[str]()
    for entry in clips.columns["locale"].value_counts().to_pylist():
        counts[(entry["values"] or "").strip()] += entry["counts"]
    return counts
