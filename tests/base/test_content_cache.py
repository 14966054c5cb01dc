"""The digests of files, and the look at many of them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from sbkit.base import content_cache
from sbkit.base.content_cache import FileDigests, file_digests, keep
from sbkit.data.cache import prune_orphans
from tests.calls import note_calls

NAMES = [f"{folder}/{number}" for folder in "abc" for number in range(8)]


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with more files than are looked at one by one."""
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(content_cache, "MAX_LOOKS", 10)
    monkeypatch.setattr(
        content_cache, "NUM_SAMPLED_FILES", 3
    )  # the first, the last, and one between them
    for name in NAMES:
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(name)
    return tmp_path / "root"


def replace(file: Path) -> None:
    file.with_name("new").write_text("other")
    file.with_name("new").replace(file)


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("a/3", Path.unlink),
        ("b/5", replace),
        ("a/0", lambda file: file.write_text("0/a")),  # in the sample
        ("b/9", lambda file: file.write_text("new")),
        ("b", lambda folder: os.utime(folder)),
        ("c", lambda folder: shutil.rmtree(folder)),
    ],
)
@pytest.mark.parametrize("read", [True, False])
def test_change_among_many_files_is_noticed(
    read: bool,
    name: str,
    edit: Callable[[Path], None],
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [*NAMES, "b/9"]
    for start in (16, 8, 0):  # they come in blocks, which are small, and are then noted together
        file_digests(root, NAMES[start : start + 8], read=read)
    file_digests(root, names, read=read)
    looks = note_calls(monkeypatch, content_cache, "_look", lambda root, name: name)
    file_digests(root, names, read=read)
    assert len(looks) == 3 + 3 + 2  # folders, a sample, and the missing file and its folder
    edit(root / name)
    after = file_digests(root, names, read=read)
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "empty"))
    expected = file_digests(root, names, read=read)
    assert after.digests.equals(expected.digests)
    assert [*after.sizes] == [*expected.sizes] and {*after.errors} == {*expected.errors}


def test_folder_that_only_another_run_looks_at_is_noticed(root: Path) -> None:
    file_digests(root, NAMES[:16])
    before = [file_digests(root, NAMES) for _ in range(2)][1]
    replace(root / "c/3")
    assert not file_digests(root, NAMES).digests.equals(before.digests)


def test_what_is_no_plain_file_has_no_digest(root: Path) -> None:
    os.mkfifo(root / "pipe")
    names = ["pipe", "/dev/zero", "a", "nul\0", "none", os.fsdecode(b"\xff 1"), "a/0"]
    (root / names[5]).write_text("x")
    digests = FileDigests(*file_digests(root, names)).digests.to_pylist()
    assert digests[:5] == [None] * 5 and all(digests[5:])


def test_cache_that_is_read_only_is_as_none(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBKIT_CACHE", str(root / "a/0/cache"))  # in a file
    make = Mock(side_effect=Path.mkdir)
    (path,) = {keep("things", {"number": 1}, make) for _ in range(2)}
    assert make.call_count == 1 and path.is_dir()


def test_prune_removes_what_other_code_has_made_and_nothing_of_the_users(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    names = {"facts/0123456789abcdef-01234567", "pitch/a-0123456789abcdef-89abcdef"}
    other_names = {"run/epoch-00001.pt", "notes/mine-20261128"}
    for name in names | other_names:
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).touch()
    current = keep("facts", {}, Path.touch)
    prune_orphans(cache)
    assert {*cache.glob("*/*")} == {current, *(cache / name for name in other_names)}
