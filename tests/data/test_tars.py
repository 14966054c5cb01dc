"""Tars of WebDataset and NeMo become shards; broken and hostile ones are refused."""

import json
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import webdataset

from sbkit.audio.io import encode_audio, read_audio
from sbkit.base.errors import SbkitError
from sbkit.commands.cli import run as sbkit
from sbkit.data import read_manifests
from sbkit.data.corpus import corpus_of
from sbkit.data.filesystem import Storage
from sbkit.data.manifest import Manifest
from sbkit.data.read_manifests import TableFolders, list_tables
from sbkit.data.shard import read_rows
from sbkit.data.sharded_corpus import ShardOptions, write_shards
from sbkit.data.tables import TableOptions
from tests.data.test_cache import write_tar
from tests.data.test_splits import prepare_manifest
from tests.runs import rows_of

OPTIONS = ShardOptions(sample_rate=16_000, store="flac", shard_bytes=10**9, seed=7)


@pytest.fixture(scope="module")
def clips(asterisk_english: Path) -> dict[Path, str]:
    rows = rows_of(asterisk_english / "dev.tsv")[:7]
    return {asterisk_english / "clips" / row["path"]: row["sentence"] for row in rows}


def write_webdataset(folder: Path, clips: Mapping[Path, str]) -> None:
    """Write three tars, each of which counts its clips from 0."""
    folder.mkdir()
    with webdataset.ShardWriter(f"{folder}/%06d.tar", maxcount=3, verbose=0) as writer:
        for n, (clip, text) in enumerate(clips.items()):
            sample = {"__key__": f"{n % 3}", "flac": clip.read_bytes(), "json": {"text": text}}
            writer.write(sample)


def write_json_pairs(folder: Path, clips: Mapping[Path, str]) -> None:
    """Write two tars; the JSON has a path and an offset of its source.

    The first text is in a .txt.
    """
    members = []
    for clip, text in clips.items():
        values = {"text": text, "speaker": "ann", "audio_filepath": "/gone.wav", "offset": 3.0}
        members.append((f"x/{clip.name}", clip.read_bytes()))
        members.append((f"x/{clip.stem}.json", json.dumps(values).encode()))
    members[1] = (members[1][0].replace(".json", ".txt"), [*clips.values()][0].encode())
    write_tar(folder / "shard-000000.tar", *members[:8])
    write_tar(folder / "shard-000001.tar", *members[8:])


def write_text_pairs(folder: Path, clips: Mapping[Path, str]) -> None:
    members = []
    for clip, text in clips.items():
        wav = encode_audio(read_audio(clip), 16_000, "WAV")
        members += [(f"{clip.stem}.txt", text.encode()), (f"{clip.stem}.wav", wav)]
    write_tar(folder / "clips.tar.gz", *members)


def write_nemo(folder: Path, clips: Mapping[Path, str]) -> None:
    """Write two tars and a manifest for both, as NeMo's conversion script does."""
    rows = []
    for shard, names in enumerate(([*clips][:4], [*clips][4:])):
        write_tar(folder / f"audio_{shard}.tar", *((f"d_{c.name}", c.read_bytes()) for c in names))
        rows += [
            {
                "audio_filepath": f"d_{clip.name}",
                "duration": round(len(read_audio(clip)) / 16_000, 1),
            }
            | {"text": clips[clip], "shard_id": shard, "speaker": "ann"}
            for clip in names
        ]
    lines = map(json.dumps, rows)
    (folder / "tarred_audio_manifest.json").write_text("\n".join(lines), encoding="utf-8")


