"""Files with audio inside give the rows and the bytes that were written, or are refused by name."""

import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset

from recipes.OwnData.corpus import OwnData
from sbkit.audio.io import encode_audio
from sbkit.base.errors import SbkitError
from sbkit.data import audio_tables
from sbkit.data.audio_tables import AudioTable
from sbkit.data.manifest import Manifest
from sbkit.data.tables import TableOptions
from tests.data.test_spans import read as read_table

RATE = 16_000
SAMPLES = [(1000 * np.sin(np.arange(800 + n) / 9)).astype(np.int16) for n in range(5)]
WAVS = [encode_audio(samples, RATE, "WAV") for samples in SAMPLES]
TEXTS = ["one", "two", "", "four", "five"]
Rows = list[tuple[str, bytes]]  # the text and the audio of each


def write_tar(file: Path, *members: tuple[str, bytes]) -> Path:
    with tarfile.open(file, "w:gz" if file.suffix == ".gz" else "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file


def read_blocks(source: object, **settings: Any) -> list[Manifest | AudioTable]:
    all_settings = {"manifest": {"train": str(source)}, "language": "en", **settings}
    blocks = [*OwnData(all_settings).read("train")]
    assert all(isinstance(block, Manifest | AudioTable) for block in blocks)
    return blocks  # type: ignore[return-value]


def read(source: object, **settings: Any) -> tuple[Manifest, list[bytes]]:
    manifests, contents = [], []
    for block in read_blocks(source, **settings):
        assert isinstance(block, AudioTable)
        plain = json.loads(json.dumps(asdict(block)))  # as another process gets it
        copy = AudioTable(**{**plain, "options": TableOptions(**plain["options"])})
        for manifest, content in copy.batches():
            assert len(manifest) == len(content) <= audio_tables.MAX_BATCH_ROWS
            manifests.append(manifest)
            contents += content
    return Manifest.join(manifests), contents


def columns(**others: Any) -> dict[str, Any]:
    """Return the columns of `datasets`; the first row has no name."""
    names = [None, *(f"clips/{n}.wav" for n in range(1, 5))]
    audio = [{"bytes": w, "path": name} for w, name in zip(WAVS, names, strict=True)]
    return {"audio": audio, "text": TEXTS, "spk_id": [7, 7, None, 8, 8], **others}


def write_parquet(folder: Path) -> Path:
    # The path beside the audio of a dataset is that of its origin; times, too
    others = {"path": ["/gone"] * 5, "start": [3.0] * 5, "end": [4.0] * 5}
    pq.write_table(pa.table(columns(**others)), folder / "a.parquet")
    return folder / "a.parquet"


def write_bytes(folder: Path) -> Path:
    pq.write_table(pa.table(columns(audio=WAVS)), folder / "b.parquet")
    return folder / "b.parquet"


def write_saved(folder: Path) -> Path:
    """Save a dataset; the file beside it is one that a later `map` has left in the folder."""
    dataset = datasets.Dataset.from_dict(columns())
    dataset = dataset.cast_column("audio", datasets.Audio(decode=False))
    datasets.disable_progress_bars()
    dataset.save_to_disk(str(folder / "saved"), num_shards=2)
    (folder / "saved/cache-1.arrow").write_bytes(
        (folder / "saved/data-00000-of-00002.arrow").read_bytes()
    )
    return folder / "saved"


def write_webdataset(folder: Path) -> Path:
    (folder / "wds").mkdir()
    with webdataset.ShardWriter(f"{folder}/wds/%06d.tar", maxcount=3, verbose=0) as writer:
        for n, (wav, text) in enumerate(zip(WAVS, TEXTS, strict=True)):
            values = {"text": text, "speaker": "78"[n > 2], "audio_filepath": "/x", "offset": 3.0}
            writer.write({"__key__": f"x/{n}", "wav": wav, "json": values})
    return folder / "wds"


def write_pairs(folder: Path) -> Path:
    pairs = zip(WAVS, TEXTS, strict=True)
    members = [[(f"{n}.wav", w), (f"{n}.txt", t.encode())] for n, (w, t) in enumerate(pairs)]
    return write_tar(folder / "clips.tar.gz", *sum(members, []))


FORMS = (write_parquet, write_bytes, write_saved, write_webdataset, write_pairs)


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("write", FORMS)
def test_each_form_gives_its_rows_in_bounded_batches(
    write: Callable[[Path], Path], is_remote: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audio_tables, "MAX_BATCH_ROWS", 2)
    source = str(write(tmp_path))
    if is_remote:
        fsspec.filesystem("memory").put(source, source, recursive=True)
        source = f"memory://{source}"
    manifest, contents = read(source)
    assert (manifest.sentences, contents, manifest.excluded) == (TEXTS, WAVS, ())
    assert all(span.is_file and "::" in span.path for span in manifest.spans)
    assert len({*manifest.paths}) == 5
    if write not in (write_pairs, write_bytes):
        assert manifest.ids[1:] == ["1", "2", "3", "4"]
    if write != write_pairs:
        speakers = [clip.columns["speaker"] for clip in manifest]
        assert speakers == ["7", "7", "" if write != write_webdataset else "7", "8", "8"]


@pytest.mark.parametrize(
    "type",
    [
        *(pa.string(), pa.large_string(), pa.string_view()),
        *(pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int8(), pa.large_string())),
    ],
    ids=str,
)
def test_texts_of_any_type_of_arrow_are_texts(type: pa.DataType, tmp_path: Path) -> None:
    """polars writes large texts and views, pandas categories."""
    rows = {"path": ["/a.wav", "/b.wav"], "sentence": ["one", "été"], "speaker": ["ann", "bob"]}
    table = {name: pa.array(texts).cast(type) for name, texts in rows.items()}
    pq.write_table(pa.table(table), tmp_path / "paths.parquet")
    of_paths = read_table(tmp_path / "paths.parquet")
    assert [*of_paths.paths] == rows["path"]
    pq.write_table(pa.table({**table, "audio": WAVS[:2]}), tmp_path / "audio.parquet")
    for manifest in (of_paths, read(tmp_path / "audio.parquet", columns={"path": "audio"})[0]):
        assert manifest.sentences == rows["sentence"]
        assert [clip.columns["speaker"] for clip in manifest] == rows["speaker"]


