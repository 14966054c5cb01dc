"""A release is read from its archive, which is unpacked completely or not at all."""

import io
import tarfile
from pathlib import Path

import pytest

from recipes.prepare import corpus_of
from sbkit.base.errors import SbkitError
from sbkit.data.cache import list_entries, unpack_corpus
from tests.recipes.test_common_voice import make_release, prepare

LINKS_AND_DEVICES = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SBKIT_CACHE", str(folder))
    return folder


def pack(tmp_path: Path, suffix: str = ".tar.gz") -> Path:
    """Pack a release of Italian as Common Voice does."""
    release = make_release(tmp_path / "cv-corpus-1.0" / "it")
    archive = tmp_path / f"cv{suffix}"
    with tarfile.open(archive, f"w:{suffix.rpartition('.')[2].replace('tar', '')}") as tar:
        tar.add(release.parent, "cv-corpus-1.0")
    return archive


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_archive_is_prepared_like_its_folder(suffix: str, tmp_path: Path, cache: Path) -> None:
    archive = pack(tmp_path, suffix)
    folder = tmp_path / "cv-corpus-1.0"
    packed, plain = (
        prepare(data_folder=source, language="it", cache_folder=cache)
        for source in (archive, folder)
    )
    assert packed.fingerprints == plain.fingerprints
    assert len(packed.train) == 3
    named = {"corpus": "recipes.CommonVoice.corpus", "data_folder": archive, "language": "it"}
    assert len(corpus_of(named).read(named, "train")) == 3
    again = unpack_corpus(archive)
    assert again == unpack_corpus(archive)
    (entry,) = [item for item in list_entries(cache) if item.corpus == archive]
    assert not entry.is_orphan
    archive.unlink()
    assert entry.is_orphan


def test_corpus_stands_beside_other_files_in_its_archive(tmp_path: Path, cache: Path) -> None:
    release = make_release(tmp_path / "it")
    for number in range(40):  # in any order
        (release / f"more-{number}").mkdir()
    with tarfile.open(tmp_path / "cv.tar", "w") as tar:
        tar.add(release, "it")
    assert corpus_of({"data_folder": tmp_path / "cv.tar"}) == corpus_of({"data_folder": release})


def test_archive_with_another_checksum_is_refused(tmp_path: Path, cache: Path) -> None:
    archive = pack(tmp_path)
    content = bytearray(archive.read_bytes())
    content[-8] ^= 1  # of the checksum of gzip, behind the last member
    archive.write_bytes(content)
    with pytest.raises(SbkitError, match=r"cannot be unpacked.* Download it again"):
        corpus_of({"data_folder": archive})


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_truncated_archive_is_refused(share: float, tmp_path: Path, cache: Path) -> None:
    archive = pack(tmp_path)
    content = archive.read_bytes()
    archive.write_bytes(content[: int(share * len(content))])
    with pytest.raises(SbkitError, match="cannot be unpacked.* Download it again"):
        corpus_of({"data_folder": archive})
    assert not [*cache.rglob("*.tsv")]


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
def test_archive_cannot_write_outside_its_folder(name: str, tmp_path: Path, cache: Path) -> None:
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
    assert caplog.messages[-1].startswith(f"4 entries of {archive} skipped: symbolic links")


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
