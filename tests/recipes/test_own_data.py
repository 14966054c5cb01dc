"""What a user names in `manifest` and `columns` becomes splits, or is refused at its key."""

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import datasets
import pytest

from recipes.OwnData.corpus import OwnData
from sbkit.base.errors import SbkitError
from sbkit.config.hparams import read_spec
from sbkit.data.audio_tables import AudioTable
from sbkit.data.manifest import Clip, Manifest, to_texts
from sbkit.data.tables import TableOptions
from tests.data.test_spans import read as read_source

ROOT = Path(__file__).parents[2]


def own_data(manifest: Mapping[str, Any], **settings: object) -> OwnData:
    return OwnData({"manifest": manifest, "language": "en", **settings})


def read(file: Path, content: str, **settings: object) -> Manifest:
    file.write_text(content, encoding="utf-8")
    return read_source(file, **settings)


def read_splits(corpus: OwnData) -> dict[str, Manifest]:
    splits = chain.from_iterable(corpus.splits().values())
    return {split: Manifest.join(corpus.blocks(split)) for split in splits}


def read_all(file: Path, rows: Sequence[str], **settings: object) -> dict[str, Manifest]:
    file.write_text("\n".join(rows), encoding="utf-8")
    return read_splits(own_data({"all": str(file)}, **settings))


# manifest


def test_manifest_names_splits_and_roles(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text(f"path,text\n{name}.wav,hi\n")
    a, b = str(tmp_path / "a.csv"), str(tmp_path / "b.csv")
    manifest = {"train": [a, b], "dev": a, "test": {"clean": a, "noisy": b}, "test-x": b}
    roles = own_data(manifest).roles()
    assert roles == {"train": ("train",), "valid": ("dev",), "test": ("clean", "noisy", "test-x")}
    assert read_splits(own_data(manifest))["train"].ids == ["a.csv", "b.csv"]
    assert own_data(manifest, splits={"test": "noisy"}).roles()["test"] == ("noisy",)


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ({"train": "a.csv"}, "no files for dev. Add `dev: FILE`"),
        ({"train": "a.csv", "dev": "a.csv", "other": "a.csv"}, "Write test-other"),
        ({"train": {"a": "a.csv"}, "dev": {"train": "a.csv"}}, "names the split train"),
        ({"train": [], "dev": "a.csv"}, "must be a file or a list of files"),
        ({"train": "a.csv", "dev": {1: "a.csv"}, "test": {1: "a.csv"}}, "'1' twice"),
        ({"train": "a.csv", "test": {"x": "/no.csv"}}, "`manifest.test.x`: /no.csv does not exist"),
        ({"all": "a.csv", "dev": "a.csv"}, "`manifest` has `all` and other keys"),
        ({"train": "empty", "dev": "a.csv"}, "empty has no CSV, TSV, JSON Lines"),
    ],
)
def test_malformed_manifest_is_refused(
    manifest: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("path,text\na.wav,hi\n")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SbkitError, match=words):
        own_data(manifest).roles()


