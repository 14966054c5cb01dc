"""Release folders as Common Voice has them: a TSV for each split, and the clips in ``clips/``."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, starmap
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sbkit.base.errors import SbkitError
from sbkit.data.corpora.clips import Clip, Clips
from sbkit.data.corpora.manifest import (
    BadRow,
    Manifest,
    collect,
    open_columns,
    open_names,
    require_transcripts,
)
from sbkit.data.corpora.tables import (
    PATH_COLUMNS,
    TableRow,
    find_column,
    find_text_column,
    read_table,
)
from sbkit.data.storage.archive import unpacked
from sbkit.text.languages import check_language, primary

PLAIN_NAME = re.compile(r"\w[\w-]*\.\w+")
DEFAULT_SUFFIX = ".mp3"  # the first releases named clips without their extension


class _ClipsFolder:
    """The folder ``clips/`` of a release, and what the names of a TSV mean in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def locate(self, text: str) -> Path | tuple[str, str]:
        """Return the path that a name leads to, or the reason and the detail why to none."""
        if PLAIN_NAME.fullmatch(text):
            return self.folder / text  # as nearly all are; what follows takes 20 us
        name = PurePosixPath(text.strip())
        if not name.name:
            return "no path", "the field path is empty"
        if name.is_absolute() or ".." in name.parts:
            return "path outside the clips folder", str(name)
        if not name.suffix:
            name = name.with_name(self._full_names.get(name.name, name.name + DEFAULT_SUFFIX))
        return self.folder / name

    @cached_property
    def _full_names(self) -> dict[str, str]:
        """The names of the files in the folder, by their names without extension."""
        if not self.folder.is_dir():
            return {}
        return {PurePosixPath(file.name).stem: file.name for file in self.folder.iterdir()}


def read_release(tsv: Path, language: str, knobs: Mapping[str, Any] | None = None) -> Manifest:
    """Read one TSV of a release; its clips get the column ``language``.

    Args:
        tsv: the file, beside the folder ``clips/``.
        language: of what is spoken.
        knobs: ``path_column`` and ``text_column`` name the two columns; null: the usual names; a
            ``text_column`` of False: there are no transcripts.

    Raises:
        SbkitError: the file cannot be read as a table, lacks a column or holds no transcript.
    """
    knobs = knobs or {}
    table = read_table(tsv)
    path_column = find_column(table, knobs.get("path_column"), PATH_COLUMNS, "path_column")
    text_column = find_text_column(table, knobs.get("text_column"))
    clips = table.whole and to_clips(
        table.whole,
        folder=tsv.parent / "clips",
        path=path_column,
        text=text_column,
        constant={"language": language},
    )
    if clips:
        return Manifest(clips, ())
    folder = _ClipsFolder(tsv.parent / "clips")
    rows: Iterator[Clip | BadRow] = (
        _read_row(row, folder, path_column, text_column, language) for row in table.rows
    )
    if text_column:
        rows = require_transcripts(rows, tsv, text_column)
    return collect(rows, tsv.parent / "clips")


def _read_row(
    row: TableRow | BadRow, clips: _ClipsFolder, path_column: str, text_column: str, language: str
) -> Clip | BadRow:
    if isinstance(row, BadRow):
        return row
    path = clips.locate(row.fields.get(path_column, ""))  # JSON Lines may lack it
    if isinstance(path, tuple):
        return BadRow(f"row {row.number}", *path)
    columns = open_columns(row.fields, (path_column, text_column))
    columns.setdefault("language", language)
    return Clip(path.stem, path, row.fields.get(text_column, ""), columns)


