"""Common Voice releases of every version, intact and damaged."""

from pathlib import Path

import numpy as np
import pytest
import soundfile

from recipes.CommonVoice.corpus import CommonVoice
from recipes.prepare import prepare_audio, prepare_transcripts
from sbkit.base.errors import SbkitError
from sbkit.data.corpus import USUAL_SPLITS, corpus_of
from sbkit.data.manifest import Excluded
from sbkit.data.splits import Splits, within_limits
from tests.stores import Utterance, make_store, read_split

SPLITS = ("train", "dev", "test")


def make_release(folder: Path, *, count: int = 3, kind: str = "flac", rate: int = 16_000) -> Path:
    """Write a release whose clips last 0.1, 0.2, 0.3, 0.1 ... seconds."""
    (folder / "clips").mkdir(parents=True)
    for split in SPLITS:
        rows = ["client_id\tpath\tsentence"]
        for n in range(count):
            name = f"{split}{n}.{kind}"
            noise = 0.1 * np.random.default_rng(n).standard_normal(rate * (n % 3 + 1) // 10)
            soundfile.write(folder / "clips" / name, noise, rate)
            rows.append(f'ann\t{name}\t"Clip" number {n}!')
        write_tsv(folder, split, rows)
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "cache"))


def prepare(*, data_folder: object, language: object) -> Splits:
    settings = {"data_folder": str(data_folder), "language": language, "sample_rate": 16_000}
    limits = {"min_seconds": 0.0, "max_seconds": 1000.0}
    return prepare_transcripts({**settings, **limits})