def write_table(file: Path, ids: str) -> None:
    """Write a table whose clips have these ids and speakers."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"path": f"/{id}.wav", "text": "hi", "speaker": id} for id in ids]
    dataset = datasets.Dataset.from_list(rows)
    if file.suffix == ".saved":
        dataset.save_to_disk(str(file))
    elif file.suffix == ".parquet":
        dataset.to_parquet(str(file))
    elif "json" in file.name:
        dataset.to_json(str(file), compression="infer")
    else:
        dataset.to_csv(str(file))


LAYOUTS = {  # of hub repositories and others, with keywords of their page
    "data/{}-00000-of-00001.parquet": ("train", "validation", "test"),
    "{}/part.saved": ("training", "dev", "eval"),
    "my-corpus-1.0/a_{}.clean.jsonl.gz": ("train", "val", "testing"),
    "{} 2.csv": ("Train", "valid", "evaluation"),
    "{}.json": ("train", "development", "test"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_folder_has_the_splits_that_names_tell(layout: str, tmp_path: Path) -> None:
    """Given as train, a repository of the hub trained on its validation and test, too."""
    folder = tmp_path / "latest-test"  # whose own name says nothing
    for keyword, ids in zip(LAYOUTS[layout], ("abcdef", "gh", "i"), strict=True):
        write_table(folder / layout.format(keyword), ids)
    write_table(folder / ".cache" / layout.format("train"), "z")
    write_table(folder / "contest" / layout.format("others"), "y")
    corpus = own_data({"all": str(folder)})
    assert corpus.splits() == {"train": ["train"], "valid": ["dev"], "test": ["test"]}
    ids = {split: manifest.ids for split, manifest in read_splits(corpus).items()}
    assert ids == {"train": [*"abcdef"], "dev": [*"gh"], "test": ["i"]}
    with pytest.raises(SbkitError, match=rf"`manifest.dev`: {folder} has files for .*all"):
        own_data({"dev": str(folder)}).splits()


@pytest.mark.parametrize("missing", ["dev", "test"])
def test_splits_without_files_get_speakers_of_train(missing: str, tmp_path: Path) -> None:
    for split in {"train", "dev", "test"} - {missing}:
        write_table(tmp_path / f"{split}.csv", "abcdef" if split == "train" else "x")
    ids = {name: m.ids for name, m in read_splits(own_data({"all": str(tmp_path)})).items()}
    assert [*ids] == ["train", "dev", "test"]
    assert sorted(ids["train"] + ids[missing]) == [*"abcdef"]
    assert min(map(len, ids.values())) >= 1
    (tmp_path / "train.csv").unlink()
    with pytest.raises(SbkitError, match="`splits.train` is empty"):
        own_data({"all": str(tmp_path)}).roles()


def test_tars_are_read_by_the_splits_that_their_names_tell(tmp_path: Path) -> None:
    names = {"train": "train/audio_0.tar", "dev": "dev-0.tgz", "test": "test/clips.000000.tar"}
    for name in (*names.values(), "train/about.json", "test/rows.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"0")
    for start in ("", "file://"):
        corpus = own_data({"all": f"{start}{tmp_path}"})
        for (split,) in corpus.splits().values():
            (table,) = corpus.read(split)
            assert isinstance(table, AudioTable)
            assert (table.file, table.version[:2]) == (f"{start}{tmp_path / names[split]}", "1 ")


def test_one_table_has_the_rows_of_all_splits_in_a_column_of_any_spelling(tmp_path: Path) -> None:
    header = "path,text,Subset"
    names = ["train", "val", "test-noisy", "Train", " ", "TEST"]
    rows = [f"{n}.wav,hi,{name}" for n, name in enumerate(names)]
    for columns in ({}, {"columns": {"split": "subset"}}):
        manifests = read_all(tmp_path / "a.csv", [header, *rows], **columns)
        ids = {split: manifest.ids for split, manifest in manifests.items()}
        assert ids == {"train": ["0", "3"], "val": ["1"], "test-noisy": ["2"], "test": ["5"]}
        assert [(row.id, row.reason) for row in manifests["train"].excluded] == [("4", "no split")]
    for name, words in (("other", "the column split has the value"), ("test-/../x", "the split")):
        with pytest.raises(SbkitError, match=f"{words} '{name}'"):
            read_all(tmp_path / "a.csv", ["path,text,split", f"9.wav,hi,{name}"])


def test_one_table_is_split_by_its_speakers(tmp_path: Path) -> None:
    """Rows without a speaker are speakers of their own."""
    random = Random(0)
    speakers = ["", *(f"speaker {k}" for k in range(50))]
    rows = [f"{n}.wav,hi,{random.choice(speakers)}" for n in range(500)]
    manifests = read_all(tmp_path / "a.csv", ["path,text,speaker", *rows])
    sizes = {split: len(manifest) for split, manifest in manifests.items()}
    assert sum(sizes.values()) == 500
    assert min(sizes.values()) > 20
    assert sizes["train"] > 350
    of_splits = [{*to_texts(m.rows["speaker"])} for m in manifests.values()]
    assert set.intersection(*of_splits) == {""}
    assert sum(map(len, of_splits)) == len(set.union(*of_splits)) + 2
    settings: dict[str, Any] = {"split_shares": {"dev": 0.5}, "columns": {"speaker": "reader"}}
    manifests = read_all(tmp_path / "a.csv", ["path,text,reader", *rows], **settings)
    assert [*manifests] == ["train", "dev"]
    for other, named in (("ann", "1 speaker"), ("bob", "2 speakers")):
        with pytest.raises(SbkitError, match=f"has {named}, but each of 3 splits"):
            read_all(tmp_path / "a.csv", ["path,text,speaker", "a.wav,hi,ann", f"b.wav,hi,{other}"])
    with pytest.raises(SbkitError, match="`split_shares` must map dev and test to shares"):
        read_all(tmp_path / "a.csv", ["path,text,speaker", *rows], split_shares={"dev": 1})


def test_clip_without_speaker_stays_when_another_has_its_name(tmp_path: Path) -> None:
    """Its id becomes longer then, and was what decided the split."""
    rows = [f"{folder}/{n}.wav,hi" for folder in ("one", "two") for n in range(60)]
    splits: list[dict[Path, str]] = []
    for count, table in ((60, "a.csv"), (120, "a.csv"), (120, f"../{tmp_path.name}/a.csv")):
        manifests = read_all(tmp_path / table, ["path,text", *rows[:count]])
        splits.append({clip.path.resolve(): s for s, m in manifests.items() for clip in m})
    assert splits[1].items() >= splits[0].items()
    assert splits[1] == splits[2]


# columns

TABLE = "Clip,Said,hash\nfile://a.wav,hi,x\n"
TWO_TEXTS = "path,text,sentence\na.wav,hi,yo\n"


@pytest.mark.parametrize(
    ("content", "columns", "clip"),
    [
        (TABLE, {"path": "clip", "text": "said"}, ("a", "hi", {"hash": "x"})),
        (TABLE, {"path": "Clip", "text": None}, ("a", "", {"Said": "hi", "hash": "x"})),
        (TABLE, {"a.csv": {"path": "clip", "text": "Said"}}, ("a", "hi", {"hash": "x"})),
        (
            TABLE,
            {"path": "clip", "text": "hash", "a.csv": {"text": "said", "id": "hash"}},
            ("x", "hi", {}),
        ),
        (TABLE, {"path": "clip", "text": "said", "speaker": "hash"}, ("a", "hi", {"speaker": "x"})),
        (TWO_TEXTS, {"text": "text"}, ("a", "hi", {"manifest_sentence": "yo"})),
    ],
)
def test_columns_are_named_by_role(
    content: str, columns: dict[str, Any], clip: tuple[str, str, dict[str, str]], tmp_path: Path
) -> None:
    (read_clip,) = read(tmp_path / "a.csv", content, columns=columns)
    id, sentence, others = clip
    assert read_clip == Clip(id, tmp_path / "a.wav", sentence, {**others, "language": "en"})


def test_columns_are_of_a_table_by_any_of_its_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for table in ("a.csv", "../a.csv", str(tmp_path / "a.csv")):
        columns = {table: {"text": "text"}}
        assert read(tmp_path / "a.csv", TWO_TEXTS, columns=columns).sentences == ["hi"]


@pytest.mark.parametrize(
    ("content", "columns", "words"),
    [
        (TABLE, {}, "a.csv has none of the columns path, .*; it has Clip, Said, hash. Name one by"),
        (TABLE, {"path": "clip"}, "has none of the columns sentence, .*columns: {text: null}"),
        (
            TABLE,
            {"path": "clip", "text": "sad"},
            "`columns.text` is sad, but .*has Clip, Said",
        ),
        (TABLE, {"txet": "said"}, "`columns.txet` must map path, text, id, .* has txet: said"),
        (TABLE, {"b.csv": {"text": "said"}}, "`columns` names the table b.csv, but .* has .*a.csv"),
        (TWO_TEXTS, {}, "several columns for the text: text, sentence. Choose one by `columns`"),
        ("path,wav,text\na,b,c\n", {}, "several columns for the path: path, wav"),
        ("path,text,spk,speaker\na,b,c,d\n", {}, "several columns for the speaker: spk, speaker"),
        ("path,text,onset,offset\na,b,1,2\n", {}, "several columns for the start: onset, offset"),
        ("LJ1|hi|hi\nLJ2|yo|yo\n", {}, "header of .* the column hi twice.*add a header"),
        ("[{}]", {}, "JSON Lines, but line 1 is not"),
    ],
)
def test_table_without_its_columns_is_refused(
    content: str, columns: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(SbkitError, match=words):
        read(tmp_path / "a.csv", content, columns=columns)


def test_columns_of_a_yaml_are_read_as_texts(tmp_path: Path) -> None:
    yaml = tmp_path / "a.yaml"
    text = (ROOT / "hparams/ctc.yaml").read_text()
    yaml.write_text(f"{text}\ncolumns: {{text: 007, b.csv: {{text: null}}}}\n")
    assert read_spec(yaml).settings["columns"] == {"text": "007", "b.csv": {"text": None}}


def test_encoding_may_be_that_of_one_table(tmp_path: Path) -> None:
    for name, encoding in (("a.csv", "utf-8"), ("b.csv", "cp1252")):
        (tmp_path / name).write_text("path,text\na.wav,où\n", encoding=encoding)
    tables = {"train": str(tmp_path / "a.csv"), "dev": str(tmp_path / "b.csv")}
    splits = read_splits(own_data(tables, encoding={"b.csv": "cp1252"}))
    assert [split.sentences for split in splits.values()] == [["où"], ["où"]]
    with pytest.raises(SbkitError, match=r"b.csv: line 2 .*utf-8"):
        read_splits(own_data(tables, encoding={"a.csv": "cp1252"}))
    with pytest.raises(SbkitError, match=r"`encoding` names the table c.csv, but .* has .*a.csv"):
        own_data(tables, encoding={"c.csv": "cp1252"}).roles()
    with pytest.raises(SbkitError, match="have one encoding. Write `encoding: cp1252`"):
        TableOptions.from_settings({"encoding": {"train.tsv": "cp1252"}})


def test_paths_may_begin_at_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a YAML; a file may be called `~b.wav`."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "data").mkdir()
    manifest = read(
        tmp_path / "data/a.csv", "path,text\n~/clips/a.wav,hi\n~b.wav,yo\nc~/d.wav,yo\n"
    )
    folder = str(tmp_path / "data")
    paths = [f"{tmp_path}/home/clips/a.wav", f"{folder}/~b.wav", f"{folder}/c~/d.wav"]
    assert [*manifest.paths] == paths
    root = read(tmp_path / "data/b.csv", "path,text\n$data_root/a.wav,hi\n", data_folder="~/clips")
    assert [*root.paths] == paths[:1]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_manifest_of_nemo_whose_audio_is_in_tars_is_recognized(tmp_path: Path, scheme: str) -> None:
    file, names = tmp_path / "tarred_audio_manifest.json", ("a.wav", "b.wav")
    rows = [{"audio_filepath": x, "duration": 1, "text": "hi", "shard_id": 0} for x in names]
    file.write_text("\n".join(map(json.dumps, rows)))
    manifest = dict.fromkeys(("train", "dev"), f"{scheme}{file}")
    with pytest.raises(SbkitError, match=r"is a tarred manifest of NeMo.*a\.wav is in a tar"):
        read_splits(own_data(manifest))
    (tmp_path / "a.wav").touch()  # as it is unpacked
    assert read_splits(own_data(manifest))["train"].ids == ["a", "b"]


def test_rows_that_name_no_file_here_are_left_out(tmp_path: Path) -> None:
    lines = [{"path": "a.wav", "text": "hi"}, [1], {"path": "https://x/a.wav", "text": "hi"}]
    manifest = read(tmp_path / "a.json", "\n".join(map(json.dumps, lines)))
    assert manifest.ids == ["a"]
    assert {(bad.id, bad.reason) for bad in manifest.excluded} == {
        ("row 2", "not a JSON object"),
        ("row 3", "not a file on this machine"),
    }