def to_clips(
    table: pa.Table, *, folder: Path, path: str, text: str, constant: Mapping[str, str]
) -> Clips | None:
    """Make clips of rows that each name a file of the folder; None where a row is unusual.

    Two million rows take 6 s as columns, and 47 s one by one.

    Args:
        table: all rows, as texts.
        folder: holds the clips.
        path: the column of their names.
        text: the column of their transcripts; "" where there are none.
        constant: columns with one value, where the table has none.
    """
    names = table[path]
    sentences = table[text] if text else pa.array([""] * len(table), pa.string())
    spoken = not text or pc.any(pc.not_equal(pc.utf8_trim_whitespace(sentences), "")).as_py()
    plain = pc.all(pc.match_substring_regex(names, f"^{PLAIN_NAME.pattern}$")).as_py()
    if not (spoken and plain):
        return None
    ids = pc.replace_substring_regex(names, r"\.[^.]*$", "")
    if len(pc.unique(ids)) < len(ids):
        return None
    paths = pc.binary_join_element_wise(f"{folder}/", names, "").cast(pa.binary())
    own = pa.table({"id": ids, "path": paths, "sentence": sentences})
    kept = open_names(tuple(table.column_names), (path, text))
    columns = {new: table[old] for old, new in kept.items()}
    for name, value in constant.items():
        columns.setdefault(name, pa.array([value] * len(table), pa.string()))
    return Clips(own, pa.table(columns))


def read_releases(
    releases: Mapping[str, Path], split: str, knobs: Mapping[str, Any] | None = None
) -> Manifest:
    """Read one split of the releases of one or several languages, as one manifest.

    Args:
        releases: the release folder of each language.
        split: the name of the TSV without ``.tsv``.
        knobs: as for ``read_release``.
    """
    read = {
        language: read_release(folder / f"{split}.tsv", language, knobs)
        for language, folder in releases.items()
    }
    if len(read) == 1:
        return next(iter(read.values()))
    rows = chain.from_iterable(starmap(_named_by_language, read.items()))
    return collect(rows, next(iter(releases.values())).parent)


def _named_by_language(language: str, manifest: Manifest) -> Iterator[Clip | BadRow]:
    yield from manifest.clips
    for bad in manifest.bad_rows:
        yield BadRow(f"{language}, {bad.id}", bad.reason, bad.detail)


def find_release(data_folder: str | Path | None, language: str, splits: Sequence[str] = ()) -> Path:
    """Return the folder that holds the TSVs: the one named, or the language's folder in it.

    Raises:
        SbkitError: it holds no release, or not the splits that are asked for, or there is no such
            language.
    """
    check_language(language)  # it becomes the name of a folder
    todo = (
        "Pass --data_folder=FOLDER of a Common Voice release, which holds "
        f"{', '.join(f'{split}.tsv' for split in splits or ('train', 'dev', 'test'))} and clips/."
    )
    if not data_folder:
        raise SbkitError(f"data_folder must name a folder, but is not set. {todo}")
    named = unpacked(Path(data_folder).expanduser().absolute())
    if not named.is_dir():
        raise SbkitError(f"data_folder must be a folder, but {named} is not one. {todo}")
    release = named
    if not any(named.glob("*.tsv")) and (named / language).is_dir():
        release = named / language
    missing = [f"{split}.tsv" for split in splits if not (release / f"{split}.tsv").is_file()]
    if not (release / "clips").is_dir():
        missing.append("clips/")
    if missing:
        there = split_names(release)
        if there and missing != ["clips/"]:  # a delta release has clips, and no split of them
            todo += (
                f" Or divide the rows of {there[0]}.tsv into them."
                if len(there) == 1
                else f" Or choose among {', '.join(there)}, which are there: --splits="
                f"'{{train: {there[-1]}, valid: NAME, test: NAME}}'."
            )
        todo += _name_regions(named, language)
        raise SbkitError(
            f"data_folder must hold a release, but {release} has no {', '.join(missing)}. {todo}"
        )
    return release


def _name_regions(folder: Path, language: str) -> str:
    """Name the folders of a language's regions, as of zh-CN where zh is asked for."""
    there = sorted(each.name for each in folder.iterdir() if (each / "clips").is_dir())
    regions = [each for each in there if primary(each) == primary(language) and each != language]
    return f" Or pass --language={regions[0]}, which is there." if regions else ""


def split_names(release: Path) -> tuple[str, ...]:
    """Return the names of the TSVs that list clips; those of other releases' facts are left out."""
    return tuple(sorted(tsv.stem for tsv in release.glob("*.tsv") if _lists_clips(tsv)))


def _lists_clips(tsv: Path) -> bool:
    """Check for a path in the header: ``reported.tsv`` and ``clip_durations.tsv`` have none."""
    if not tsv.is_file():
        return False
    with tsv.open("rb") as file:
        header = file.readline(10_000).decode(errors="replace").lower()
    return any(column in header for column in PATH_COLUMNS)
