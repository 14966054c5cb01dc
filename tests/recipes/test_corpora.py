"""The choice of the corpus, and manifests that a user names."""

import gzip
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from random import Random

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import recipes
from sbkit.audio.io import encode_audio, read_audio
from sbkit.base.errors import SbkitError
from sbkit.data.corpus import check_shares, corpora, corpus_of, deal_speakers
from sbkit.data.manifest import Clip, Manifest, to_texts
from sbkit.data.read_manifests import TableFolders
from tests.data.test_parts import read as read_source
from tests.stores import read_split

ROOT = Path(__file__).parents[2]


def test_corpora_do_not_import_each_other() -> None:
    names = {file.parent.name for file in (ROOT / "recipes").glob("*/corpus.py")}
    for file in (ROOT / "recipes").glob("*/*.py"):
        named = set(re.findall(r"from recipes\.(\w+)", file.read_text()))
        assert not named & names - {file.parent.name}, file


def test_commands_on_data_import_neither_torch_nor_lhotse() -> None:
    code = "import sys; from sbkit.data.corpus import corpora; corpora(); print(*sys.modules)"
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert not {"torch", "lhotse"} & {*output.split()}


LAYOUTS = {  # a file of each folder, by the class that recognizes it
    "fr/clips/a.mp3": "CommonVoice",
    "clips/a.mp3": "CommonVoice",
    "ss-corpus-en.tsv": "CommonVoice",
    "train-960/84/7/84-7.trans.txt": "LibriSpeech",
    "LibriSpeech/dev/84-7.trans.txt": None,
    "LibriSpeech/dev/84/84-7.trans.txt": "LibriSpeech",
    "a_supervisions_train.jsonl.gz": "Lhotse",
    "train/wav.scp": "Lhotse",
    "train/cuts.000000.jsonl.gz": "Lhotse",
    "train.tsv": None,
    "metadata.csv": None,
    "sbkit-shards.json": "ShardedCorpus",
}


@pytest.mark.parametrize("file", LAYOUTS)
def test_a_folder_is_recognized_by_one_class(file: str, tmp_path: Path) -> None:
    settings = {"data_folder": str(tmp_path)}
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    if LAYOUTS[file]:
        assert type(corpus_of(settings)).__name__ == LAYOUTS[file]
    else:
        with pytest.raises(SbkitError, match=rf"data_folder must be .* but {tmp_path} is none"):
            corpus_of(settings)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"data_folder": None}, "AsteriskPrompts"),
        ({"manifest": {"train": "a.csv"}, "data_folder": "/data"}, "OwnData"),
        ({"corpus": "recipes.FestvoxRu.corpus"}, "FestvoxRu"),
    ],
)
def test_keys_choose_a_class(settings: dict[str, object], name: str) -> None:
    assert type(corpus_of(settings)).__name__ == name


def test_a_folder_of_two_layouts_needs_the_key_corpus(tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    (tmp_path / "cuts_train.jsonl").touch()
    choices = "`corpus: recipes.CommonVoice.corpus` or `corpus: recipes.Lhotse.corpus`"
    with pytest.raises(SbkitError, match=choices):
        corpus_of({"data_folder": str(tmp_path)})


MODULE = """
from sbkit import Clip, Corpus
class Notes(Corpus):
    layout = "a folder of notes"
    @classmethod
    def recognizes(cls, settings):
        return str(settings.get("data_folder")).endswith("notes")
    def splits(self):
        return {"train": ("a", "b"), "valid": ("dev",)}
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a corpus in a second place of the package `recipes`."""
    monkeypatch.setattr(recipes, "__path__", [*recipes.__path__, str(tmp_path)])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    (tmp_path / "X").mkdir()
    return tmp_path / "X"


def test_a_corpus_is_added_in_one_folder(package: Path) -> None:
    (package / "corpus.py").write_text(MODULE)
    assert corpora()["recipes.X.corpus"].__name__ == "Notes"
    with pytest.raises(SbkitError, match="data_folder must be .* a folder of notes .* is none"):
        corpus_of({"data_folder": str(package)})
    settings = {"data_folder": "/data/notes", "splits": {"train": "a", "test": "b"}}
    corpus = corpus_of(settings)
    assert corpus.roles() == {"train": ("a",), "valid": ("dev",), "test": ("b",)}
    assert corpus.describe() == {"name": "notes", "license": None}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data_folder": "/no/folder"}, "data_folder must be .* but /no/folder does not exist"),
        ({"data_folder": "http://127.0.0.1:1/shards"}, "cannot be reached"),
        ({"corpus": "recipes.nothing"}, "cannot be imported"),
        ({"corpus": "json"}, "json of a corpus must have one class derived .* but has none"),
    ],
)
def test_corpus_of_refuses_unknown_data(settings: dict[str, object], words: str) -> None:
    with pytest.raises(SbkitError, match=words):
        corpus_of(settings)


