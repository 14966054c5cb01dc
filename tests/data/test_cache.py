"""The cache is listed and pruned, and holds what was in the archives of corpora."""

import io
import os
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.prepare import corpus_of
from sbkit.base.content_cache import default_cache
from sbkit.base.errors import SbkitError
from sbkit.base.files import open_lock, try_lock
from sbkit.commands import cli
from sbkit.data.cache import list_entries, unpack_corpus
from tests.data.test_splits import make_clips, prepare
from tests.recipes.test_common_voice import make_release
from tests.recipes.test_common_voice import prepare as prepare_release


@pytest.fixture
def cache(tmp_path: Path, own_cache: Path) -> Path:
    """Prepare a corpus that exists, one that is gone, and one that is unknown."""
    for name, count, rate in (("here", 40, 16_000), ("gone", 3, 8_000)):
        prepare(tmp_path, make_clips(tmp_path / name, count, rate))
    shutil.rmtree(tmp_path / "gone")
    unknown = own_cache / "embedded" / "talks-0123456789ab"
    unknown.mkdir(parents=True)
    (unknown / "a.wav").touch()
    os.truncate(unknown / "a.wav", 1_500_000_000)  # which takes no room
    (own_cache / "asterisk-prompts").mkdir()
    return own_cache


def of(cache: Path, name: str) -> Path:
    (entry,) = [item for item in list_entries(cache) if name in f"{item.name} {item.folder.name}"]
    return entry.folder


def test_command_lists_corpora_and_sizes(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_prune_keeps_an_unfinished_folder(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_prune_removes_an_archive_and_its_decoded_audio(tmp_path: Path, own_cache: Path) -> None:
    archive = tmp_path / "talks.tar"
    clips = make_clips(tmp_path / "talks", 3)
    with tarfile.open(archive, "w") as tar:
        tar.add(tmp_path / "talks", "talks")
    folder = unpack_corpus(archive)
    prepare(tmp_path, [replace(clip, path=folder / clip.path.name) for clip in clips])
    cli.run(["cache", "prune"])  # while it exists
    archive.unlink()
    assert len(list_entries(own_cache)) == 2
    cli.run(["cache", "prune"])
    assert list_entries(own_cache) == []


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


# ---- archives, which are unpacked completely or not at all

LINKS_AND_DEVICES = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)


def pack(tmp_path: Path, suffix: str = ".tar.gz") -> Path:
    """Pack a release of Italian as Common Voice does."""
    release = make_release(tmp_path / "cv-corpus-1.0" / "it")
    archive = tmp_path / f"cv{suffix}"
    with tarfile.open(archive, f"w:{suffix.rpartition('.')[2].replace('tar', '')}") as tar:
        tar.add(release.parent, "cv-corpus-1.0")
    return archive


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_archive_is_prepared_like_its_folder(suffix: str, tmp_path: Path) -> None:
    archive = pack(tmp_path, suffix)
    folder = tmp_path / "cv-corpus-1.0"
    packed, plain = (prepare_release(data_folder=x, language="it") for x in (archive, folder))
    assert packed.fingerprints == plain.fingerprints
    named = {"corpus": "recipes.CommonVoice.corpus", "data_folder": archive, "language": "it"}
    assert len(corpus_of(named).read(named, "train")) == 3
    again = unpack_corpus(archive)
    assert again == unpack_corpus(archive)


def test_corpus_stands_beside_other_files_in_its_archive(tmp_path: Path) -> None:
    release = make_release(tmp_path / "it")
    for number in range(40):  # in any order
        (release / f"more-{number}").mkdir()
    with tarfile.open(tmp_path / "cv.tar", "w") as tar:
        tar.add(release, "it")
    assert corpus_of({"data_folder": tmp_path / "cv.tar"}) == corpus_of({"data_folder": release})


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "another checksum": lambda content: content[:-8] + bytes([content[-8] ^ 1]) + content[-7:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_archive_is_refused(damage: str, tmp_path: Path, own_cache: Path) -> None:
    archive = pack(tmp_path)
    archive.write_bytes(DAMAGE[damage](archive.read_bytes()))
    with pytest.raises(SbkitError, match="cannot be unpacked.* Download it again"):
        corpus_of({"data_folder": archive})
    assert not [*own_cache.rglob("*.tsv")]


def write_tar(archive: Path, *members: tuple[str, bytes]) -> Path:
    """Write an archive of members: a name and the content of a file, or the type of another one."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz" if archive.suffix == ".gz" else "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if content in LINKS_AND_DEVICES:
                info.type = content
                info.linkname = "/etc/passwd"
            else:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return archive


@pytest.mark.parametrize("name", ["a/../../outside.tsv", "/tmp/outside.tsv"])
def test_archive_cannot_write_outside_its_folder(name: str, tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "evil.tar", (name, b"evil"))
    with pytest.raises(SbkitError, match="is not unpacked, because it would write outside"):
        unpack_corpus(archive)
    assert not [*tmp_path.rglob("outside.tsv")]


def test_archive_links_and_devices_are_not_unpacked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entries = [(f"entry-{kind.decode()}", kind) for kind in LINKS_AND_DEVICES]
    archive = write_tar(tmp_path / "links.tar", *entries, ("train.tsv", b""))
    assert {file.name for file in unpack_corpus(archive).iterdir()} == {"train.tsv", "corpus.json"}
    assert caplog.messages[-1].startswith(f"4 entries of {archive} skipped: links")


def test_hard_links_within_an_archive_are_copied(tmp_path: Path) -> None:
    folder = tmp_path / "talks"
    folder.mkdir()
    (folder / "a.wav").write_bytes(b"audio")
    (folder / "b.wav").hardlink_to(folder / "a.wav")
    archive = tmp_path / "talks.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, "talks")
        assert sorted(member.islnk() for member in tar.getmembers()) == [False, False, True]
    release = unpack_corpus(archive)
    assert {file.name: file.read_bytes() for file in release.iterdir()} == {
        "a.wav": b"audio",
        "b.wav": b"audio",
    }