def test_classes_have_names_and_bytes_are_left_out(tmp_path: Path) -> None:
    kind = datasets.ClassLabel(names=["female", "male"])
    rows = {"path": ["a.wav", "b.wav", "c.wav"], "text": ["a", "b", "c"], "gender": [1, 0, -1]}
    rows |= {"picture": [b"\x89PNG"] * 3, "votes": [1, 2, 3], "level": [0.5, float("nan"), None]}
    dataset = datasets.Dataset.from_dict(rows).cast_column("gender", kind)
    dataset.to_parquet(str(tmp_path / "a.parquet"))
    assert [clip.columns for clip in read_table(tmp_path / "a.parquet")] == [
        {"gender": "male", "votes": "1", "level": "0.5", "language": "en"},
        {"gender": "female", "votes": "2", "level": "", "language": "en"},
        {"gender": "", "votes": "3", "level": "", "language": "en"},
    ]


def test_audio_of_a_dataset_may_be_only_a_path(tmp_path: Path) -> None:
    audio = [{"bytes": None, "path": "clips/a.wav"}]
    table = pa.table({"audio": audio, "path": ["/gone/a.wav"], "sentence": ["hi"]})
    pq.write_table(table, tmp_path / "cv.parquet")
    assert [clip.path for clip in read_table(tmp_path / "cv.parquet")] == [tmp_path / "clips/a.wav"]


