"""What a corpus lists: clips with their sentences and columns, and the rows that cannot be used."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sbkit.base.errors import SbkitError

RESERVED_COLUMNS = ("id", "text", "sentence", "samples", "audio")  # of a prepared split
SPEAKER_COLUMNS = ("speaker", "client_id", "speaker_id", "spk_id", "spk")


@dataclass(frozen=True)
class Clip:
    """One utterance of a corpus.

    Attributes:
        id: unique within its manifest; the file name without extension where that is unique.
        path: the audio file.
        sentence: the transcript as the corpus writes it.
        columns: every other column of the manifest; the speaker is always ``speaker``.
    """

    id: str
    path: Path
    sentence: str
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class BadRow:
    """One row that names no clip that can be used; ``id`` says where it stands."""

    id: str
    reason: str
    detail: str


@dataclass(frozen=True)
class Manifest:
    """The rows of one split, in the order of its corpus."""

    clips: tuple[Clip, ...]
    bad_rows: tuple[BadRow, ...]


@dataclass(frozen=True)
class Row:
    """One usable row as it was read: its clip, and where it stands, as in ``line 3``."""

    where: str
    clip: Clip


def collect(rows: Iterable[Row | BadRow], base: Path) -> Manifest:
    """Return the manifest of the rows read, in which every clip and every id comes once.

    A clip that is listed again is a bad row. Clips of different files that share an id are called
    by their path, relative to ``base`` where it lies there.
    """
    first: dict[Path, str] = {}
    clips: list[Clip] = []
    bad: list[BadRow] = []
    for row in rows:
        if isinstance(row, BadRow):
            bad.append(row)
        elif row.clip.path in first:
            detail = f"{row.clip.path.name} is in {first[row.clip.path]} already"
            bad.append(BadRow(row.where, "clip listed twice", detail))
        else:
            first[row.clip.path] = row.where
            clips.append(row.clip)
    return Manifest(tuple(_with_unique_ids(clips, base)), tuple(bad))


def _with_unique_ids(clips: Iterable[Clip], base: Path) -> Iterable[Clip]:
    clips = list(clips)
    counts = Counter(clip.id for clip in clips)
    for clip in clips:
        if counts[clip.id] == 1:
            yield clip
        else:
            path = clip.path.relative_to(base) if clip.path.is_relative_to(base) else clip.path
            yield replace(clip, id=path.as_posix())


def refuse_without_transcripts(manifest: Manifest, source: Path, column: str) -> None:
    """Refuse a manifest whose clips all have an empty sentence.

    Raises:
        SbkitError: there are clips, and none has a sentence.
    """
    if manifest.clips and not any(clip.sentence.strip() for clip in manifest.clips):
        raise SbkitError(
            f"The column `{column}` of {source} must hold transcripts, but is empty in all of its "
            f"rows ({len(manifest.clips)}). Fill it, or name another column with --text_column."
        )


def open_columns(fields: Mapping[str, str], used: Iterable[str]) -> dict[str, str]:
    """Return the columns that a clip keeps: all but those that were used.

    The speaker's column is called ``speaker``. A name that prepared splits use themselves gets the
    prefix ``manifest_``.
    """
    used = set(used)
    kept = {name: value for name, value in fields.items() if name not in used}
    lower = {name.lower(): name for name in kept}
    speaker = next((lower[name] for name in SPEAKER_COLUMNS if name in lower), None)
    return {
        "speaker" if name == speaker else _free_name(name): value for name, value in kept.items()
    }


def _free_name(name: str) -> str:
    return f"manifest_{name}" if name in RESERVED_COLUMNS else name
