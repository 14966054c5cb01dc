"""Real speech for the tests of the network."""

from pathlib import Path

import pytest
import soundfile
import torch
from torch import Tensor


@pytest.fixture(scope="session")
def prompts(asterisk_english: Path) -> list[Tensor]:
    """Give 32 real prompts of many lengths, (S,) each, in the scale of int16."""
    files = sorted((asterisk_english / "clips").glob("*.flac"))[:320:10]
    clips = [torch.from_numpy(soundfile.read(file, dtype="int16")[0]) for file in files]
    return [clip[: 16_000 * 8].float() for clip in clips]
