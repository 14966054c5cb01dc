"""The corpus of a folder that `lhotse prepare` has written: two manifests for each split.

[NAME_]recordings_SPLIT.jsonl.gz, [NAME_]supervisions_SPLIT.jsonl.gz
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from sbkit.data.corpus import SettingValues, splits_by_prefix
from sbkit.data.lhotse_cuts import read_prepared
from sbkit.data.manifest import Manifest
from sbkit.data.tables import TableOptions, locate, to_manifest
from sbkit.text.languages import single_language_tag

MANIFEST = re.compile(r"((?:.+_)?)supervisions_([^.]+)(\.jsonl(?:\.gz)?)")


def recognizes(folder: Path) -> bool:
    """Check whether a folder has such manifests."""
    return bool(_find_manifests(folder))


def splits(settings: SettingValues) -> Mapping[str, Sequence[str]]:
    """Return the splits of each role: the key ``splits``, else train*, dev* and test*."""
    return splits_by_prefix([*_find_manifests(Path(settings["data_folder"]))], settings)


def files(settings: SettingValues) -> list[Path]:
    """Return the folder of the manifests, for `sbkit.data.prepared_splits`."""
    return [Path(settings["data_folder"])]


def read(settings: SettingValues, split: str) -> Manifest:
    """Read one split, with the columns speaker, language and gender; paths are relative to it."""
    folder = Path(settings["data_folder"])
    recordings, supervisions = _find_manifests(folder)[split]
    options = TableOptions.from_settings(settings, single_language_tag(settings["language"]))
    table = read_prepared(recordings, supervisions, options)
    return to_manifest(table, options.usual, partial(locate, folder)).distinct(folder)


def _find_manifests(folder: Path) -> dict[str, tuple[Path, Path]]:
    manifests: dict[str, tuple[Path, Path]] = {}
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = MANIFEST.fullmatch(file.name)
        recordings = match and folder / f"{match[1]}recordings_{match[2]}{match[3]}"
        if match and recordings and recordings.is_file():
            manifests[match[2]] = recordings, file
    return manifests
