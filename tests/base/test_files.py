"""A file is written completely or not at all, JSON has no NaN, and untrusted files are data."""

import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from gzip import BadGzipFile
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch

from sbkit.base.errors import SbkitError
from sbkit.base.files import (
    ABANDONED_SECONDS,
    atomic_folder,
    from_plain,
    iter_raw_lines,
    os_errors_name,
    read_regular,
    read_text_lines,
    require_writable,
    temporary_path,
    to_json,
    write_bytes_atomically,
)


def test_failed_write_keeps_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights.bin"
    write_bytes_atomically(path, b"old")

    def run_out_of_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", run_out_of_space)
    with pytest.raises(OSError, match="No space left") as caught:
        write_bytes_atomically(path, b"new")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]


def test_two_threads_write_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have written their content before either renames it."""
    barrier, contents, fsync = Barrier(2), (b"first", b"second"), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (fsync(file), barrier.wait(timeout=10)))
    with ThreadPoolExecutor() as threads:
        list(threads.map(write_bytes_atomically, [tmp_path / "labels.txt"] * 2, contents))
    assert (tmp_path / "labels.txt").read_bytes() in contents


def test_building_names_folder_when_disk_is_full(tmp_path: Path) -> None:
    """The operating system names no file if the disk is full."""
    with pytest.raises(OSError, match="No space left") as caught, atomic_folder(tmp_path / "store"):
        raise OSError(28, "No space left on device")
    assert caught.value.filename == str(tmp_path / "store")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (float("nan"), "null"),
        ([1.5, float("inf"), None], "[1.5, null, null]"),
        ({"a": {"b": (float("-inf"), "x")}}, '{"a": {"b": [null, "x"]}}'),
        ({"word": "日本"}, '{"word": "日本"}'),
        ({"yes": True, "n": 3}, '{"yes": true, "n": 3}'),
        ([torch.tensor(0.5), np.float32(1.5), np.int64(3)], "[0.5, 1.5, 3]"),
    ],
)
def test_json_has_no_nan(value: object, text: str) -> None:
    assert to_json(value) == text


@pytest.mark.parametrize("is_seen", [True, False])
def test_first_of_two_builders_wins(
    is_seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one may be done before this one looks, or between that and its own renaming."""
    folder = tmp_path / "deep" / "folder"
    leftover = temporary_path(folder)
    leftover.mkdir(parents=True)
    os.utime(leftover, (time.time() - 2 * ABANDONED_SECONDS,) * 2)  # of a killed builder
    with atomic_folder(folder) as slow:
        with atomic_folder(folder) as quick:
            (quick / "file").write_text("quick")
        (slow / "file").write_text("slow")
        if not is_seen:
            monkeypatch.setattr(Path, "is_dir", lambda path: False)
    assert (folder / "file").read_text() == "quick"
    assert list(folder.parent.iterdir()) == [folder]


def test_old_folder_with_a_new_file_is_still_being_built(tmp_path: Path) -> None:
    busy = temporary_path(tmp_path / "folder")
    (busy / "en").mkdir(parents=True)
    (busy / "en" / "clip.wav").touch()
    for path in (busy, busy / "en"):
        os.utime(path, (time.time() - 2 * ABANDONED_SECONDS,) * 2)
    with atomic_folder(tmp_path / "folder"):
        pass
    assert (busy / "en" / "clip.wav").exists()


def test_error_of_gzip_keeps_its_text(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Not a gzipped file"), os_errors_name(tmp_path / "corpus.gz"):
        raise BadGzipFile("Not a gzipped file")


@pytest.mark.parametrize("folder", ["file/scores", "/proc/scores"])
def test_require_writable_refuses_unwritable_folder(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SbkitError, match="`--out`: .*scores cannot be written to"):
        require_writable(tmp_path / folder, option="--out")
    require_writable(tmp_path / "deep" / "scores", option="--out")
    assert not [*(tmp_path / "deep" / "scores").iterdir()]


UNREADABLE: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "a device": lambda file: file.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "a loop of links": lambda file: file.symlink_to(file),
    "missing": lambda file: None,
}


def test_iter_raw_lines_follows_link_and_read_regular_does_not(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo")
    (tmp_path / "b.txt").symlink_to(tmp_path / "a.txt")
    assert list(iter_raw_lines(tmp_path / "b.txt", subject="A text")) == [b"one\n", b"\n", b"two"]
    with pytest.raises(SbkitError, match="is not a regular file"):
        read_regular(tmp_path / "b.txt", max_bytes=9, subject="A file")
    assert read_regular(tmp_path / "a.txt", max_bytes=8, subject="A file") == b"one\n\ntwo"
    with pytest.raises(SbkitError, match="at most 7 bytes, but .*a.txt has 8"):
        read_regular(tmp_path / "a.txt", max_bytes=7, subject="A file")


@pytest.mark.parametrize("read", [read_regular, read_text_lines])
@pytest.mark.parametrize("make", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_pipe_device_folder_loop_and_missing_file_are_not_read(
    make: Callable[[Path], Any], read: Callable[..., object], tmp_path: Path
) -> None:
    make(tmp_path / "a.txt")
    with pytest.raises(SbkitError, match="A file must be readable, but .*a.txt is not"):
        read(tmp_path / "a.txt", subject="A file")
    with pytest.raises(SbkitError, match="A text must be readable, but .*none.txt is not"):
        list(iter_raw_lines(tmp_path / "none.txt", subject="A text"))


@dataclass(frozen=True)
class Stored:
    names: tuple[str, ...]
    shares: Mapping[str, float | None]
    rate: int = 16_000


def test_dataclass_is_read_from_json() -> None:
    stored = Stored(("a", "b"), {"a": 1, "b": 0.5, "c": None}, 8000)
    assert from_plain(Stored, json.loads(to_json(asdict(stored)))) == stored


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ([], r"it is \[\], which has no fields"),
        ({"names": []}, "its shares is missing"),
        ({"names": [], "shares": {}, "rates": 1}, "its rates is unknown"),
        ({"names": [1], "shares": {}}, "its names is 1, which has the wrong type"),
        ({"names": [], "shares": {"a": True}}, "its shares is True, which"),
        ({"names": [], "shares": {}, "rate": 0.5}, "its rate is 0.5, which"),
    ],
)
def test_wrong_field_is_named(values: object, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        from_plain(Stored, values)
