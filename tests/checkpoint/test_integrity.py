"""A folder is what was written into it, or what is wrong with it is said; nothing blocks."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sbkit.checkpoint.integrity import CHECKSUMS, find_damage, write_checksums


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole folder of two files, and one of its own."""
    (tmp_path / "weights").write_bytes(b"1234")
    (tmp_path / "meta").write_text("epoch: 1")
    (tmp_path / "more").mkdir()
    write_checksums(tmp_path)
    return tmp_path


def test_a_folder_is_whole_as_it_was_written(folder: Path) -> None:
    assert find_damage(folder) is None
    assert set(json.loads((folder / CHECKSUMS).read_text())) == {"weights", "meta"}


def listing(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    """Rewrite the checksums."""

    def rewrite(folder: Path) -> None:
        sums = json.loads((folder / CHECKSUMS).read_text())
        (folder / CHECKSUMS).write_text(json.dumps(change(sums)))

    return rewrite


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "weights").write_bytes(b"1235"), "weights is not what was"),
        (lambda folder: (folder / "weights").unlink(), "weights is not there"),
        (lambda folder: (folder / "stranger").touch(), "stranger has no checksum"),
        (lambda folder: (folder / CHECKSUMS).unlink(), "no checksums.json"),
        (lambda folder: (folder / CHECKSUMS).write_bytes(b"\xff\xfe{}"), "cannot be read"),
        (listing(lambda sums: None), "lists something else"),
        (listing(lambda sums: {}), "has no checksum"),
        (listing(lambda sums: {**sums, "../weights": "x"}), "lists something else"),
    ],
)
def test_damage_is_said(folder: Path, spoil: Callable[[Path], None], said: str) -> None:
    spoil(folder)
    assert said in (find_damage(folder) or "nothing")
