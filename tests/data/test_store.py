"""Stores are whole or not there, and give back what was put in."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from sbkit.base.errors import SbkitError
from sbkit.base.files import building
from sbkit.data.store import Utterance, default_cache, open_store, write_store


def utterances(count: int) -> Iterator[Utterance]:
    """Make utterances of growing length, their samples counted from zero."""
    for n in range(count):
        audio = np.arange(n, dtype="<i2").tobytes()
        yield Utterance(f"clip{n}", f"été {n}", f"Été {n}!", "ann", n, audio)


def test_a_store_gives_back_what_was_written(tmp_path: Path) -> None:
    write_store(tmp_path / "store", utterances(250))
    dataset = open_store(tmp_path / "store")
    assert len(dataset) == 250
    for n in (0, 99, 100, 249):
        row = dataset[n]
        assert (row["id"], row["text"], row["sentence"]) == (f"clip{n}", f"été {n}", f"Été {n}!")
        assert (row["speaker"], row["samples"]) == ("ann", n)
        assert np.array_equal(np.frombuffer(row["audio"], "<i2"), np.arange(n))


def test_a_store_is_read_from_disk_when_asked(tmp_path: Path) -> None:
    write_store(tmp_path / "store", utterances(5))
    dataset = open_store(tmp_path / "store")
    assert [file["filename"] for file in dataset.cache_files] == [
        str(tmp_path / "store" / "data.arrow")
    ]
    assert dataset.select([3, 1])["id"][:] == ["clip3", "clip1"]


def test_an_empty_store_can_be_opened(tmp_path: Path) -> None:
    write_store(tmp_path / "store", iter(()))
    dataset = open_store(tmp_path / "store")
    assert len(dataset) == 0
    assert "audio" in dataset.column_names


def test_nothing_is_left_of_a_store_that_failed(tmp_path: Path) -> None:
    def failing() -> Iterator[Utterance]:
        yield from utterances(150)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_store(tmp_path / "store", failing())
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SbkitError, match=r"must hold data\.arrow"):
        open_store(tmp_path / "store")


def test_the_first_of_two_builders_wins(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    with building(folder) as slow:
        with building(folder) as quick:
            (quick / "file").write_text("quick")
        (slow / "file").write_text("slow")
    assert (folder / "file").read_text() == "quick"
    assert list(folder.parent.iterdir()) == [folder]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(SbkitError, match="must be a folder to write to"),
        building(tmp_path / "file" / "store"),
    ):
        pass


@pytest.mark.parametrize("part", ["data.arrow", "data.json"])
@pytest.mark.parametrize("change", [lambda content: content[:-9], lambda content: content[::-1]])
def test_a_store_that_is_not_what_was_written_is_refused(
    tmp_path: Path, part: str, change: Callable[[bytes], bytes]
) -> None:
    write_store(tmp_path / "store", utterances(5))
    open_store(tmp_path / "store")
    file = tmp_path / "store" / part
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(SbkitError, match=r"store is damaged\. Remove it"):
        open_store(tmp_path / "store")


def test_what_a_killed_builder_left_is_removed_and_what_a_live_one_builds_is_not(
    tmp_path: Path,
) -> None:
    left = tmp_path / ".store.0123456789ab.tmp"
    left.mkdir()
    (left / "file").touch()
    with building(tmp_path / "store") as slow:
        assert not left.exists()
        with building(tmp_path / "store"):
            assert slow.is_dir()
    assert list(tmp_path.iterdir()) == [tmp_path / "store"]


def test_a_replaced_folder_is_there_until_the_new_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "file").write_text("old")
    rename = Path.rename

    def fail(source: Path, target: Path) -> Path:
        if source.suffix == ".tmp":
            raise OSError(5, "Input/output error")
        return rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(OSError, match="Input/output"), building(folder, replace=True) as new:
            (new / "file").write_text("new")
    assert (folder / "file").read_text() == "old"
    with building(folder, replace=True) as new:
        (new / "file").write_text("new")
    assert (folder / "file").read_text() == "new"
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SBKIT_CACHE": "/s", "XDG_CACHE_HOME": "/x"}, "/s"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/sbkit"),
        ({}, "/home/ann/.cache/sbkit"),
    ],
)
def test_default_cache(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("SBKIT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/ann", **variables}.items():
        monkeypatch.setenv(name, value)
    assert default_cache() == Path(expected)
