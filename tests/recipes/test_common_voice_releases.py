"""Every release of Common Voice is read as it was published, from its folder or its archive."""

import tarfile
from pathlib import Path

import pytest

from recipes.prepare import corpus_of
from sbkit.base.errors import SbkitError
from sbkit.data import release as common_voice
from tests.recipes.test_common_voice import make_release, write_tsv

VOTES = "up_votes\tdown_votes\tage\tgender"
HEADERS = {  # of train.tsv, by the version that brought them
    "1": f"client_id\tpath\tsentence\t{VOTES}\taccent",
    "5": f"client_id\tpath\tsentence\t{VOTES}\taccent\tlocale\tsegment",
    "7": f"client_id\tpath\tsentence\t{VOTES}\taccents\tlocale\tsegment",
    "22": "client_id\tpath\tsentence_id\tsentence\tsentence_domain\t"
    f"{VOTES}\taccents\tvariant\tlocale\tsegment",
}
MORE = ("validated", "invalidated", "other")  # tables of clips beside the splits


def release_of(folder: Path, version: str, *, splits: tuple[str, ...]) -> Path:
    """Make a small release of a version: its columns, its files and its ways to name clips."""
    release = make_release(folder, kind="mp3", rate=48_000)
    names = HEADERS[version].split("\t")
    for split in (*splits, *MORE):
        source = split if split in ("train", "dev", "test") else "train"
        rows = []
        for number in range(3):
            path = f"{source}{number}" + (".mp3" if version != "1" else "")
            known = {
                "client_id": f"{number:04x}",
                "path": path,
                "sentence": f'"Clip" number {number}!',
                "sentence_id": f"{number:064x}",
                "up_votes": "2",
                "down_votes": "0",
                "locale": "en",
            }
            rows.append("\t".join(known.get(name, "") for name in names))
        write_tsv(release, split, [HEADERS[version], *rows])
    return release


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "archive"])
@pytest.mark.parametrize("version", HEADERS)
def test_a_release_of_any_version_is_read(
    version: str, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "cache"))
    top = tmp_path / f"cv-corpus-{version}.0"
    release_of(top / "en", version, splits=("train", "dev", "test"))
    knobs = {"data_folder": top, "language": "en", "splits": None}
    if packed:
        knobs["data_folder"] = tmp_path / f"cv-corpus-{version}.0-en.tar.gz"
        with tarfile.open(knobs["data_folder"], "w:gz") as tar:
            tar.add(top, top.name)
    assert common_voice.recognizes(top)
    corpus = corpus_of(knobs)
    assert corpus.splits(knobs) == common_voice.ROLES
    for split in ("train", "dev", "test"):
        manifest = corpus.read(knobs, split)
        assert list(manifest.excluded) == []
        assert [clip.id for clip in manifest] == [f"{split}{number}" for number in range(3)]
        for number, clip in enumerate(manifest):
            assert clip.path.is_file()
            assert clip.sentence == f'"Clip" number {number}!'
            kept = set(HEADERS[version].split("\t")) - {"path", "sentence", "client_id"}
            assert kept | {"speaker", "language"} == {*clip.columns} | {"language"}
            assert clip.columns["speaker"] == f"{number:04x}"


def test_a_delta_release_has_no_splits_of_its_own_and_says_so(tmp_path: Path) -> None:
    release = release_of(tmp_path / "cv-corpus-15.0-delta-2023-09-08" / "en", "22", splits=())
    for split in ("train", "dev", "test"):
        (release / f"{split}.tsv").unlink()
    knobs = {"data_folder": release.parent, "language": "en", "splits": None}
    missing = r"has no train\.tsv, dev\.tsv, test\.tsv.*among .*invalidated, other, .*--splits"
    with pytest.raises(SbkitError, match=missing):
        common_voice.splits(knobs)
    with pytest.raises(SbkitError, match=r"'test', which is not a split .*, or \[\] for none"):
        common_voice.splits(knobs | {"splits": {"train": "validated", "valid": "other"}})
