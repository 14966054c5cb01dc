"""A file of somebody else's is read as data: no pipe, no device, no line without end."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sbkit.base import regular
from sbkit.base.errors import SbkitError
from sbkit.base.regular import read_lines, read_regular, real_path

STRANGE: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "a device": lambda file: file.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "a link to itself": lambda file: file.symlink_to(file),
    "missing": lambda file: None,
}


def test_lines_of_what_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo")
    (tmp_path / "b.txt").symlink_to(tmp_path / "a.txt")
    assert list(read_lines(tmp_path / "b.txt", what="A text")) == [b"one\n", b"\n", b"two"]


@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE.keys())
def test_what_is_no_file_has_no_lines(make: Callable[[Path], Any], tmp_path: Path) -> None:
    make(tmp_path / "a.txt")
    with pytest.raises(SbkitError, match="A text must be readable, but .*a.txt is not"):
        list(read_lines(tmp_path / "a.txt", what="A text"))


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("a")
    with pytest.raises(SbkitError, match="is a symbolic link"):
        read_regular(real_path(tmp_path / "a"), largest=9, what="A file")


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regular, "LONGEST_LINE", 10)
    (tmp_path / "a.txt").write_bytes(b"x" * 8 + b"\n" + bytes(99))
    with pytest.raises(SbkitError, match="must have lines of less than 10 bytes"):
        list(read_lines(tmp_path / "a.txt", what="A text"))