def to_shards(source: Path, folder: Path) -> dict[str, np.ndarray]:
    options = TableOptions(language="en", path_column="wav")  # a key of tables, not of tars
    tables = TableFolders(tuple(list_tables(str(source))), options)
    write_shards(Storage(str(folder)), OPTIONS, {"train": tables}, {"train": ["train"]})
    corpus = corpus_of({"data_folder": str(folder), "sample_rate": 16_000})
    manifest = Manifest.join(corpus.blocks("train"))
    assert manifest.excluded == ()
    assert len({*manifest.ids}) == len(manifest)  # also if tars have equal names
    split = prepare_manifest(folder, manifest, normalize=str, keep_empty=True).dataset
    return {row["sentence"]: row["audio"] for row in read_rows(split, range(len(split)))}


@pytest.mark.parametrize(
    "write", [write_webdataset, write_json_pairs, write_text_pairs, write_nemo]
)
def test_tars_give_the_clips(
    clips: dict[Path, str], tmp_path: Path, write: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_manifests, "BATCH_ROWS", 3)
    assert callable(write)
    write(tmp_path / "tars", clips)
    audio = to_shards(tmp_path / "tars", tmp_path / "shards")
    assert len(audio) == len(clips)
    for clip, text in clips.items():
        assert np.array_equal(audio[text], read_audio(clip))


@pytest.mark.parametrize("text_column", ["said", False])
def test_text_column_names_the_text_of_a_sample_or_says_that_there_is_none(
    clips: dict[Path, str], tmp_path: Path, text_column: Literal[False] | str
) -> None:
    """The column of paths is of tables: a sample has its audio beside it."""
    values = json.dumps({"said": "hi", "text": "yo", "path": "/gone.flac"} if text_column else {})
    members = [("a.flac", next(iter(clips)).read_bytes()), ("a.json", values.encode())]
    write_tar(tmp_path / "a.tar", *members)
    options = TableOptions(path_column="wav", text_column=text_column)
    tables = TableFolders((str(tmp_path / "a.tar"),), options)
    (manifest,) = tables.read(str(tmp_path / "a.tar"), tmp_path, 0)
    assert (manifest.sentences, manifest.excluded) == (["hi" if text_column else ""], ())


def test_nemo_has_parts_and_members_without_rows(clips: dict[Path, str], tmp_path: Path) -> None:
    clip = next(iter(clips))
    write_tar(tmp_path / "audio_03.tar", ("a.flac", clip.read_bytes()), ("b.flac", b"unused"))
    rows = [
        {"audio_filepath": "a.flac", "offset": 0.0, "duration": 0.5, "text": "one"}
        | {"shard_id": 3},
        {"audio_filepath": "a-sub1.flac", "offset": 0.5, "duration": 0.5, "text": "two"},
        {"audio_filepath": "a-sub2.flac", "offset": 0.5, "duration": 0.5, "text": "other shard"}
        | {"shard_id": 4},
    ]
    (tmp_path / "sharded_manifests").mkdir()
    manifest = tmp_path / "sharded_manifests/manifest_3.json"
    manifest.write_text("\n".join(map(json.dumps, rows)))
    audio = to_shards(tmp_path / "audio_03.tar", tmp_path / "shards")
    samples = read_audio(clip)
    assert audio.keys() == {"one", "two"}
    assert np.array_equal(audio["one"], samples[:8000])
    assert np.array_equal(audio["two"], samples[8000:16_000])
    rows.append({"audio_filepath": "a-sub3.flac", "offset": 0.4, "duration": 0.5, "text": "x"})
    manifest.write_text("\n".join(map(json.dumps, rows)))
    message = (
        r"1 part overlaps another\).*: audio_03.tar a-400-900: 0.4 to 0.9 s of a.flac overlaps"
    )
    with pytest.raises(SbkitError, match=message):
        to_shards(tmp_path / "audio_03.tar", tmp_path / "overlapping")


def prepare(tar: Path, out: Path, *options: str) -> int:
    tables = [f"--manifest={split}={tar}" for split in ("train", "dev")]
    yaml = "hparams/ctc.yaml"
    return sbkit(["prepare", yaml, *tables, "--shards", str(out), "--language=en", *options])


