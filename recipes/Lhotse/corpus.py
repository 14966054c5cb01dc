"""The corpus of a folder that `lhotse prepare` has written: two manifests for each split.

[NAME_]recordings_SPLIT.jsonl.gz, [NAME_]supervisions_SPLIT.jsonl.gz
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from sbkit.data.corpus import Corpus, SettingValues, named_folder, splits_by_prefix
from sbkit.data.lhotse_cuts import read_prepared
from sbkit.data.manifest import Manifest
from sbkit.data.tables import TableOptions, locate, to_manifest
from sbkit.text.languages import single_language_tag

MANIFEST = re.compile(r"((?:.+_)?)supervisions_([^.]+)(\.jsonl(?:\.gz)?)")


class Lhotse(Corpus):
    """The manifests of `lhotse prepare`."""

    layout = "a folder of `lhotse prepare`"

    @classmethod
    def recognizes(cls, settings: SettingValues) -> bool:
        """Check whether a folder has such manifests."""
        folder = named_folder(settings)
        return folder is not None and bool(_find_manifests(folder))

    def splits(self) -> Mapping[str, Sequence[str]]:
        """Return the splits of each role: the key ``splits``, else train*, dev* and test*."""
        folder = Path(self.settings["data_folder"])
        return splits_by_prefix([*_find_manifests(folder)], self.settings)

    def files(self) -> list[Path]:
        """Return the folder of the manifests."""
        return [Path(self.settings["data_folder"])]

    def read(self, split: str) -> Iterator[Manifest]:
        """Read one split, with the columns speaker, language and gender."""
        folder = Path(self.settings["data_folder"])
        recordings, supervisions = _find_manifests(folder)[split]
        language = single_language_tag(self.settings["language"])
        options = TableOptions.from_settings(self.settings, language)
        table = read_prepared(recordings, supervisions, options)
        manifest = to_manifest(table, TableOptions(language=language), partial(locate, folder))
        return manifest.distinct(folder).blocks()


def _find_manifests(folder: Path) -> dict[str, tuple[Path, Path]]:
    manifests: dict[str, tuple[Path, Path]] = {}
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = MANIFEST.fullmatch(file.name)
        recordings = match and folder / f"{match[1]}recordings_{match[2]}{match[3]}"
        if match and recordings and recordings.is_file():
            manifests[match[2]] = recordings, file
    return manifests
