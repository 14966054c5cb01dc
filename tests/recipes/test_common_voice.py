"""Common Voice releases of every version, intact and damaged."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from recipes.CommonVoice.corpus import CommonVoice
from recipes.prepare import prepare_transcripts
from sbkit.base.errors import SbkitError
from sbkit.data.corpus import USUAL_SPLITS, corpus_of
from sbkit.data.manifest import Excluded
from sbkit.data.splits import Splits, select_by_length
from tests.stores import Utterance, make_store, read_split

pytestmark = pytest.mark.usefixtures("own_cache")
SPLITS = ("train", "dev", "test")
VOTES = "up_votes\tdown_votes\tage\tgender"
HEADERS = {  # of train.tsv, by the version that brought them; between them, only columns came
    "folder": "client_id\tpath\tsentence",
    "1": f"client_id\tpath\tsentence\t{VOTES}\taccent",
    "22": "client_id\tpath\tsentence_id\tsentence\tsentence_domain\t"
    f"{VOTES}\taccents\tvariant\tlocale\tsegment",
}


def make_release(folder: Path, version: str = "folder") -> Path:
    """Write a release whose clips last 0.1, 0.2 and 0.3 seconds in each split."""
    (folder / "clips").mkdir(parents=True)
    suffix, rate = (".flac", 16_000) if version == "folder" else (".mp3", 48_000)
    for split in SPLITS:
        rows = [HEADERS[version]]
        for n in range(3):
            noise = 0.1 * np.random.default_rng(n).standard_normal(rate * (n + 1) // 10)
            soundfile.write(folder / "clips" / f"{split}{n}{suffix}", noise, rate)
            path = f"{split}{n}" + ("" if version == "1" else suffix)
            values = {"client_id": f"{n:04x}", "path": path, "sentence": f'"Clip" number {n}!'}
            values |= {"up_votes": "2", "locale": "en"}
            rows.append("\t".join(values.get(name, "") for name in HEADERS[version].split("\t")))
        write_tsv(folder, split, rows)
    return folder


def prepare(release: Path, **settings: object) -> Splits:
    limits = {"sample_rate": 16_000, "min_seconds": 0.0, "max_seconds": 1000.0}
    return prepare_transcripts({"data_folder": str(release), "language": "en", **limits} | settings)


def write_tsv(folder: Path, split: str, rows: list[str]) -> None:
    (folder / f"{split}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")


@pytest.mark.parametrize("version", HEADERS)
def test_release_of_any_version_is_read(version: str, tmp_path: Path) -> None:
    make_release(tmp_path / "en", version)
    settings = {"data_folder": tmp_path, "language": "en"}
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


def test_empty_transcripts_are_excluded_from_training_only(tmp_path: Path) -> None:
    release = make_release(tmp_path / "en")
    for split in SPLITS:
        tsv = release / f"{split}.tsv"
        tsv.write_text(tsv.read_text().replace('"Clip" number 1!', "…"))
    prepared = prepare(release)
    assert prepared.excluded == [Excluded("train1", "empty transcript", "…", "train")]
    assert [len(split) for split in prepared.named().values()] == [2, 3, 3]
    assert prepared.named()["dev"][1]["text"] == ""


def without_clips(release: Path) -> None:
    (release / "clips").rename(release / "moved")


def without_sentences(release: Path) -> None:
    write_tsv(release, "train", [HEADERS["folder"], "ann\ttrain0.flac\t…", "ann\ttrain1.flac\t…"])


def without_rows_in_dev(release: Path) -> None:
    write_tsv(release, "dev", [HEADERS["folder"]])


def as_a_delta(release: Path) -> None:
    for split in SPLITS:
        (release / f"{split}.tsv").rename(release / f"{split}-validated.tsv")


def with_one_column_of_durations(release: Path) -> None:
    write_tsv(release, "clip_durations", ["clip", "train0.mp3"])


REFUSED: list[tuple[Callable[[Path], object], dict[str, object], str]] = [
    (without_clips, {"corpus": "recipes.CommonVoice.corpus"}, r"has no clips\. Name the folder"),
    (without_sentences, {}, "The training set is empty: all 2 rows are left out"),
    (without_rows_in_dev, {}, r"dev\.tsv"),  # test has some
    (as_a_delta, {}, "least one split: dev-validated, test-validated, train-validated"),
    (with_one_column_of_durations, {}, "must have the columns clip and duration.ms., but has only"),
    (str, {"language": "de"}, r"is de, but 3 of 3 rows .* locale en\. Set `l"),
    (str, {"language": ["en", "fr"]}, "names en, fr, but .* is of one language"),
    (str, {"splits": {"test": "other"}}, r"'other', which is not a split .*, or \[\] for none"),
]


@pytest.mark.parametrize(("change", "settings", "words"), REFUSED)
def test_release_that_cannot_be_read_is_refused(
    change: Callable[[Path], object], settings: dict[str, object], words: str, tmp_path: Path
) -> None:
    release = make_release(tmp_path / "en", "22" if "language" in settings else "folder")
    change(release)
    with pytest.raises(SbkitError, match=words):
        prepare(release, **settings)


@pytest.mark.parametrize("train", ["train", "validated"])
def test_speakers_of_train_are_dealt_to_empty_dev_and_test(train: str, tmp_path: Path) -> None:
    release = make_release(tmp_path / "en")
    rows = [f"{'' if n < 3 else f's{n}'}\ttrain{n}.flac\tClip {n}" for n in range(30)]
    for split in (*SPLITS, train):
        write_tsv(release, split, [HEADERS["folder"], *(rows if split == train else ())])
    settings = {"data_folder": release, "splits": {"train": train}}
    ids = {name: read_split(settings, name).ids for name in (train, "dev", "test")}
    assert sorted(sum(ids.values(), [])) == sorted(f"train{n}" for n in range(30))
    assert len(ids[train]) > 15 and ids["dev"] and ids["test"]


def test_blocks_of_a_release_are_as_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Repeated clips and names are found in different blocks, and faults are named there."""
    monkeypatch.setattr("sbkit.data.tables.BATCH_ROWS", 2)
    release = make_release(tmp_path / "en")
    (release / "test.tsv").unlink()
    write_tsv(release, "clip_durations", ["clip\tms", "a.mp3\t70", "b/a.mp3\t80"])
    rows = ["ann\ta.mp3\tx", "ann\tb.mp3\tx", "ann\tc.mp3", "ann\tb/a.mp3\tx", "bob\ta.mp3\ty"]
    settings = {"data_folder": release, "language": "en"}
    same_name = ["a.mp3", "b", "b/a.mp3"]
    for last, ids in ((3, ["a", "b"]), (4, same_name), (5, same_name)):
        write_tsv(release, "train", [HEADERS["folder"], *rows[:last]])
        manifest = read_split(settings, "train")
        assert manifest.ids == ids
        assert manifest.rows["duration_ms"].to_pylist() == ["70", None, "80"][: len(ids)]
        reasons = [(row.id, row.reason) for row in manifest.excluded]
        assert reasons[0] == ("row 4", "wrong number of fields")
        assert [reason for _, reason in reasons[1:]] == ["clip listed twice"] * (last == 5)
    caplog.set_level("INFO")
    assert corpus_of(settings).roles()["test"] == ()
    assert "en has no test.tsv" in caplog.text


def test_within_limits_excludes_by_length() -> None:
    seconds = [0.2, 0.3, 5.0, 15.0, 15.01]
    rows = (Utterance(f"{s}", "a", "A", "", round(16_000 * s), b"") for s in seconds)
    limits = {"min_seconds": 0.3, "max_seconds": 15.0}
    inside, left_out = select_by_length(make_store(rows), **limits, sample_rate=16_000)
    assert inside["id"][:] == ["0.3", "5.0", "15.0"]
    assert left_out == [
        Excluded("0.2", "shorter than 0.3 s", "0.20 s", "train"),
        Excluded("15.01", "longer than 15 s", "15.01 s", "train"),
    ]


def test_default_corpus_is_complete(asterisk_english: Path) -> None:
    prepared = prepare(asterisk_english)
    assert prepared.excluded == []
    texts = {}
    for split, dataset in prepared.named().items():
        texts[split] = set(dataset["text"][:])
        assert sum(dataset["samples"][:]) > 60 * 16_000
    assert not texts["train"] & (texts["dev"] | texts["test"])
    assert not texts["dev"] & texts["test"]
    assert set("".join(map("".join, texts.values()))) == set("abcdefghijklmnopqrstuvwxyz' ")
