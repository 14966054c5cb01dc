"""The corpus of a Common Voice release folder, or of any folder of the same form."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sbkit.base.errors import SbkitError
from sbkit.data.corpora.release import find_release, read_releases, split_names
from sbkit.data.storage.manifest import Manifest
from sbkit.data.storage.splits import resolve_splits
from sbkit.text.languages import language_tags

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