@pytest.mark.parametrize("numbers", ["_OP_0..1_CL_", "{0..1}"])
def test_a_range_names_many_tars(
    clips: dict[Path, str], tmp_path: Path, numbers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_nemo(tmp_path, clips)
    assert prepare(tmp_path / f"audio_{numbers}.tar", tmp_path / "shards") == 0
    assert "train: 7 clips, 0.01 h, 2 shards" in capsys.readouterr().out
    with pytest.raises(SbkitError, match=r"audio_2.tar does not exist"):
        prepare(tmp_path / f"audio_{numbers.replace('1', '2')}.tar", tmp_path / "more")


def test_nemo_manifest_of_a_damaged_row_is_refused(clips: dict[Path, str], tmp_path: Path) -> None:
    write_nemo(tmp_path, clips)
    manifest = tmp_path / "tarred_audio_manifest.json"
    manifest.write_text(manifest.read_text().replace('"ann"}', '"ann"', 1))
    with pytest.raises(SbkitError, match=r"tarred_audio_manifest.json: .* is not a JSON object"):
        prepare(tmp_path / "audio_0.tar", tmp_path / "shards")


def test_rows_that_a_tar_lacks_are_told_and_counted(clips: dict[Path, str], tmp_path: Path) -> None:
    write_json_pairs(tmp_path, clips)
    tar = tmp_path / "shard-000000.tar"
    with tarfile.open(tar) as file:
        members = [(m.name, file.extractfile(m).read()) for m in file]  # type: ignore[union-attr]
    audio = members[0][1]
    more = [("._a.flac", b"of macOS"), ("lost.json", b"{}"), ("x.flac", audio), ("x.json", b"[")]
    more += [("y.flac", audio), ("y.wav", audio), ("y.txt", b"two"), ("z.flac", audio)]
    write_tar(tar, *members, *more)
    message = (
        r"4 of 8 rows of train are unusable \(1 no audio file, 1 not a JSON object or UTF-8 text, "
        r"1 several audio files, 1 no transcript\).*shard-000000.tar lost: it consists of json; "
        r"shard-000000.tar x: "
    )
    with pytest.raises(SbkitError, match=message):
        prepare(tar, tmp_path / "shards")


DAMAGE: dict[str, Callable[[bytes, int], bytes]] = {  # to a tar, whose third member has a start
    r"\(unexpected end of data\). Copy": lambda tar, third: tar[: third + 2000],
    r"\(empty header\)": lambda tar, third: tar[:third],
    r"\(invalid header\)": lambda tar, third: tar[:third] + b"x" * 512 + tar[third + 512 :],
    "": lambda tar, third: b"hello " * 1000,
}


@pytest.mark.parametrize("reason", DAMAGE)
def test_damaged_tar_is_refused(clips: dict[Path, str], tmp_path: Path, reason: str) -> None:
    audio = next(iter(clips)).read_bytes()
    pairs = [(f"{name}.{suffix}", audio) for name in "ab" for suffix in ("flac", "txt")]
    tar = write_tar(tmp_path / "bad.tar", *pairs)
    with tarfile.open(tar) as file:
        third = [member.offset for member in file][2]
    tar.write_bytes(DAMAGE[reason](tar.read_bytes(), third))
    with pytest.raises(SbkitError, match=f"bad.tar is damaged, or not a tar file {reason}"):
        prepare(tar, tmp_path / "shards")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("b.flac", tarfile.LNKTYPE, "its member 'b.flac' is a link or a device. Write the tar"),
        ("a.flac", b"", r"bad.tar is damaged, or .* \(.*a.flac: duplicate file name"),
    ],
)
def test_tar_with_links_or_two_members_of_one_name_is_refused(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    tar = write_tar(tmp_path / "bad.tar", ("a.flac", b""), ("a.txt", b"one"), (name, content))
    with pytest.raises(SbkitError, match=message):
        prepare(tar, tmp_path / "shards")
