"""The corpus of a Common Voice release, or of any folder of the same form.

<data_folder>[/LANGUAGE]/train.tsv   and a TSV for each other split
                         clips/      the audio files
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from sbkit.base.errors import ConfigError, DataError
from sbkit.data.cache import unpacked
from sbkit.data.corpus import KnobValues
from sbkit.data.manifest import Excluded, Manifest
from sbkit.data.splits import resolve_splits
from sbkit.data.tables import TableOptions, read_table, to_manifest
from sbkit.text.languages import check_language, language_tags

ROLES = {"train": ("train",), "valid": ("dev",), "test": ("test",)}
DEFAULT_SUFFIX = ".mp3"  # the first releases named clips without their extension


def recognizes(folder: Path) -> bool:
    """Check whether a folder has TSVs or ``clips/``, itself or in the folder of a language."""
    return any(any(folder.glob(pattern)) for pattern in ("*.tsv", "clips", "*/clips"))


def splits(knobs: KnobValues) -> Mapping[str, tuple[str, ...]]:
    """Return the splits of each role: the knob ``splits``, else train, dev and test."""
    if not knobs.get("splits"):
        _find_releases(knobs, *(split for names in ROLES.values() for split in names))
        return ROLES
    available = [set(split_names(release)) for release in _find_releases(knobs).values()]
    return resolve_splits(knobs["splits"], ROLES, sorted(set.intersection(*available)))


def read(knobs: KnobValues, split: str) -> Manifest:
    """Read one split of the release, or of one release for each language of a list."""
    return read_releases(_find_releases(knobs, split), split, TableOptions.from_knobs(knobs))


def _find_releases(knobs: KnobValues, *splits: str) -> dict[str, Path]:
    releases = {
        language: find_release(knobs["data_folder"], language, splits)
        for language in language_tags(knobs["language"])
    }
    if len(set(releases.values())) < len(releases):
        raise ConfigError(
            f"`language` names {', '.join(releases)}, but {knobs['data_folder']} is the release of "
            "one language. Name one language, or a data folder with a folder for each."
        )
    return releases


def find_release(data_folder: str | Path | None, language: str, splits: Sequence[str] = ()) -> Path:
    """Return the folder with the TSVs: ``data_folder`` or the language's folder in it."""
    check_language(language)  # it becomes the name of a folder
    tsvs = ", ".join(f"{split}.tsv" for split in splits or ("train", "dev", "test"))
    advice = f"Pass --data_folder=FOLDER of a Common Voice release, with {tsvs} and clips/."
    folder = unpacked(Path(data_folder or "").expanduser().absolute())
    if not data_folder or not folder.is_dir():
        raise DataError(f"data_folder: {folder} is not a folder. {advice}")
    release = folder
    if not any(folder.glob("*.tsv")) and (folder / language).is_dir():
        release = folder / language
    missing = [f"{split}.tsv" for split in splits if not (release / f"{split}.tsv").is_file()]
    if not (release / "clips").is_dir():
        missing.append("clips/")
    if missing:
        if available := split_names(release):  # a delta release has no train, dev or test
            advice += f" Or choose among its splits, {', '.join(available)}, with --splits."
        raise DataError(f"data_folder: {release} has no {', '.join(missing)}. {advice}")
    return release


def split_names(release: Path) -> tuple[str, ...]:
    """Return the names of the TSVs of a release."""
    return tuple(sorted(tsv.stem for tsv in release.glob("*.tsv")))


def read_release(tsv: Path, options: TableOptions) -> Manifest:
    """Read one TSV of a release, which is beside ``clips/``, as `read_releases`."""
    return read_releases({options.language: tsv.parent}, tsv.stem, options)


def read_releases(releases: Mapping[str, Path], split: str, options: TableOptions) -> Manifest:
    """Read one split, a TSV in the release folder of each language, as one manifest."""
    parts = []
    for language, release in releases.items():
        clips = release / "clips"
        columns = replace(options, language=language)
        table = read_table(release / f"{split}.tsv")
        parts.append((language, to_manifest(table, columns, partial(_locate, clips), clips)))
    first = next(iter(releases.values()))
    return Manifest.join_named(parts, first.parent if len(parts) > 1 else first / "clips")


def _locate(clips: Path, name: str) -> str | Excluded:
    """Return the path of a file in the folder of clips."""
    if not name:
        return Excluded("", "no path", "the field of the path is empty")
    if name.startswith("/") or ".." in name.split("/"):
        return Excluded("", "path outside the clips folder", name)
    if "." not in name.rpartition("/")[2]:
        name = _file_names(clips).get(name, name + DEFAULT_SUFFIX)
    return f"{clips}/{name}"


@lru_cache(maxsize=1)
def _file_names(folder: Path) -> dict[str, str]:
    """Return the names of the files in a folder, by their names without extension."""
    return {file.stem: file.name for file in folder.iterdir()} if folder.is_dir() else {}
