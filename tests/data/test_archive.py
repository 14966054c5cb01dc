"""A release is read straight from its archive, which is unpacked whole or not at all."""

import io
import tarfile
from pathlib import Path

import pytest

from recipes.prepare import corpus_of, read_manifest
from sbkit.base.errors import SbkitError
from sbkit.data.cache import list_entries, unpacked
from tests.recipes.test_common_voice import make_release, prepare


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
def test_an_archive_is_prepared_as_its_folder(suffix: str, tmp_path: Path, cache: Path) -> None:
    archive = pack(tmp_path, suffix)
    folder = tmp_path / "cv-corpus-1.0"
    packed, plain = (
        prepare(data_folder=each, language="it", cache_folder=cache) for each in (archive, folder)
    )
    assert packed.fingerprints == plain.fingerprints
    assert len(packed.train) == 3
    named = {"corpus": "sbkit.data.release", "data_folder": archive, "language": "it"}
    assert len(read_manifest(corpus_of(named), named, "train")) == 3
    again = unpacked(archive)
    assert again == unpacked(archive)
    (entry,) = [each for each in list_entries(cache) if each.corpus == archive]
    assert not entry.is_orphan
    archive.unlink()
    assert entry.is_orphan


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_an_archive_that_is_cut_short_is_one_sentence(
    share: float, tmp_path: Path, cache: Path
) -> None:
    archive = pack(tmp_path)
    content = archive.read_bytes()
    archive.write_bytes(content[: int(share * len(content))])
    with pytest.raises(SbkitError, match="cannot be unpacked.* Download it again"):
        corpus_of({"data_folder": archive})
    assert not [*cache.rglob("*.tsv")]


@pytest.mark.parametrize("name", ["a/../../outside.tsv", "/tmp/outside.tsv"])
def test_nothing_is_written_outside(name: str, tmp_path: Path, cache: Path) -> None:
    archive = tmp_path / "evil.tar"
    with tarfile.open(archive, "w") as tar:
        info = tarfile.TarInfo(name)
        info.size = 4
        tar.addfile(info, io.BytesIO(b"evil"))
    with pytest.raises(SbkitError, match="cannot be unpacked.* out of its folder"):
        unpacked(archive)
    assert not [*tmp_path.rglob("outside.tsv")]


def test_links_and_devices_are_not_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "links.tar"
    with tarfile.open(archive, "w") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
            info = tarfile.TarInfo(f"entry-{kind.decode()}")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        info = tarfile.TarInfo("train.tsv")
        tar.addfile(info, io.BytesIO())
    assert [each.name for each in unpacked(archive).iterdir() if each.suffix == ".tsv"] == [
        "train.tsv"
    ]
    assert not [each for each in unpacked(archive).iterdir() if each.name.startswith("entry")]