def write_tsv(folder: Path, split: str, rows: list[str]) -> None:
    (folder / f"{split}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def set_sentence(folder: Path, split: str, row: int, sentence: str) -> None:
    rows = (folder / f"{split}.tsv").read_text(encoding="utf-8").splitlines()
    rows[row + 1] = "\t".join([*rows[row + 1].split("\t")[:2], sentence])
    write_tsv(folder, split, rows)


def test_empty_transcripts_are_excluded_from_training_only(tmp_path: Path) -> None:
    release = make_release(tmp_path / "en")
    for split in SPLITS:
        set_sentence(release, split, 1, "…")
    prepared = prepare(data_folder=release, language="en")
    assert prepared.excluded == [Excluded("train1", "empty transcript", "…", "train")]
    sizes = [len(split) for split in prepared.named().values()]
    assert sizes == [2, 3, 3]
    assert prepared.named()["dev"][1]["text"] == ""


def test_empty_training_set_is_refused_with_the_reason(tmp_path: Path) -> None:
    release = make_release(tmp_path / "en", count=2)
    (release / "train.tsv").rename(release / "validated.tsv")
    for row in range(2):
        set_sentence(release, "validated", row, "…")
    settings = {"data_folder": str(release), "language": "en", "sample_rate": 16_000}
    settings |= {"splits": {"train": "validated"}, "min_seconds": 0.0, "max_seconds": 9.0}
    with pytest.raises(SbkitError, match="All 2 sentences of train are empty .* `language: en`"):
        prepare_transcripts(settings)


def test_release_without_clips_is_refused(tmp_path: Path) -> None:
    release = make_release(tmp_path / "en")
    (release / "clips").rename(tmp_path / "moved")
    corpus = CommonVoice({"data_folder": release, "language": "en"})
    with pytest.raises(SbkitError, match=r"has no clips\. Name the folder"):
        corpus.splits()


def test_within_limits_excludes_by_length() -> None:
    seconds = [0.2, 0.3, 5.0, 15.0, 15.01]
    rows = (Utterance(f"{s}", "a", "A", "", round(16_000 * s), b"") for s in seconds)
    dataset = make_store(rows)
    limits = {"min_seconds": 0.3, "max_seconds": 15.0}
    inside, left_out = within_limits(dataset, **limits, sample_rate=16_000)
    assert inside["id"][:] == ["0.3", "5.0", "15.0"]
    assert left_out == [
        Excluded("0.2", "shorter than 0.3 s", "0.20 s", "train"),
        Excluded("15.01", "longer than 15 s", "15.01 s", "train"),
    ]


def test_default_corpus_is_complete(asterisk_english: Path, tmp_path: Path) -> None:
    prepared = prepare(data_folder=asterisk_english, language="en")
    assert prepared.excluded == []
    texts = {}
    for split, dataset in prepared.named().items():
        texts[split] = set(dataset["text"][:])
        assert sum(dataset["samples"][:]) > 60 * 16_000
    assert not texts["train"] & (texts["dev"] | texts["test"])
    assert not texts["dev"] & texts["test"]
    assert set("".join(map("".join, texts.values()))) == set("abcdefghijklmnopqrstuvwxyz' ")


def test_two_languages_need_two_releases(tmp_path: Path) -> None:
    release = make_release(tmp_path / "en")
    settings = {"data_folder": release, "language": ["en", "fr"], "sample_rate": 16_000}
    with pytest.raises(SbkitError, match="names en, fr, but .* is of one language"):
        prepare_audio({**settings, "min_seconds": 0.0, "max_seconds": 1000.0})


VOTES = "up_votes\tdown_votes\tage\tgender"
HEADERS = {  # of train.tsv, by the version that brought them; between them, only columns came
    "1": f"client_id\tpath\tsentence\t{VOTES}\taccent",
    "22": "client_id\tpath\tsentence_id\tsentence\tsentence_domain\t"
    f"{VOTES}\taccents\tvariant\tlocale\tsegment",
}


def release_of(folder: Path, version: str, *, splits: tuple[str, ...]) -> Path:
    """Make a small release with the columns and the names of clips of a version."""
    release = make_release(folder, kind="mp3", rate=48_000)
    names = HEADERS[version].split("\t")
    for split in (*splits, "validated", "invalidated", "other"):
        source = split if split in SPLITS else "train"
        rows = []
        for number in range(3):
            path = f"{source}{number}" + (".mp3" if version != "1" else "")
            values = {
                "client_id": f"{number:04x}",
                "path": path,
                "sentence": f'"Clip" number {number}!',
                "sentence_id": f"{number:064x}",
                "up_votes": "2",
                "down_votes": "0",
                "locale": "en",
            }
            rows.append("\t".join(values.get(name, "") for name in names))
        write_tsv(release, split, [HEADERS[version], *rows])
    return release


@pytest.mark.parametrize("version", HEADERS)
def test_release_of_any_version_is_read(version: str, tmp_path: Path) -> None:
    release_of(tmp_path / "en", version, splits=SPLITS)
    settings = {"data_folder": tmp_path, "language": "en", "splits": None}
    corpus = corpus_of(settings)
    assert isinstance(corpus, CommonVoice)
    assert corpus.roles() == USUAL_SPLITS
    for split in SPLITS:
        manifest = read_split(settings, split)
        assert list(manifest.excluded) == []
        assert [clip.id for clip in manifest] == [f"{split}{number}" for number in range(3)]
        for number, clip in enumerate(manifest):
            assert clip.path.is_file()
            assert clip.sentence == f'"Clip" number {number}!'
            columns = {*HEADERS[version].split("\t")} - {"path", "sentence", "client_id"}
            assert columns | {"speaker", "language"} == {*clip.columns}
            assert clip.columns["speaker"] == f"{number:04x}"


def test_release_in_another_language_is_refused(tmp_path: Path) -> None:
    release = release_of(tmp_path / "en", "22", splits=SPLITS)
    with pytest.raises(SbkitError, match=r"is de, but 3 of 3 rows .* locale en\. Set `l"):
        prepare(data_folder=release, language="de")


@pytest.mark.parametrize("train", ["train", "validated"])
def test_speakers_of_train_are_dealt_to_empty_dev_and_test(train: str, tmp_path: Path) -> None:
    release = make_release(tmp_path / "en", count=0)
    rows = [f"{'' if n < 3 else f's{n}'}\ttrain{n}.flac\tClip {n}" for n in range(30)]
    write_tsv(release, train, ["client_id\tpath\tsentence", *rows])
    chosen = {"train": train, "valid": "dev", "test": "test"} if train == "validated" else None
    settings = {"data_folder": release, "language": "en", "splits": chosen}
    ids = {name: read_split(settings, name).ids for name in (train, "dev", "test")}
    assert sorted(sum(ids.values(), [])) == sorted(f"train{n}" for n in range(30))
    assert len(ids[train]) > 15 and ids["dev"] and ids["test"]
    write_tsv(release, "test", ["client_id\tpath\tsentence", "bob\ttest0.flac\tone"])
    with pytest.raises(SbkitError, match=r"dev\.tsv has a header but no rows"):
        read_split(settings, "dev")  # test has rows, so no speakers are dealt


def test_delta_release_needs_named_splits(tmp_path: Path) -> None:
    release = release_of(tmp_path / "cv-corpus-15.0-delta-2023-09-08" / "en", "22", splits=())
    for split in SPLITS:
        (release / f"{split}.tsv").unlink()
    settings = {"data_folder": release.parent, "language": "en", "splits": None}
    with pytest.raises(SbkitError, match="least one split: invalidated, other, validated"):
        CommonVoice(settings).roles()
    with pytest.raises(SbkitError, match=r"'test', which is not a split .*, or \[\] for none"):
        chosen = {"train": "validated", "valid": "other", "test": "test"}
        CommonVoice(settings | {"splits": chosen}).roles()
