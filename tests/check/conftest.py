"""The release of the tests of `sbkit check`."""

import shutil
from pathlib import Path

import pytest

from sbkit.text.normalization import normalize
from tests.runs import COUNTS, Workplace, prompts, write_tsv


@pytest.fixture(scope="session")
def workplace(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Cut out a small release in which training sees every character of dev and test."""
    folder = tmp_path_factory.mktemp("workplace")
    clips = folder / "release" / "clips"
    clips.mkdir(parents=True)
    paths: set[str] = set()
    for split, count in COUNTS.items():
        rows = []
        for clip, text in prompts(asterisk_english, split):
            characters = set(normalize(text, "en"))
            if len(rows) < count and (split == "train" or characters <= paths):
                paths |= characters
                shutil.copy2(clip, clips)
                rows.append((clip.name, text))
        write_tsv(folder / "release", split, rows)
    return Workplace(folder / "release", folder / "cache")
