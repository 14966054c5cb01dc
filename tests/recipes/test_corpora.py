"""The choice of the corpus, and manifests that a user names."""

import gzip
import json
import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipes.AsteriskPrompts import corpus as asterisk_prompts
from recipes.CommonVoice import corpus as common_voice
from recipes.OwnData import corpus as own_data
from recipes.prepare import corpus_of
from sbkit.audio.io import encode_audio, read_audio
from sbkit.base.errors import SbkitError
from sbkit.data.corpus import check_shares, deal_speakers, describe_corpus, splits_of
from sbkit.data.manifest import Clip, Excluded, Manifest, to_texts
from tests.data.test_parts import read as read_source

ROOT = Path(__file__).parents[2]


def test_corpora_do_not_import_each_other() -> None:
    corpora = {file.parent.name for file in (ROOT / "recipes").glob("*/corpus.py")}
    for file in (ROOT / "recipes").glob("*/*.py"):
        named = set(re.findall(r"from recipes\.(\w+)", file.read_text()))
        assert not named & corpora - {file.parent.name}, file


def test_corpus_of_follows_the_yaml(tmp_path: Path) -> None:
    assert corpus_of({"data_folder": None}) is asterisk_prompts
    assert corpus_of({"data_folder": None, "manifest": {"train": "a.csv"}}) is own_data
    assert corpus_of({"corpus": "recipes.CommonVoice.corpus"}) is common_voice
    (tmp_path / "fr" / "clips").mkdir(parents=True)
    assert corpus_of({"data_folder": str(tmp_path)}) is common_voice
    assert corpus_of({"data_folder": str(tmp_path / "fr")}) is common_voice


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data_folder": f"{ROOT}/docs"}, "has none of these layouts"),
        ({"data_folder": __file__}, "is not a folder"),
        ({"data_folder": "http://127.0.0.1:1/shards"}, "cannot be reached"),
        ({"corpus": "recipes.nothing"}, "cannot be imported"),
        ({"corpus": "json"}, "has no function splits and no read"),
    ],
)
def test_corpus_of_refuses_unknown_data(settings: dict[str, object], words: str) -> None:
    with pytest.raises(SbkitError, match=words):
        corpus_of(settings)


@pytest.mark.parametrize("name", ["CommonVoice", "LibriSpeech"])
def test_corpus_of_a_folder_needs_data_folder(name: str) -> None:
    settings = {"corpus": f"recipes.{name}.corpus", "data_folder": None, "language": "en"}
    with pytest.raises(SbkitError, match="`data_folder` names none"):
        corpus_of(settings).splits(settings)


def test_describe_corpus_returns_name_and_license() -> None:
    corpus = describe_corpus(asterisk_prompts, {"language": ["en", "es", "ru"]})
    assert corpus == {"name": "Asterisk prompts", "license": "CC-BY-SA-3.0 and CC-BY-3.0"}
    own: Any = SimpleNamespace(about=lambda settings: {"name": "mine", "license": "mit"})
    assert describe_corpus(own, {"corpus": "my.corpus"})["name"] == "mine"
    for settings, name in (({"data_folder": "/data/cv-fr/"}, "cv-fr"), ({}, None)):
        assert describe_corpus(common_voice, settings) == {"name": name, "license": None}


def test_key_splits_applies_to_a_user_corpus() -> None:
    module: Any = SimpleNamespace(splits=lambda _: {"train": ("a", "b"), "valid": ("dev",)})
    splits = splits_of(module, {"splits": {"train": "a", "test": "b"}})
    assert splits == {"train": ("a",), "valid": ("dev",), "test": ("b",)}


