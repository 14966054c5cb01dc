"""A folder of recordings with annotations of ELAN (.eaf) or Praat (.TextGrid).

<data_folder>/[FOLDER/]NAME.eaf or NAME.TextGrid, and NAME.wav, or the recording that an .eaf names

`tier` names the tier, type or participant with the transcripts. Splits are found as in a folder
that `manifest: {all: folder}` names: by `train`, `dev` and `test` in names, or by speakers.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from recipes.OwnData.corpus import ALL_SPLITS, OwnData
from sbkit.data.annotations import is_annotation_file
from sbkit.data.corpus import SettingValues, named_folder
from sbkit.data.tables import TableOptions


class Annotations(OwnData):
    """Each annotation of the chosen tiers is a clip."""

    layout = "a folder of .eaf or .TextGrid files"

    @classmethod
    def recognizes(cls, settings: SettingValues) -> bool:
        """Check whether a folder, or a folder in it, has annotations."""
        folder = named_folder(settings)
        if folder is None or not folder.is_dir():
            return False
        files = chain(folder.glob("*"), folder.glob("*/*"))
        return any(is_annotation_file(file.name) for file in files)

    def manifest(self) -> Mapping[str, Any]:
        """Return the folder, whose splits are found."""
        return {ALL_SPLITS: str(named_folder(self.settings))}

    def options(self, source: str) -> TableOptions:
        """Return how a file is read; the data folder is no part of its paths."""
        return replace(super().options(source), data_root=None)
