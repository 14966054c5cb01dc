"""The cache is listed and pruned, and holds what was in the archives of corpora."""

import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.prepare import prepare_audio, prepare_transcripts
from sbkit.base.errors import SbkitError
from sbkit.base.files import task_lock
from sbkit.base.user_folders import cache_folder
from sbkit.commands.cli import run as sbkit
from sbkit.data import facts
from sbkit.data.cache import list_entries, unpack_corpus
from sbkit.data.corpus import corpus_of
from sbkit.data.facts import measure_once
from sbkit.data.splits import Splits
from tests.data.test_prepare import settings
from tests.recipes.test_common_voice import make_release


def prepare(location: object, **more: object) -> Splits:
    return prepare_transcripts(settings(location, **more))


def listing(capsys: pytest.CaptureFixture[str], action: str = "list") -> list[str]:
    capsys.readouterr()
    assert sbkit(["cache", action]) == 0
    return capsys.readouterr().out.splitlines()


def test_cache_lists_corpora_and_prunes_those_without_source(
    tmp_path: Path,
    own_cache: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("here", "gone", "unknown"):
        prepare(make_release(tmp_path / name))
    shutil.rmtree(tmp_path / "gone")
    corpora = own_cache / "corpora"
    here, gone, unknown = (next(corpora.glob(f"{x}-*")) for x in ("here", "gone", "unknown"))
    (unknown / "corpus.json").write_text("{")
    former = own_cache / "facts" / "0123456789abcdef-01234567"
    former.mkdir(parents=True)
    (own_cache / "asterisk-prompts").mkdir()
    users = [own_cache / "audio" / "mine.wav", corpora / "lost+found" / "a", own_cache / "x" / "y"]
    for file in users:
        file.parent.mkdir(exist_ok=True)
        file.touch()
    outside = here.rename(tmp_path / "thesis")  # of a user with two disks
    (corpora / "link-0123").symlink_to(outside)
    lines = [line.split("  ")[-1] for line in listing(capsys)]
    assert sorted(lines) == [
        f"{tmp_path / 'gone'}, in {gone} (not needed)",
        f"an earlier version, in {own_cache / 'facts'} (not needed)",
        f"asterisk-prompts, in {own_cache / 'asterisk-prompts'}",
        f"{unknown.name}, in {unknown}",
    ]
    with task_lock(gone.parent, gone.name, wait=False):
        assert any(line.startswith("kept, since it is being") for line in listing(capsys, "prune"))
    assert gone.is_dir() and not former.exists()
    with monkeypatch.context() as away:
        away.setattr(Path, "exists", refuse)  # the disk of the source
        assert listing(capsys, "prune") == []
    (line,) = listing(capsys, "prune")
    assert line.startswith("removing 0.") and line.endswith(f"{tmp_path / 'gone'}, in {gone}")
    assert not gone.exists() and unknown.is_dir() and (outside / "corpus.json").is_file()
    assert (own_cache / "asterisk-prompts").is_dir() and all(file.exists() for file in users)


def test_prune_keeps_a_corpus_of_two_folders_while_one_is_away(
    tmp_path: Path, own_cache: Path
) -> None:
    """As long as its disk is not mounted; without both folders, nothing can need it."""
    folders = [make_release(tmp_path / name) for name in ("here", "away")]
    prepare("", data_folder=[str(folder) for folder in folders])
    for folder, num_kept in zip(folders, (1, 0), strict=True):
        folder.rename(folder.with_name(f"{folder.name}-unmounted"))
        assert sbkit(["cache", "prune"]) == 0
        assert len([*(own_cache / "corpora").glob("[!.]*")]) == num_kept


def refuse(path: Path) -> bool:
    raise PermissionError(13, "Permission denied", str(path))


def test_prune_removes_what_a_later_table_supersedes_only(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = tmp_path / "cv-corpus-1.0"
    for language in ("it", "fr"):
        make_release(release / language)
    monkeypatch.chdir(tmp_path)
    names = {}
    for language in ("it", "fr"):
        prepare("cv-corpus-1.0", language=language)
        names[language] = {path.name for path in (own_cache / "corpora").glob("[!.]*")}
    assert len(names["fr"]) == 2
    monkeypatch.chdir("/")  # from where the relative path leads nowhere
    assert sbkit(["cache", "prune"]) == 0
    assert {path.name for path in (own_cache / "corpora").glob("[!.]*")} == names["fr"]
    table = release / "fr" / "train.tsv"
    table.write_text(table.read_text().replace("number", "no."))
    prepare(release, language="fr")
    assert len([*(own_cache / "corpora").glob("[!.]*")]) == 3
    assert sbkit(["cache", "prune"]) == 0
    assert len([*(own_cache / "corpora").glob("[!.]*")]) == 2
    assert names["it"] < {path.name for path in (own_cache / "corpora").glob("[!.]*")}
    own = tmp_path / "own.csv"
    for text in ("one", "two"):
        clip = next((release / "fr/clips").iterdir())
        own.write_text(f"path,text\n{clip},{text}\n")
        prepare(own, data_folder=None, manifest={"train": str(own), "dev": str(own)})
    assert len([*(own_cache / "corpora").glob("tables-*")]) == 2
    assert sbkit(["cache", "prune"]) == 0
    assert len([*(own_cache / "corpora").glob("tables-*")]) == 1


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SBKIT_CACHE": "~/s"}, "/home/ann/s"),
        ({"SBKIT_CACHE": "/s", "XDG_CACHE_HOME": "/x"}, "/s"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/sbkit"),
        ({}, "/home/ann/.cache/sbkit"),
    ],
)
def test_cache_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("SBKIT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/ann", **variables}.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(expected)


@pytest.mark.parametrize("has_cache", [False, True])
def test_new_cache_is_its_users_alone(has_cache: bool, tmp_path: Path, own_cache: Path) -> None:
    """The mode of one that is there was chosen, perhaps for a group."""
    if has_cache:
        own_cache.mkdir(mode=0o750)
    release = make_release(tmp_path / "release")
    prepare(release)
    assert own_cache.stat().st_mode & 0o777 == (0o750 if has_cache else 0o700)
    assert {path.stat().st_mode for path in own_cache.rglob("*") if path.is_dir()} == {
        release.stat().st_mode
    }


# ---- facts


@pytest.mark.parametrize("state", ["writable", "shared", "away"])
def test_facts_lie_in_the_corpus_else_in_the_cache_else_for_the_session(
    state: str, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, out = make_release(tmp_path / "release"), tmp_path / "out"
    overrides = (f"--data_folder={release}", f"--out={out}")
    assert sbkit(["prepare", "hparams/ctc.yaml", *overrides]) == 0
    rows = prepare_audio(settings(out)).train
    (corpus,) = (own_cache / "corpora").glob("[!.]*")
    places = [out / "facts", corpus / "facts"]
    for place in places[: ("writable", "shared", "away").index(state)]:
        shutil.rmtree(place, ignore_errors=True)
        place.touch()  # nothing can be written below a file
    expected = [*places, tmp_path / f"sbkit-facts-{os.getpid()}"]
    monkeypatch.setattr(facts, "gettempdir", lambda: str(tmp_path))
    for measure in (lambda: [7], lambda: [9]):
        assert measure_once(rows, "things", {"number": 1}, measure) == [7]
    (kept,) = tmp_path.rglob("things-*")
    assert kept.parent == expected[("writable", "shared", "away").index(state)]
    kept.write_text("[7")  # of a disk that was full
    assert measure_once(rows, "things", {"number": 1}, lambda: [8]) == [8]
    assert json.loads(kept.read_text()) == [8]


# ---- archives, which are unpacked completely or not at all

LINKS_AND_DEVICES = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)


def pack(tmp_path: Path, suffix: str = ".tar.gz") -> Path:
    """Pack a release of Italian as Common Voice does."""
    release = make_release(tmp_path / "cv-corpus-1.0" / "it")
    archive = tmp_path / f"cv{suffix}"
    with tarfile.open(archive, "w:gz" if suffix == ".tar.gz" else "w") as tar:
        tar.add(release.parent, "cv-corpus-1.0")
    return archive


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_archive_is_prepared_like_its_folder_and_goes_with_it(
    suffix: str, tmp_path: Path, own_cache: Path
) -> None:
    archive, folder = pack(tmp_path, suffix), tmp_path / "cv-corpus-1.0"
    packed, plain = (prepare(source, language="it") for source in (archive, folder))
    assert packed.fingerprints == plain.fingerprints
    assert unpack_corpus(archive) == unpack_corpus(archive)
    assert len([*(own_cache / "archives").glob("[!.]*")]) == 1
    assert sbkit(["cache", "prune"]) == 0  # while it exists
    assert len(list_entries(own_cache)) == 3
    os.utime(archive, (0, 10**9))  # another file at the same path
    prepare(archive, language="it")
    assert len([*(own_cache / "archives").glob("[!.]*")]) == 2
    assert sbkit(["cache", "prune"]) == 0
    assert len(list_entries(own_cache)) == 3
    assert unpack_corpus(archive).is_relative_to(next((own_cache / "archives").glob("[!.]*")))
    archive.unlink()
    assert sbkit(["cache", "prune"]) == 0
    (entry,) = list_entries(own_cache)
    assert entry.sources == [str(folder)]


def test_corpus_stands_beside_other_files_in_its_archive(tmp_path: Path) -> None:
    release = make_release(tmp_path / "it")
    for number in range(40):  # in any order
        (release / f"more-{number}").mkdir()
    with tarfile.open(tmp_path / "cv.tar", "w") as tar:
        tar.add(release, "it")
    assert len(prepare(tmp_path / "cv.tar", language="it").train) == 3


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


@pytest.mark.parametrize("name", ["a/../../outside.tsv", "/tmp/outside.tsv"])
def test_archive_cannot_write_outside_its_folder(name: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "evil.tar", "w") as tar:
        info = tarfile.TarInfo(name)
        info.size = 4
        tar.addfile(info, io.BytesIO(b"evil"))
    with pytest.raises(SbkitError, match="is not unpacked, because its member .* outside"):
        unpack_corpus(tmp_path / "evil.tar")
    assert not [*tmp_path.rglob("outside.tsv")]


def test_links_and_devices_in_an_archive_are_skipped_but_hard_links_copied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "talks"
    folder.mkdir()
    (folder / "a.wav").write_bytes(b"audio")
    (folder / "b.wav").hardlink_to(folder / "a.wav")
    archive = tmp_path / "talks.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, "talks")
        for kind in LINKS_AND_DEVICES:
            info = tarfile.TarInfo(f"talks/entry-{kind.decode()}")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    release = unpack_corpus(archive)
    assert {file.name: file.read_bytes() for file in release.iterdir()} == {
        "a.wav": b"audio",
        "b.wav": b"audio",
    }
    assert caplog.messages[-1].startswith(f"{archive}: 4 links or devices skipped")