def write_table(file: Path, ids: str) -> None:
    """Write a table, a saved dataset or a folder of Kaldi, one speaker for each clip."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"path": f"/{id}.wav", "text": "hi", "speaker": id} for id in ids]
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif file.suffix == ".saved":
        datasets.Dataset.from_list(rows).save_to_disk(str(file))
    elif file.suffix == ".kaldi":
        file.mkdir()
        (file / "split2/1").mkdir(parents=True)  # as its tools leave them
        for folder in (file, file / "split2/1"):
            (folder / "wav.scp").write_text("".join(f"{id} /{id}.wav\n" for id in ids))
            (folder / "text").write_text("".join(f"{id} hi\n" for id in ids))
    elif ".json" in file.name:
        lines = [*map(json.dumps, rows)]
        content = "\n".join(lines) if "l" in file.suffixes[0] else f"[{','.join(lines)}]"
        file.write_bytes(gzip.compress(content.encode()) if "gz" in file.name else content.encode())
    else:
        delimiter = "\t" if ".tsv" in file.name else ","
        file.write_text(
            "".join(f"{delimiter.join(row)}\n" for row in [rows[0], *map(dict.values, rows)])
        )


LAYOUTS = {  # of hub repositories and others, with keywords of their page
    "data/{}-00000-of-00001{}": ("train", "validation", "test"),
    "{}/part{}": ("training", "dev", "eval"),
    "my-corpus-1.0/a_{}.clean{}": ("train", "val", "testing"),
    "{} 2{}": ("Train", "valid", "evaluation"),
}


@pytest.mark.parametrize(
    "ending", (".csv", ".tsv", ".json", ".jsonl", ".jsonl.gz", ".parquet", ".saved", ".kaldi")
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_folder_has_the_splits_that_names_tell(layout: str, ending: str, tmp_path: Path) -> None:
    """Given as train, a repository of the hub trained on its validation and test, too."""
    folder = tmp_path / "latest-test"  # whose own name says nothing
    for keyword, ids in zip(LAYOUTS[layout], ("abcdef", "gh", "i"), strict=True):
        write_table(folder / layout.format(keyword, ending), ids)
    write_table(folder / f".cache/train{ending}", "z")
    write_table(folder / f"contest/others{ending}", "y")
    settings = {"manifest": {"all": str(folder)}, "language": "en"}
    assert own_data.splits(settings) == {"train": ["train"], "valid": ["dev"], "test": ["test"]}
    manifests = [cast(Manifest, own_data.read(settings, name)) for name in ("train", "dev", "test")]
    assert [manifest.ids for manifest in manifests] == [[*"abcdef"], [*"gh"], ["i"]]
    for key in ("train", "dev", "test-all"):
        words = rf"`manifest.{key}`: {folder} has files for .*all: {folder}"
        with pytest.raises(SbkitError, match=words):
            own_data.splits({"manifest": {key: str(folder)}})


@pytest.mark.parametrize("missing", ["dev", "test"])
def test_splits_without_files_get_speakers_of_train(missing: str, tmp_path: Path) -> None:
    for split in {"train", "dev", "test"} - {missing}:
        write_table(tmp_path / f"{split}.csv", "abcdef" if split == "train" else "x")
    settings = {"manifest": {"all": str(tmp_path)}, "language": "en"}
    assert own_data.splits(settings) == {"train": ["train"], "valid": ["dev"], "test": ["test"]}
    ids = {
        name: cast(Manifest, own_data.read(settings, name)).ids for name in ("train", "dev", "test")
    }
    assert sorted(ids["train"] + ids[missing]) == [*"abcdef"]
    assert min(map(len, ids.values())) >= 1
    (tmp_path / "train.csv").unlink()
    with pytest.raises(SbkitError, match="`splits.train` is empty"):
        splits_of(own_data, settings)


def test_tars_are_read_by_the_splits_that_their_names_tell(tmp_path: Path) -> None:
    names = {"train": "train/audio_0.tar", "dev": "dev-0.tgz", "test": "test/recording.000000.tar"}
    for name in (*names.values(), "train/manifest_0.json", "test/features.000000.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "test/cuts.000000.jsonl.gz").touch()
    for folder in (str(tmp_path), f"file://{tmp_path}"):
        settings = {"manifest": {"all": folder}, "language": "en"}
        assert [*chain.from_iterable(own_data.splits(settings).values())] == [*names]
        for split, name in names.items():
            assert own_data.read(settings, split).files == (str(tmp_path / name),)


def read(file: Path, content: str, **settings: object) -> Manifest:
    file.write_text(content, encoding="utf-8")
    return read_source(file, **settings)


def read_all(file: Path, rows: Sequence[str], **settings: object) -> dict[str, Manifest]:
    file.write_text("\n".join(rows), encoding="utf-8")
    all_settings = {"manifest": {"all": str(file)}, "language": "en", **settings}
    corpus = corpus_of(all_settings)
    splits = chain.from_iterable(corpus.splits(all_settings).values())
    return {split: cast(Manifest, corpus.read(all_settings, split)) for split in splits}


def test_one_table_has_the_rows_of_all_splits_in_a_column_of_any_spelling(tmp_path: Path) -> None:
    header = "path,text,Subset"
    names = ["train", "val", "test-noisy", "Train", " ", "TEST"]
    rows = [f"{n}.wav,hi,{name}" for n, name in enumerate(names)]
    manifests = read_all(tmp_path / "a.csv", [header, *rows])
    ids = {split: manifest.ids for split, manifest in manifests.items()}
    expected = {"train": ["0", "3"], "val": ["1"], "test-noisy": ["2"], "test": ["5"]}
    assert ids == expected
    assert [(row.id, row.reason) for row in manifests["train"].excluded] == [("4", "no split")]
    with pytest.raises(SbkitError, match=r"a.csv: the column split has the value 'other'"):
        read_all(tmp_path / "a.csv", ["path,text,split", "9.wav,hi,other"])
    with pytest.raises(SbkitError, match="`manifest` has `all` and other keys"):
        own_data.splits({"manifest": {"all": "a.csv", "dev": "b.csv"}})


def test_one_table_is_split_by_its_speakers(tmp_path: Path) -> None:
    """Rows without a speaker are speakers of their own."""
    random = Random(0)
    rows = [
        f"{n}.wav,hi,{random.choice(['', *(f'speaker {k}' for k in range(50))])}"
        for n in range(1000)
    ]
    manifests = read_all(tmp_path / "a.csv", ["path,text,speaker", *rows[:500]])
    sizes = {split: len(manifest) for split, manifest in manifests.items()}
    assert sum(sizes.values()) == 500
    assert min(sizes.values()) > 20
    assert sizes["train"] > 350
    speakers = [{*to_texts(m.rows["speaker"])} - {""} for m in manifests.values()]
    assert sum(map(len, speakers)) == len(set.union(*speakers))
    assert all("" in to_texts(m.rows["speaker"]) for m in manifests.values())
    (train, dev) = read_all(
        tmp_path / "a.csv", ["path,text,reader", *rows], split_shares={"dev": 0.5}
    )
    assert (train, dev) == ("train", "dev")
    with pytest.raises(SbkitError, match="has 1 speaker, and 3 splits"):
        read_all(tmp_path / "a.csv", ["path,text,speaker", "a.wav,hi,ann", "b.wav,hi,ann"])
    with pytest.raises(SbkitError, match="`split_shares` must map dev and test to shares"):
        read_all(tmp_path / "a.csv", ["path,text,speaker", *rows], split_shares={"dev": 1})


@pytest.mark.parametrize("shares", [{"dev": 0.1, "test": 0.1}, {"dev": 0.4, "test": 0.5}])
def test_later_speakers_move_only_who_fills_a_split(shares: dict[str, float]) -> None:
    """In 109 of 200 such tables they moved somebody, also from train to test."""
    in_another_order = check_shares(dict(reversed(shares.items())))
    for trial in range(200):
        speakers = [f"{trial}-{n}" for n in range(60)]
        first = deal_speakers(speakers[: 3 + trial % 10], in_another_order, "a.csv")
        later = deal_speakers(speakers, shares, "a.csv")
        sizes = Counter(first.values())
        assert all(later[name] == split or sizes[split] == 1 for name, split in first.items())
        assert {*sizes} == {*later.values()} == {"train", "dev", "test"}


def test_clip_without_speaker_stays_when_another_has_its_name(tmp_path: Path) -> None:
    """Its id becomes longer then, and was what decided the split."""
    rows = [f"{folder}/{n}.wav,hi" for folder in ("one", "two") for n in range(60)]
    splits: list[dict[Path, str]] = []
    for count, table in ((60, "a.csv"), (120, "a.csv"), (120, f"../{tmp_path.name}/a.csv")):
        manifests = read_all(tmp_path / table, ["path,text", *rows[:count]])
        splits.append({clip.path.resolve(): s for s, m in manifests.items() for clip in m})
    assert splits[1].items() >= splits[0].items()
    assert splits[1] == splits[2]


def test_columns_may_be_named_in_any_case(tmp_path: Path) -> None:
    table = "Clip,Said,speaker\nfile://a.wav,hi,ann\n"
    (clip,) = read(tmp_path / "a.csv", table, path_column="clip", text_column="Said")
    assert clip == Clip("a", tmp_path / "a.wav", "hi", {"speaker": "ann", "language": "en"})


def test_columns_of_each_table_may_have_their_own_names(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("clip,path,said\na.wav,hash,hi\n")
    (tmp_path / "b.csv").write_text("path,text\nb.wav,yo\n")
    settings = {
        "manifest": {"train": [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")], "dev": "c.csv"},
        "path_column": {"a.csv": "clip"},
        "text_column": {str(tmp_path / "a.csv"): "said"},
        "language": "en",
    }
    own_data.splits(settings)
    manifest = own_data.read(settings, "train")
    assert isinstance(manifest, Manifest)
    assert [(clip.id, clip.sentence) for clip in manifest] == [("a", "hi"), ("b", "yo")]
    with pytest.raises(SbkitError, match="`path_column` names the table d.csv, but .* has .*a.csv"):
        own_data.splits(settings | {"path_column": {"d.csv": "clip"}})


def test_nemo_manifest_is_read(tmp_path: Path) -> None:
    nemo = {"audio_filepath": "a.wav", "duration": 1.5, "text": "hi", "speaker": "ann"}
    lines = [nemo, [1], nemo | {"audio_filepath": "https://x/a.wav"}]
    manifest = read(tmp_path / "a.json", "\n".join(map(json.dumps, lines)))
    assert manifest[0].columns == {"duration": "1.5", "speaker": "ann", "language": "en"}
    assert {(bad.id, bad.reason) for bad in manifest.excluded} == {
        ("row 2", "not a JSON object"),
        ("row 3", "not a file on this machine"),
    }


@pytest.mark.parametrize(
    ("content", "settings", "words"),
    [
        ("LJ1|hi|hi\nLJ2|yo|yo\n", {}, "header of .* the column hi twice.*add a header"),
        ("path,said\n1,2\n", {"text_column": "sad"}, "columns sad; it has path, said"),
        ("[{}]", {}, "JSON Lines, but line 1 is not"),
    ],
)
def test_table_without_its_columns_is_refused(
    tmp_path: Path, content: str, settings: dict[str, object], words: str
) -> None:
    with pytest.raises(SbkitError, match=words):
        read(tmp_path / "a.csv", content, **settings)


def kaldi(folder: Path, **files: str) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name.replace("wav", "wav.scp")).write_text(content, encoding="utf-8")
    return folder


def test_kaldi_folder_needs_no_text_where_none_is_read(tmp_path: Path) -> None:
    manifest = read_source(kaldi(tmp_path / "k", wav="u1 /x/a.flac\n"), text_column=False)
    assert (manifest.ids, manifest.sentences, manifest.excluded) == (["u1"], [""], ())


def test_kaldi_folder_is_read(tmp_path: Path) -> None:
    wav = "u1 /x/a.flac\nu2 b.flac\n\nu3 c.flac\n"
    text, english = "u1 hello there\n\nu2 yes\nu4 no\n", {"language": "en"}
    speakers = {"utt2spk": "u1 ann\nu2 bob\n", "spk2gender": "ann f"}
    manifest = read_source(kaldi(tmp_path / "k", wav=wav, text=text, **speakers))
    assert [*manifest] == [
        Clip("u1", Path("/x/a.flac"), "hello there", english | {"speaker": "ann", "gender": "f"}),
        Clip("u2", tmp_path / "k/b.flac", "yes", english | {"speaker": "bob"}),
    ]
    assert manifest.excluded == (
        Excluded("row 4", "no transcript", "text has no line for u3"),
        Excluded("u4", "no audio file", "text has a line for it, wav.scp has none"),
    )


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"wav": "u1 touch MARK |\n", "text": "u1 hi"}, "line 1 is a command"),
        ({"wav": "u1 a.wav\n"}, "The file text of a data folder of Kaldi must be readable"),
    ],
)
def test_damaged_kaldi_folder_is_refused(tmp_path: Path, files: dict[str, str], words: str) -> None:
    with pytest.raises(SbkitError, match=words):
        read_source(kaldi(tmp_path / "k", **files))


@pytest.mark.parametrize("source", ["saved", "rows.parquet"])
def test_class_labels_of_a_dataset_become_names(source: str, tmp_path: Path) -> None:
    kind = datasets.ClassLabel(names=["female", "male"])
    rows = {"path": ["a.wav", "b.wav", "c.wav"], "text": ["a", "b", "c"], "gender": [1, 0, -1]}
    dataset = datasets.Dataset.from_dict(rows).cast_column("gender", kind)
    file = tmp_path / source
    dataset.to_parquet(str(file)) if file.suffix else dataset.save_to_disk(str(file))
    assert [clip.columns["gender"] for clip in read_source(file)] == ["male", "female", ""]


def spark_rows(folder: Path, **columns: list[bytes]) -> Path:
    """Write a parquet file whose strings are bytes, as Spark and Impala write them."""
    arrays = {name: pa.array(values, pa.binary()) for name, values in columns.items()}
    pq.write_table(pa.table(arrays), folder / "rows.parquet")
    return folder / "rows.parquet"


def test_strings_that_parquet_has_as_bytes_are_text(tmp_path: Path) -> None:
    text = "h\u00e9".encode()
    (clip,) = read_source(spark_rows(tmp_path, path=[b"a.wav"], text=[text], picture=[b"\x89PNG"]))
    assert clip == Clip("a", tmp_path / "a.wav", "h\u00e9", {"language": "en"})
    file = spark_rows(tmp_path, path=[b"a.wav"], text=["h\u00e9".encode("latin-1")])
    with pytest.raises(SbkitError, match="column text of .* bytes that are not UTF-8 text"):
        read_source(file)


def test_bytes_without_a_path_are_audio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "cache"))
    for kind in ("WAV", "FLAC", "MP3", "OGG"):
        content = encode_audio(np.ones(800, np.int16), 16_000, kind)
        (clip,) = read_source(spark_rows(tmp_path, audio=[content], text=[b"hi"]))
        assert (clip.path.read_bytes(), clip.sentence) == (content, "hi")


def test_table_folders_and_other_sources_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("path,text\na.wav,hi\n")
    manifest = {"train": ["memory://somewhere", str(tmp_path / "a.csv")]}
    settings = {"manifest": manifest, "language": "en"}
    with pytest.raises(SbkitError, match=r"train` cannot mix table folders, tars and .*a\.csv"):
        own_data.read(settings, "train")
    manifest["train"].pop()
    with pytest.raises(SbkitError, match="somewhere has neither tars nor parquet or JSON Lines"):
        own_data.read(settings, "train")


def test_missing_file_is_named_by_its_key() -> None:
    for manifest, split, key in (
        ({"test": {"clean": "/nope.csv"}}, "clean", "manifest.test.clean"),
        ({"train": "/nope.csv"}, "train", "manifest.train"),
    ):
        with pytest.raises(SbkitError, match=f"`{key}`: /nope.csv does not exist"):
            own_data.read({"manifest": manifest, "language": "en"}, split)


@pytest.mark.parametrize("parquet", [False, True])
def test_dataset_with_embedded_audio_is_read(
    parquet: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "cache"))
    samples = (8000 * np.sin(np.arange(8000) / 9)).astype(np.int16)
    audio = [
        {"bytes": encode_audio(samples, 16_000, "WAV"), "path": "clips/a.wav"},
        {"bytes": encode_audio(samples[:4000], 16_000, "FLAC"), "path": None},
        {"bytes": encode_audio(samples, 16_000, "MP3"), "path": "../../c.mp3"},
        {"bytes": b"RIFF", "path": "d.wav"},
    ]
    rows = {"audio": audio, "text": list("abcd"), "age": [30, 31, 32, 33]}
    dataset = datasets.Dataset.from_dict(rows).cast_column("audio", datasets.Audio(decode=False))
    source = tmp_path / ("saved.parquet" if parquet else "saved")
    dataset.to_parquet(str(source)) if parquet else dataset.save_to_disk(str(source))
    first = [*read_source(source)]
    assert [clip.sentence for clip in first] == list("abcd")
    assert [clip.id for clip in first if clip.sentence in "acd"] == ["a", "c", "d"]
    assert all(tmp_path / "cache" in clip.path.parents for clip in first)
    assert [len(read_audio(clip.path)) for clip in first[:2]] == [8000, 4000]
    assert abs(len(read_audio(first[2].path)) - 8000) < 2000  # mp3 pads
    with pytest.raises(SbkitError, match=r"d\.wav is not recognized as audio"):
        read_audio(first[3].path)
    assert [*read_source(source)] == first


def test_manifest_mapping_names_splits_and_roles(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text(f"path,text\n{name}.wav,hi\n")
    a, b = str(tmp_path / "a.csv"), str(tmp_path / "b.csv")
    manifest = {"train": [a, b], "dev": a, "test": {"clean": a, "noisy": b}, "test-x": b}
    settings = {"manifest": manifest, "language": "en"}
    assert splits_of(own_data, settings) == {
        "train": ("train",),
        "valid": ("dev",),
        "test": ("clean", "noisy", "test-x"),
    }
    assert [clip.id for clip in own_data.read(settings, "train")] == ["a.csv", "b.csv"]
    assert splits_of(own_data, settings | {"splits": {"test": "noisy"}})["test"] == ("noisy",)


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ({"train": "a.csv"}, "no files for dev. Add `dev: FILE`"),
        ({"train": "a", "dev": "b", "other": "c"}, "Write test-other"),
        ({"train": {"a": "a"}, "dev": {"train": "b"}}, "a split called train"),
        ({"train": [], "dev": "b"}, "must be a file or a list of files"),
        ({"train": "a", "dev": {1: "b"}, "test": {1: "c"}}, "'1' twice"),
        ({"train": "~no_such_user_/a.csv", "dev": "b"}, "`manifest.train`.* no such user"),
    ],
)
def test_malformed_manifest_mapping_is_refused(manifest: object, words: str) -> None:
    with pytest.raises(SbkitError, match=words):
        splits_of(own_data, {"manifest": manifest, "language": "en"})


def test_releases_of_two_languages_are_one_corpus(tmp_path: Path) -> None:
    for language in ("en", "es"):
        (tmp_path / language / "clips").mkdir(parents=True)
        for split in ("train", "dev", "test", "validated"):
            rows = f"path\tsentence\na.mp3\thi\n{language}.mp3\tyo\n"
            (tmp_path / language / f"{split}.tsv").write_text(rows)
    settings = {"data_folder": str(tmp_path), "language": ["en", "es"]}
    corpus = corpus_of(settings)
    clips = corpus.read(settings, "dev")
    assert [clip.id for clip in clips] == ["en/clips/a.mp3", "en", "es/clips/a.mp3", "es"]
    assert [clip.columns["language"] for clip in clips] == ["en", "en", "es", "es"]
    assert corpus.splits(settings)["valid"] == ("dev",)
    settings |= {"splits": {"train": "validated"}}
    assert corpus.splits(settings)["train"] == ("validated",)
    with pytest.raises(SbkitError, match="Choose among: dev, test, train, validated"):
        corpus.splits(settings | {"splits": {"test": "other"}})
