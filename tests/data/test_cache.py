"""`sbkit cache` lists the cache, and `sbkit cache prune` removes orphans."""

import os
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from sbkit.base.files import open_lock, try_lock
from sbkit.commands import cli
from sbkit.data.cache import default_cache, list_entries, unpack_corpus
from tests.data.test_splits import make_clips, prepare


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prepare a corpus that exists, one that is gone, and one that is unknown."""
    folder = tmp_path / "cache"
    for name, count in (("here", 40), ("gone", 3)):
        prepare(tmp_path, make_clips(tmp_path / name, count))
    shutil.rmtree(tmp_path / "gone")
    unknown = folder / "embedded" / "talks-0123456789ab"
    unknown.mkdir(parents=True)
    (unknown / "a.wav").touch()
    os.truncate(unknown / "a.wav", 1_500_000_000)  # which takes no room
    (folder / "asterisk-prompts").mkdir()
    monkeypatch.setenv("SBKIT_CACHE", str(folder))
    return folder


def of(cache: Path, name: str) -> Path:
    """Find the folder of one corpus."""
    (entry,) = [item for item in list_entries(cache) if name in str(item.corpus or item.folder)]
    return entry.folder


def test_cache_command_lists_corpora_and_sizes(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["cache"]) == 0
    *lines, total = capsys.readouterr().out.splitlines()
    sizes = {line.split("  ")[-1].partition(", in ")[0]: line.split()[:2] for line in lines}
    parent = cache.parent
    assert {*sizes} == {f"{parent / 'here'}", f"{parent / 'gone'} (not needed)", "unknown"}
    assert sizes[f"{parent / 'here'}"] == ["0.3", "MB"]
    assert sizes["unknown"] == ["1.5", "GB"]
    assert total.endswith(f"in 3 folders of {cache}")


def test_cache_prune_removes_only_orphans(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    present, orphan, unknown = of(cache, "here"), of(cache, "gone"), of(cache, "talks")
    cli.run(["cache", "prune"])
    assert f"removed {orphan} (0.0 MB) of {cache.parent / 'gone'}" in capsys.readouterr().out
    assert [folder.is_dir() for folder in (present, orphan, unknown)] == [True, False, True]
    assert (cache / "asterisk-prompts").is_dir()


def test_cache_prune_keeps_the_audio_of_an_inaccessible_corpus(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    cli.run(["cache"])
    cli.run(["cache", "prune"])
    assert "removed" not in capsys.readouterr().out


def test_cache_prune_keeps_a_folder_in_preparation(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    orphan = of(cache, "gone")
    lock = open_lock(orphan)
    assert try_lock(lock, if_unsupported=False)
    cli.run(["cache", "prune"])
    os.close(lock)
    assert orphan.is_dir()
    assert f"kept, since a process is preparing it: {orphan}" in capsys.readouterr().out


def test_cache_prune_removes_nothing_outside_the_cache(cache: Path) -> None:
    outside = of(cache, "gone").rename(cache.parent / "thesis")
    (cache / "audio" / "link").symlink_to(outside)
    cli.run(["cache", "prune"])
    assert (outside / "corpus.json").is_file()


def test_cache_command_lists_a_folder_without_readable_corpus(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (of(cache, "here") / "corpus.json").write_text("{")
    assert cli.run(["cache"]) == 0
    assert capsys.readouterr().out.count("  unknown, in ") == 2


def test_cache_prune_removes_an_archive_and_the_audio_decoded_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "cache"))
    archive = tmp_path / "talks.tar"
    clips = make_clips(tmp_path / "talks", 3)
    with tarfile.open(archive, "w") as tar:
        tar.add(tmp_path / "talks", "talks")
    folder = unpack_corpus(archive)
    prepare(tmp_path, [replace(clip, path=folder / clip.path.name) for clip in clips])
    archive.unlink()
    assert len(list_entries(tmp_path / "cache")) == 2
    cli.run(["cache", "prune"])
    assert list_entries(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SBKIT_CACHE": "~/s"}, "/home/ann/s"),
        ({"SBKIT_CACHE": "/s", "XDG_CACHE_HOME": "/x"}, "/s"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/sbkit"),
        ({}, "/home/ann/.cache/sbkit"),
    ],
)
def test_default_cache_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("SBKIT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/ann", **variables}.items():
        monkeypatch.setenv(name, value)
    assert default_cache() == Path(expected)
