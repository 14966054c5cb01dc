"""What lies in the cache is listed, and only what is chosen is removed, and only there."""

import fcntl
import os
import shutil
import time
from pathlib import Path

import pytest

from sbkit import cli
from sbkit.data.storage.audio_cache import default_cache
from sbkit.data.storage.cache import list_entries
from tests.data.storage.test_prepare import assert_holds, make_clips, prepare


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prepare two corpora, one of which is gone by now, beside files of an unknown one."""
    folder = tmp_path / "cache"
    for name, count in (("here", 40), ("gone", 3)):
        prepare(tmp_path, make_clips(tmp_path / name, count))
    shutil.rmtree(tmp_path / "gone")
    unknown = folder / "embedded" / "talks-0123456789ab"
    unknown.mkdir(parents=True)
    (unknown / "a.wav").write_bytes(bytes(1_000_000))
    (folder / "asterisk-prompts").mkdir()
    monkeypatch.setenv("SBKIT_CACHE", str(folder))
    return folder


def of(cache: Path, name: str) -> Path:
    """Find the folder of one corpus."""
    (entry,) = [each for each in list_entries(cache) if name in str(each.corpus or each.folder)]
    return entry.folder


@pytest.mark.parametrize("command", [["cache"], ["cache", "list"]])
def test_what_is_there_is_listed(
    cache: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert cli.run(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    (here,) = [line for line in lines if line.endswith(str(cache.parent / "here"))]
    assert here.split()[1:6] == ["0.3", "MB", "40", "0.00", "16000"]
    (gone,) = [line for line in lines if line.endswith(f"{cache.parent / 'gone'} (gone)")]
    assert gone.split()[3] == "3"
    (unknown,) = [line for line in lines if "unknown (" in line]
    assert unknown.split()[1:4] == ["1.0", "MB", "unknown"]
    assert lines[-1].endswith(f"in 3 folders of {cache}")


def test_what_no_corpus_needs_is_removed(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, gone, unknown = of(cache, "here"), of(cache, "gone"), of(cache, "talks")
    cli.run(["cache", "prune", "--dry-run"])
    assert capsys.readouterr().out.count("would remove") == 1
    assert all(folder.is_dir() for folder in (here, gone, unknown))
    cli.run(["cache", "prune"])
    out = capsys.readouterr().out
    assert f"{cache.parent / 'gone'} is gone" in out
    assert out.splitlines()[-1].endswith("freed, 1 folder")
    assert [folder.is_dir() for folder in (here, gone, unknown)] == [True, False, True]
    assert (cache / "asterisk-prompts").is_dir()


def test_what_was_not_used_for_long_is_removed_and_using_it_counts(cache: Path) -> None:
    here = of(cache, "here")
    month_ago = time.time() - 31 * 86_400
    os.utime(here / "corpus.json", (month_ago, month_ago))
    clips = make_clips(cache.parent / "here", 40)
    assert_holds(prepare(cache.parent, clips), clips)
    cli.run(["cache", "prune", "--older-than", "30"])
    assert here.is_dir()
    os.utime(here / "corpus.json", (month_ago, month_ago))
    cli.run(["cache", "prune", "--older-than", "30"])
    assert not here.exists()


def test_a_corpus_that_may_not_be_seen_is_not_gone(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    cli.run(["cache"])
    cli.run(["cache", "prune"])
    assert "0.0 MB freed, 0 folders" in capsys.readouterr().out


def test_what_is_being_prepared_is_kept(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = of(cache, "gone")
    lock = os.open(gone, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    cli.run(["cache", "prune"])
    os.close(lock)
    assert gone.is_dir()
    assert f"kept {gone}" in capsys.readouterr().out


def test_nothing_outside_the_cache_is_removed(cache: Path) -> None:
    outside = cache.parent / "thesis"
    outside.mkdir()
    (outside / "corpus.json").touch()
    (cache / "audio" / "link").symlink_to(outside)
    cli.run(["cache", "prune", "--older-than", "0"])
    assert (outside / "corpus.json").is_file()


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