@pytest.mark.parametrize("name", ["CommonVoice", "LibriSpeech"])
def test_corpus_of_a_folder_needs_data_folder(name: str) -> None:
    settings = {"corpus": f"recipes.{name}.corpus", "data_folder": None, "language": "en"}
    with pytest.raises(SbkitError, match="`data_folder` names none"):
        corpus_of(settings).splits()


def test_default_corpus_has_a_name_and_the_licenses_of_its_languages() -> None:
    corpus = corpus_of({"language": ["en", "es", "ru"]}).describe()
    assert corpus == {"name": "Asterisk prompts", "license": "CC-BY-SA-3.0 and CC-BY-3.0"}


def test_page_of_corpora_has_each_class() -> None:
    page = (ROOT / "docs/corpora.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| [")]
    for corpus in corpora().values():
        words = corpus.layout or corpus.name or "`manifest`"
        assert sum(words in row for row in rows) == 1, words


def write_table(file: Path, ids: str) -> None:
    """Write a table or a saved dataset, one speaker for each clip."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"path": f"/{id}.wav", "text": "hi", "speaker": id} for id in ids]
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif file.suffix == ".saved":
        datasets.Dataset.from_list(rows).save_to_disk(str(file))
    elif ".json" in file.name:
        lines = [*map(json.dumps, rows)]
        content = "\n".join(lines) if "l" in file.suffixes[0] else f"[{','.join(lines)}]"
        file.write_bytes(gzip.compress(content.encode()) if "gz" in file.name else content.encode())
    else:
        delimiter = "\t" if ".tsv" in file.name else ","
        file.write_text(
            "".join(f"{delimiter.join(row)}\n" for row in [rows[0], *map(dict.values, rows)])
        )


HUB_LAYOUTS = {  # of hub repositories and others, with keywords of their page
    "data/{}-00000-of-00001{}": ("train", "validation", "test"),
    "{}/part{}": ("training", "dev", "eval"),
    "my-corpus-1.0/a_{}.clean{}": ("train", "val", "testing"),
    "{} 2{}": ("Train", "valid", "evaluation"),
}


@pytest.mark.parametrize(
    "ending", (".csv", ".tsv", ".json", ".jsonl", ".jsonl.gz", ".parquet", ".saved")
)
@pytest.mark.parametrize("layout", HUB_LAYOUTS)
def test_folder_has_the_splits_that_names_tell(layout: str, ending: str, tmp_path: Path) -> None:
    """Given as train, a repository of the hub trained on its validation and test, too."""
    folder = tmp_path / "latest-test"  # whose own name says nothing
    for keyword, ids in zip(HUB_LAYOUTS[layout], ("abcdef", "gh", "i"), strict=True):
        write_table(folder / layout.format(keyword, ending), ids)
    write_table(folder / f".cache/train{ending}", "z")
    write_table(folder / f"contest/others{ending}", "y")
    settings = {"manifest": {"all": str(folder)}, "language": "en"}
    assert corpus_of(settings).splits() == {"train": ["train"], "valid": ["dev"], "test": ["test"]}
    manifests = [read_split(settings, name) for name in ("train", "dev", "test")]
    assert [manifest.ids for manifest in manifests] == [[*"abcdef"], [*"gh"], ["i"]]
    for key in ("train", "dev", "test-all"):
        words = rf"`manifest.{key}`: {folder} has files for .*all: {folder}"
        with pytest.raises(SbkitError, match=words):
            corpus_of({"manifest": {key: str(folder)}}).splits()


@pytest.mark.parametrize("missing", ["dev", "test"])
def test_splits_without_files_get_speakers_of_train(missing: str, tmp_path: Path) -> None:
    for split in {"train", "dev", "test"} - {missing}:
        write_table(tmp_path / f"{split}.csv", "abcdef" if split == "train" else "x")
    settings = {"manifest": {"all": str(tmp_path)}, "language": "en"}
    assert corpus_of(settings).splits() == {"train": ["train"], "valid": ["dev"], "test": ["test"]}
    ids = {name: read_split(settings, name).ids for name in ("train", "dev", "test")}
    assert sorted(ids["train"] + ids[missing]) == [*"abcdef"]
    assert min(map(len, ids.values())) >= 1
    (tmp_path / "train.csv").unlink()
    with pytest.raises(SbkitError, match="`splits.train` is empty"):
        corpus_of(settings).roles()


def test_tars_are_read_by_the_splits_that_their_names_tell(tmp_path: Path) -> None:
    names = {"train": "train/audio_0.tar", "dev": "dev-0.tgz", "test": "test/a.tar"}
    for name in (*names.values(), "train/manifest_0.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for folder in (str(tmp_path), f"file://{tmp_path}"):
        settings = {"manifest": {"all": folder}, "language": "en"}
        assert [*chain.from_iterable(corpus_of(settings).splits().values())] == [*names]
        for split, name in names.items():
            (tables,) = corpus_of(settings).read(split)
            assert isinstance(tables, TableFolders) and tables.files == (str(tmp_path / name),)


def read(file: Path, content: str, **settings: object) -> Manifest:
    file.write_text(content, encoding="utf-8")
    return read_source(file, **settings)


def read_all(file: Path, rows: Sequence[str], **settings: object) -> dict[str, Manifest]:
    file.write_text("\n".join(rows), encoding="utf-8")
    all_settings = {"manifest": {"all": str(file)}, "language": "en", **settings}
    corpus = corpus_of(all_settings)
    splits = chain.from_iterable(corpus.splits().values())
    return {split: read_split(all_settings, split) for split in splits}


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
        corpus_of({"manifest": {"all": "a.csv", "dev": "b.csv"}}).splits()


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
    corpus_of(settings).splits()
    manifest = read_split(settings, "train")
    assert [(clip.id, clip.sentence) for clip in manifest] == [("a", "hi"), ("b", "yo")]
    with pytest.raises(SbkitError, match="`path_column` names the table d.csv, but .* has .*a.csv"):
        corpus_of(settings | {"path_column": {"d.csv": "clip"}}).splits()


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
        read_split(settings, "train")
    manifest["train"].pop()
    with pytest.raises(SbkitError, match="somewhere has neither tars nor parquet or JSON Lines"):
        read_split(settings, "train")


def test_missing_file_is_named_by_its_key() -> None:
    for manifest, split, key in (
        ({"test": {"clean": "/nope.csv"}}, "clean", "manifest.test.clean"),
        ({"train": "/nope.csv"}, "train", "manifest.train"),
    ):
        with pytest.raises(SbkitError, match=f"`{key}`: /nope.csv does not exist"):
            read_split({"manifest": manifest, "language": "en"}, split)


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
    assert corpus_of(settings).roles() == {
        "train": ("train",),
        "valid": ("dev",),
        "test": ("clean", "noisy", "test-x"),
    }
    assert [clip.id for clip in read_split(settings, "train")] == ["a.csv", "b.csv"]
    assert corpus_of(settings | {"splits": {"test": "noisy"}}).roles()["test"] == ("noisy",)


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
        corpus_of({"manifest": manifest, "language": "en"}).roles()


def test_releases_of_two_languages_are_one_corpus(tmp_path: Path) -> None:
    for language in ("en", "es"):
        (tmp_path / language / "clips").mkdir(parents=True)
        for split in ("train", "dev", "test", "validated"):
            rows = f"path\tsentence\na.mp3\thi\n{language}.mp3\tyo\n"
            (tmp_path / language / f"{split}.tsv").write_text(rows)
    settings = {"data_folder": str(tmp_path), "language": ["en", "es"]}
    clips = [*read_split(settings, "dev")]
    assert [clip.id for clip in clips] == ["en/clips/a.mp3", "en", "es/clips/a.mp3", "es"]
    assert [clip.columns["language"] for clip in clips] == ["en", "en", "es", "es"]
    assert corpus_of(settings).splits()["valid"] == ("dev",)
    settings |= {"splits": {"train": "validated"}}
    assert corpus_of(settings).splits()["train"] == ("validated",)
    with pytest.raises(SbkitError, match="Choose among: dev, test, train, validated"):
        corpus_of(settings | {"splits": {"test": "other"}}).splits()
