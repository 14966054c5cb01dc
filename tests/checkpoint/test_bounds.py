"""What describes a run or a checkpoint is read up to a size: a file of holes takes no disk."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from sbkit.train.cost import SUMMARY
from sbkit.train.cost import _read as read_summary
from sbkit.train.saved_counters import read_counters
from speechbrain.utils.checkpoints import METAFNAME

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.averaging import FILE, read_averaged
from sbkit.checkpoint.integrity import CHECKSUMS, find_damage, listed_checksums
from sbkit.checkpoint.listing import LARGEST_META, describe

HOLES = 200 << 20  # bytes
READERS: dict[str, Callable[[Path], object]] = {
    CHECKSUMS: find_damage,
    f"./{CHECKSUMS}": listed_checksums,
    FILE: read_averaged,
    SUMMARY: lambda folder: read_summary(folder / SUMMARY),
    "brain.ckpt": lambda folder: read_counters(SimpleNamespace(), folder / "brain.ckpt"),
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_of_holes_is_not_read(name: str, tmp_path: Path) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(HOLES)
    tracemalloc.start()
    try:
        found = READERS[name](tmp_path)
    except SbkitError as error:
        found = str(error)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found in ({}, None) or "must be a file of at most" in str(found)
    assert peak < 10 << 20


def test_a_checkpoint_that_is_described_at_length_is_none(tmp_path: Path) -> None:
    (tmp_path / METAFNAME).write_text("unixtime: 1.0\n")
    assert describe(tmp_path) is not None
    (tmp_path / METAFNAME).write_text("unixtime: 1.0\n" + "# so long\n" * (LARGEST_META // 9))
    assert describe(tmp_path) is None