def test_rows_that_a_file_lacks_are_named(tmp_path: Path) -> None:
    broken = [("._a.wav", b"of macOS"), ("lost.json", b"{}"), ("x.wav", b"x"), ("x.json", b"[")]
    more = [("y.wav", b"y"), ("y.flac", b"y"), ("z.wav", WAVS[0]), ("z.json", b'{"text": "hi"}')]
    manifest, contents = read(write_tar(tmp_path / "a.tar", *broken, *more))
    assert contents == WAVS[:1]
    assert [(row.id, row.reason) for row in manifest.excluded] == [
        ("a.tar lost", "no audio"),
        ("a.tar x", "not a JSON object or UTF-8 text"),
        ("a.tar y", "several audio files"),
    ]
    cells = [{"bytes": WAVS[0], "path": "a.wav"}, {"bytes": None, "path": "b.wav"}]
    pq.write_table(pa.table({"audio": cells, "text": ["a", "b"]}), tmp_path / "b.parquet")
    (excluded,) = read(tmp_path / "b.parquet")[0].excluded
    assert (excluded.id, excluded.reason) == ("b.parquet row 2", "no audio")


def test_columns_of_a_tar_follow_the_rules_of_tables(tmp_path: Path) -> None:
    described = b'{"text": 7, "said": "hi"}'
    tar = write_tar(tmp_path / "a.tar", ("a.wav", WAVS[0]), ("a.json", described))
    with pytest.raises(SbkitError, match="the text of row 1 is '7'"):
        read(tar)
    for columns, text in (({"text": "said", "path": "wav"}, "hi"), ({"text": None}, "")):
        assert read(tar, columns=columns)[0].sentences == [text]


DAMAGE: dict[str, Callable[[bytes, int], bytes]] = {  # to a tar, whose third member has a start
    r"\(unexpected end of data\). Copy": lambda tar, third: tar[: third + 2000],
    r"\(empty header\)": lambda tar, third: tar[:third],
    r"\(invalid header\)": lambda tar, third: tar[:third] + b"x" * 512 + tar[third + 512 :],
    "": lambda tar, third: b"hello " * 1000,
}


@pytest.mark.parametrize("reason", DAMAGE)
def test_damaged_tar_is_refused(reason: str, tmp_path: Path) -> None:
    """`datasets` ends without a word at a wrong header."""
    pairs = [(f"{name}.{suffix}", WAVS[0]) for name in "ab" for suffix in ("wav", "txt")]
    tar = write_tar(tmp_path / "bad.tar", *pairs)
    with tarfile.open(tar) as file:
        third = [member.offset for member in file][2]
    tar.write_bytes(DAMAGE[reason](tar.read_bytes(), third))
    with pytest.raises(SbkitError, match=f"bad.tar cannot be read after row 0 {reason}"):
        read(tar)


def test_tar_with_links_or_two_members_of_one_name_is_refused(tmp_path: Path) -> None:
    twice = write_tar(tmp_path / "twice.tar", ("a.wav", b"x"), ("a.wav", b"y"))
    with pytest.raises(SbkitError, match="twice.tar has two members called a.wav"):
        read(twice)
    (tmp_path / "b.wav").symlink_to("/etc/passwd")
    with tarfile.open(tmp_path / "link.tar", "w") as tar:
        tar.add(tmp_path / "b.wav", "b.wav")
    with pytest.raises(SbkitError, match=r"link.tar cannot be .*cannot extract \(sym\)link"):
        read(tmp_path / "link.tar")


