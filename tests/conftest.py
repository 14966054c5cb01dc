"""What several tests share: the default corpus, fetched once and kept in the cache."""

from pathlib import Path

import pytest
import soundfile
import torch
from torch import Tensor

from recipes.AsteriskPrompts.prepare import prepare_prompts
from sbkit.data.store import default_cache


@pytest.fixture(scope="session")
def asterisk_english() -> Path:
    """The release folder of the English prompts."""
    return prepare_prompts(language="en", cache_folder=default_cache())


@pytest.fixture(scope="session")
def prompts(asterisk_english: Path) -> list[Tensor]:
    """Give 32 real prompts of many lengths, (S,) each, in the scale of int16."""
    files = sorted((asterisk_english / "clips").glob("*.flac"))[:320:10]
    clips = [torch.from_numpy(soundfile.read(file, dtype="int16")[0]) for file in files]
    return [clip[: 16_000 * 8].float() for clip in clips]
