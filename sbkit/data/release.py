"""Release folders as Common Voice has them: a TSV for each split, and the clips in ``clips/``.

The corpus of a Common Voice release folder, or of any folder of the same form.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from sbkit.base.errors import SbkitError
from sbkit.data.cache import unpacked
from sbkit.data.corpus import resolve_splits
from sbkit.data.manifest import Manifest, join_manifests
from sbkit.data.tables import Located, read_rows, read_table
from sbkit.text.languages import check_language, language_tags

DEFAULT_SUFFIX = ".mp3"  # the first releases named clips without their extension


def read_release(tsv: Path, language: str, knobs: Mapping[str, Any] | None = None) -> Manifest:
    """Read one TSV of a release; its clips get the column ``language``.

    Args:
        tsv: the file, beside the folder ``clips/``.
        language: of what is spoken.
        knobs: ``path_column`` and ``text_column``, as `read_manifests` takes them.

    Raises:
        SbkitError: the file cannot be read as a table, or lacks a column.
    """
    return join_manifests([(tsv.name, _read_tsv(tsv, language, knobs or {}))], tsv.parent / "clips")


def read_releases(
    releases: Mapping[str, Path], split: str, knobs: Mapping[str, Any] | None = None
) -> Manifest:
    """Read one split of the releases of one or several languages, as one manifest.

    Args:
        releases: the release folder of each language.
        split: the name of the TSV without ``.tsv``.
        knobs: as for ``read_release``.
    """
    parts = [
        (language, _read_tsv(folder / f"{split}.tsv", language, knobs or {}))
        for language, folder in releases.items()
    ]
    first = next(iter(releases.values()))
    return join_manifests(parts, first.parent if len(parts) > 1 else first / "clips")


def _read_tsv(tsv: Path, language: str, knobs: Mapping[str, Any]) -> Manifest:
    folder = tsv.parent / "clips"
    columns = knobs.get("path_column"), knobs.get("text_column")
    return read_rows(read_table(tsv), *columns, language, partial(_locate, folder), folder)


def _locate(folder: Path, name: str) -> Located:
    """Return the path that a name in a release means: of a file in its folder of clips."""
    if not name:
        return "no path", "the field of the path is empty"
    if name.startswith("/") or ".." in name.split("/"):
        return "path outside the clips folder", name
    if "." not in name.rpartition("/")[2]:
        name = _full_names(folder).get(name, name + DEFAULT_SUFFIX)
    return f"{folder}/{name}"


@lru_cache(maxsize=1)
def _full_names(folder: Path) -> dict[str, str]:
    """Return the names of the files in a folder, by their names without extension."""
    return {each.stem: each.name for each in folder.iterdir()} if folder.is_dir() else {}


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
    named = unpacked(Path(data_folder or "").expanduser().absolute())
    if not data_folder or not named.is_dir():
        raise SbkitError(f"data_folder must be a folder, but {named} is not one. {todo}")
    release = named
    if not any(named.glob("*.tsv")) and (named / language).is_dir():
        release = named / language
    missing = [f"{split}.tsv" for split in splits if not (release / f"{split}.tsv").is_file()]
    if not (release / "clips").is_dir():
        missing.append("clips/")
    if missing:
        if there := split_names(release):  # a delta release has clips, and no split of them
            todo += f" Or choose among {', '.join(there)}, which are there, with --splits."
        raise SbkitError(
            f"data_folder must hold a release, but {release} has no {', '.join(missing)}. {todo}"
        )
    return release


def split_names(release: Path) -> tuple[str, ...]:
    """Return the names of the TSVs of a release."""
    return tuple(sorted(tsv.stem for tsv in release.glob("*.tsv")))


ROLES = {"train": ("train",), "valid": ("dev",), "test": ("test",)}


def recognizes(folder: Path) -> bool:
    """Check whether a folder has TSVs or ``clips/``, itself or in the folder of a language."""
    return any(any(folder.glob(pattern)) for pattern in ("*.tsv", "clips", "*/clips"))


def splits(knobs: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
    """Return the splits of each role: those of the knob ``splits``, else train, dev and test.

    Raises:
        SbkitError: there is no release in ``data_folder``, or no such split in it.
    """
    if not knobs.get("splits"):
        _releases(knobs, *(split for names in ROLES.values() for split in names))
        return ROLES
    there = [set(split_names(release)) for release in _releases(knobs).values()]
    return resolve_splits(knobs["splits"], ROLES, sorted(set.intersection(*there)))


def read(knobs: Mapping[str, Any], split: str) -> Manifest:
    """Read one split of the release; of those of several languages where a list is named.

    Raises:
        SbkitError: there is no such split, or it cannot be read.
    """
    return read_releases(_releases(knobs, split), split, knobs)


def _releases(knobs: Mapping[str, Any], *needed: str) -> dict[str, Path]:
    """Find the folder of each language; several cannot share one."""
    releases = {
        language: find_release(knobs["data_folder"], language, needed)
        for language in language_tags(knobs["language"])
    }
    if len(set(releases.values())) < len(releases):
        raise SbkitError(
            "`data_folder` must have a folder for each `language`, but one release is meant to be "
            f"{', '.join(releases)}: {knobs['data_folder']}. Name one language."
        )
    return releases