def test_damaged_or_empty_parquet_is_refused_by_name(tmp_path: Path) -> None:
    file = write_parquet(tmp_path)
    content = file.read_bytes()
    pq.write_table(pq.read_table(file).slice(0, 0), file)
    with pytest.raises(SbkitError, match=r"a.parquet has no rows"):
        read(file)
    for damaged in (content[: len(content) // 2], b"PAR1" * 9, b""):
        file.write_bytes(damaged)
        with pytest.raises(SbkitError, match=r"a.parquet cannot be read"):
            read(file)
    pq.write_table(pa.table(columns()).slice(0, 0), file)
    with pytest.raises(SbkitError, match=r"a.parquet has no rows"):
        read(file)


def test_one_file_has_the_rows_of_all_splits(tmp_path: Path) -> None:
    """By speakers, or by a column, here of the type of polars."""
    file = write_parquet(tmp_path)
    splits = pa.array(["test", "dev", "train", "", "train"]).cast(pa.string_view())
    pq.write_table(pa.table(columns(subset=splits)), tmp_path / "split.parquet")
    for source in (file, tmp_path / "split.parquet"):
        corpus = OwnData({"manifest": {"all": str(source)}, "language": "en"})
        texts: dict[str, list[str]] = {}
        for split in ("train", "dev", "test"):
            tables = [block for block in corpus.read(split) if isinstance(block, AudioTable)]
            texts[split] = [text for t in tables for m, _ in t.batches() for text in m.sentences]
        if source == file:
            assert sorted(sum(texts.values(), [])) == sorted(TEXTS)  # each once
    assert texts == {"train": ["", "five"], "dev": ["two"], "test": ["one"]}
    manifest = Manifest.join(b for b in corpus.read("train") if isinstance(b, Manifest))
    assert [row.id for row in manifest.excluded] == ["split.parquet row 4"]
    tar = write_pairs(tmp_path)
    with pytest.raises(SbkitError, match=r"`manifest.all`: .*clips.tar.gz is a tar"):
        OwnData({"manifest": {"all": str(tar)}, "language": "en"}).splits()


# Folders


def test_keys_of_folders_are_columns_and_hidden_folders_are_none(tmp_path: Path) -> None:
    """Spark's uncommitted rows were trained, and German was `en`."""
    for folder in ("lang=en", "lang=de", "_temporary/0/lang=en", ".tmp"):
        (tmp_path / folder).mkdir(parents=True)
        write_parquet(tmp_path / folder)
    manifest, _ = read(tmp_path)
    assert [clip.columns["language"] for clip in manifest] == ["de"] * 5 + ["en"] * 5
    for name in ("speaker=ann%20b", "speaker=__HIVE_DEFAULT_PARTITION__"):
        (tmp_path / "csv" / name).mkdir(parents=True)
        (tmp_path / f"csv/{name}/a.csv").write_text("path,text\na.wav,hi\n")
    assert [clip.columns["speaker"] for clip in read_table(tmp_path / "csv")] == ["", "ann b"]


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("_delta_log/00000.json", r"DeltaTable\('.*/lake'\).file_uris"),
        ("metadata/v10.metadata.json", r"from_metadata\('.*/v10.metadata.json'\).*plan_files"),
    ],
)
def test_deleted_rows_of_a_lake_are_not_read(log: str, line: str, tmp_path: Path) -> None:
    for name in (log, log.replace("10", "9"), "data/part-0.parquet"):
        (tmp_path / "lake" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lake" / name).touch()
    with pytest.raises(SbkitError, match=f"lake is a table of .*deleted rows.*{line}"):
        read(tmp_path)
    (tmp_path / "hudi/.hoodie").mkdir(parents=True)
    (tmp_path / "hudi/.hoodie/hoodie.properties").touch()
    with pytest.raises(SbkitError, match="hudi has a Hudi table.*deleted rows"):
        read(tmp_path / "hudi")


def test_table_at_a_url_names_files_beside_it() -> None:
    memory = fsspec.filesystem("memory")
    paths = ["a.wav", "/etc/passwd", "file:///etc/passwd"]
    lines = [json.dumps({"path": path, "text": "hi"}) for path in paths]
    memory.pipe("/tables/a.jsonl", "\n".join(lines).encode())
    memory.pipe("/tables/b.csv", b"path,text\nc/b.wav,yo")
    (manifest,) = read_blocks("memory://tables")
    assert isinstance(manifest, Manifest)
    names = [path.removeprefix("memory:///tables/") for path in manifest.paths]
    assert names == ["a.wav", "/etc/passwd", "c/b.wav"]
    assert [row.reason for row in manifest.excluded] == ["no audio file"]
