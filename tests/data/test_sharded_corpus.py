"""Corpora of shards: written by several processes, read in parts by several ranks."""

import errno
import json
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import datasets
import fsspec
import numpy as np
import pytest
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.memory import MemoryFile

from recipes.prepare import corpus_of, prepare_transcripts
from sbkit.audio.io import encode_audio, read_audio, to_int16
from sbkit.base import files
from sbkit.base.errors import PARTLY_DONE, SbkitError
from sbkit.base.files import task_lock, try_lock
from sbkit.commands.cli import run as sbkit
from sbkit.data import read_manifests, shard
from sbkit.data.batch import UtteranceDataset
from sbkit.data.filesystem import ByteRange, Storage
from sbkit.data.manifest import Clip, Excluded, Manifest
from sbkit.data.read_manifests import TableFolders, list_tables
from sbkit.data.sampler import MicroBatch, RankSampler, TrainSampler
from sbkit.data.shard import WAV_HEADER_BYTES, ShardWriter, read_rows
from sbkit.data.sharded_corpus import (
    INDEX_FILE,
    Index,
    ShardOptions,
    read_index,
    work_share,
    write_shards,
)
from sbkit.data.splits import sample_counts, shard_numbers
from sbkit.data.tables import TableOptions
from tests import processes
from tests.calls import note_calls
from tests.data.test_splits import make_clips
from tests.runs import ROOT
from tests.shortage import largest_file

OPTIONS = ShardOptions(sample_rate=16_000, store="pcm", shard_bytes=20_000, seed=7)
ROLES = {"train": ["train"], "valid": ["dev"], "test": []}


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Clip]:
    return make_clips(tmp_path_factory.mktemp("corpus") / "clips", 24)


@pytest.fixture
def location(tmp_path: Path) -> Iterator[str]:
    """Return a URL in memory that no other test uses."""
    yield f"memory://{tmp_path.name}"
    fsspec.filesystem("memory").store.clear()


def write(
    location: str, clips: list[Clip], options: ShardOptions = OPTIONS, *share: tuple[int, int]
) -> Index | None:
    """Write clips as train, and the first of them as dev."""
    train = Manifest.of([*clips, Excluded("line 9", "no path", "")])
    manifests = {"train": train, "dev": Manifest.of(clips[:2])}
    return write_shards(Storage(location), options, manifests, ROLES, None, *share)


def settings(location: str, **more: Any) -> dict[str, Any]:
    common = {"language": "en", "sample_rate": 16_000, "min_seconds": 0.0, "max_seconds": 9.0}
    return {**common, "data_folder": location, **more}


def train_of(location: str) -> datasets.Dataset:
    return prepare_transcripts(settings(location)).train


@pytest.mark.parametrize("store", ["pcm", "flac"])
def test_shards_give_back_the_clips_on_any_file_system(
    clips: list[Clip], location: str, tmp_path: Path, store: str
) -> None:
    options = replace(OPTIONS, store=store)
    for target in (location, str(tmp_path / "shards [fr]*")):  # not a pattern
        index = write(target, clips, options)
        assert index is not None and len(index.splits["train"]) > 4
        splits = prepare_transcripts(settings(target))
        names = splits.train.column_names
        assert names == ["id", "text", "sentence", "samples", "speaker", "age", "audio"]
        rows = {row["id"]: row for row in read_rows(splits.train, range(24))}
        assert sorted(rows) == sorted(clip.id for clip in clips)
        assert list(rows) != [clip.id for clip in clips]  # in another order
        for clip in clips:
            row = rows[clip.id]
            assert (row["sentence"], row["age"]) == (clip.sentence, clip.columns["age"])
            assert np.array_equal(row["audio"], read_audio(clip.path))
        assert [(row.id, row.reason) for row in splits.excluded] == [("line 9", "no path")]
        assert set(splits.valid) == {"dev"}


def sampler(
    split: datasets.Dataset, rank: int = 0, world_size: int = 1, seconds: float = 1.0
) -> RankSampler:
    plan = TrainSampler(
        samples=sample_counts(split),
        shards=shard_numbers(split),
        shuffle_shards=2,
        batch_seconds=seconds,
        seed=3,
        concat_prob=0.3,
        speeds=(0.9, 1.0),
    )
    return RankSampler(plan, rank=rank, world_size=world_size)


def rows_of(batches: list[MicroBatch]) -> list[int]:
    return [row for batch in batches for example in batch if example.weight for row in example.rows]


def test_train_sampler_shuffles_within_windows_of_shards(clips: list[Clip], location: str) -> None:
    write(location, clips)
    train = train_of(location)
    numbers = shard_numbers(train)
    plans = [sampler(train), sampler(train)]
    for epoch, plan in enumerate(plans):
        plan.set_epoch(epoch)
        rows = rows_of(list(plan))
        assert sorted(rows) == list(range(24))
        positions_of: dict[int, list[int]] = {}
        for position, row in enumerate(rows):
            positions_of.setdefault(int(numbers[row]), []).append(position)
        spans = [max(positions) - min(positions) for positions in positions_of.values()]
        assert max(spans) < 16  # two of six shards, and a batch over the border
        assert sum(spans) > 6 * 4  # which are mixed
    orders = [[int(numbers[row]) for row in rows_of(list(plan))] for plan in plans]
    assert orders[0] != orders[1]


def num_bytes(requests: list[list[ByteRange]]) -> int:
    return sum(size for request in requests for _, _, size in request)


def load_batches(
    split: datasets.Dataset, plan: RankSampler, listing: Path | None = None
) -> list[list[tuple[str, int, bytes]]]:
    """Load micro-batches: id, speed and audio of examples with a weight."""
    data = UtteranceDataset(split, listing)
    loaded = (data.__getitems__(batch) for batch in plan)
    return [
        [(e["id"], e["percent"], e["audio"].tobytes()) for e in examples if e["weight"]]
        for examples in loaded
    ]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_get_the_same_batches_and_read_each_clip_once(
    clips: list[Clip], location: str, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = note_calls(monkeypatch, shard, "read_ranges", list)
    write(location, clips)
    train = train_of(location)
    single = load_batches(train, sampler(train, seconds=2.0))
    total = num_bytes(fetched)
    assert total == 24 * WAV_HEADER_BYTES + 24 // 3 * 2 * (1600 + 3200 + 4800)
    read, ranks = [], []
    for rank in range(world_size):
        fetched.clear()
        ranks.append(load_batches(train, sampler(train, rank, world_size, 2.0)))
        read.append(num_bytes(fetched))
    joined = [sorted(chain(*parts)) for parts in zip(*ranks, strict=True)]
    assert joined == [sorted(batch) for batch in single]
    assert max(read) < 1.8 * total / world_size
    assert sum(read) <= 1.2 * total  # a rank without a share of a step repeats its shortest clip


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_damaged_clip_counts_for_nothing_on_any_rank(
    clips: list[Clip], tmp_path: Path, world_size: int
) -> None:
    write(str(tmp_path / "shards"), clips)
    train = train_of(str(tmp_path / "shards"))
    whole = load_batches(train, sampler(train, seconds=2.0))
    lost = [train[row] for row in range(0, 20, 4)]
    for row in lost:
        flip_bit(row)
    listing = tmp_path / "left_out.tsv"
    listing.touch()
    plans = [sampler(train, rank, world_size, 2.0) for rank in range(world_size)]
    ranks = [load_batches(train, plan, listing) for plan in plans]
    joined = [sorted(chain(*parts)) for parts in zip(*ranks, strict=True)]
    ids = {row["id"] for row in lost}
    kept = [[e for e in batch if ids.isdisjoint(e[0].split("+"))] for batch in whole]
    assert joined == [sorted(batch) for batch in kept]
    lines = [line.split("\t")[:3] for line in listing.read_text().splitlines()]
    assert sorted(lines) == [["train", id, "damaged"] for id in sorted(ids)]  # once for all ranks
    flip_bit(train[23])
    cure = f"prepare --verify {tmp_path / 'shards'}"
    with pytest.raises(SbkitError, match=f"More than 5 clips of train are damaged.*{cure}"):
        load_batches(train, sampler(train), listing)
    with pytest.raises(SbkitError, match=cure):  # as in an evaluation
        load_batches(train, sampler(train))


# ---- preparing


def test_lock_file_that_its_holder_removes_is_not_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder removes it after another process has opened it, and before that one locks it."""
    removed: list[Path] = []

    def lock_late(descriptor: int) -> bool:
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].unlink()
        return try_lock(descriptor)

    monkeypatch.setattr(files, "try_lock", lock_late)
    with (
        task_lock(tmp_path, "part", wait=False) as first,
        task_lock(tmp_path, "part", wait=False) as second,
    ):
        assert (first, second) == (True, False)
    assert not [*tmp_path.iterdir()]


def test_hidden_folder_among_shards_is_left_alone(clips: list[Clip], tmp_path: Path) -> None:
    (tmp_path / ".unpacked.tmp").mkdir()
    assert write(str(tmp_path), clips) is not None
    assert (tmp_path / ".unpacked.tmp").is_dir()


class Proxy(BaseHTTPRequestHandler):
    """Answer any request with its URL, which is whole only if the client uses a proxy."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.path.encode())


def test_shards_are_read_through_the_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy, ThreadPoolExecutor(1) as pool:
        pool.submit(proxy.serve_forever, 0.05)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_port}")
        try:
            content = Storage("http://corpus.invalid/fr").read("a.arrow")
        finally:
            proxy.shutdown()
    assert content == b"http://corpus.invalid/fr/a.arrow"


@pytest.mark.parametrize("url", ["file:///", "memory://"])
def test_url_of_a_root_keeps_its_slashes(url: str) -> None:
    storage = Storage(url)
    assert storage.url == url
    assert storage.folder == (Path("/") if url == "file:///" else None)


def test_two_processes_share_the_writing_of_shards(clips: list[Clip], tmp_path: Path) -> None:
    publish = ShardWriter.publish
    with (
        patch.object(ShardWriter, "publish", autospec=True, side_effect=publish) as wrote,
        ThreadPoolExecutor(2) as pool,
    ):
        index, other = pool.map(write, [str(tmp_path / "shards")] * 2, [clips] * 2)
    assert index is not None and index == other
    assert wrote.call_count == sum(map(len, index.splits.values()))  # none was written twice
    assert len(train_of(str(tmp_path / "shards"))) == 24
    suffixes = {file.suffix for file in (tmp_path / "shards").iterdir()}
    assert suffixes == {".arrow", ".parquet", ".json"}


def test_array_tasks_take_their_share_and_the_last_writes_the_index(
    clips: list[Clip], location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MIN": 1, "COUNT": 2, "ID": 2}.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))
    assert write(location, clips) is None
    with pytest.raises(SbkitError, match="data_folder must be"):
        corpus_of(settings(location))
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    assert write(location, clips) is not None
    assert len(train_of(location)) == 24
    for target in (f"{location}/given", str(tmp_path / "given")):  # whatever the array says
        indices = [write(target, clips, OPTIONS, (number, 3)) for number in (1, 2, 3)]
        assert [index is None for index in indices] == [True, True, False]
    assert work_share({"RANK": "1", "WORLD_SIZE": "4"}) == (2, 4)


KILLED = """
import os, signal, sys
from pathlib import Path
from sbkit.data.shard import ShardWriter
from tests.data.test_sharded_corpus import make_clips, write
publish = ShardWriter.publish
def publish_two(shard, *inputs, **options):
    if len(list(Path(sys.argv[2]).glob("train-*.parquet"))) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    publish(shard, *inputs, **options)
ShardWriter.publish = publish_two
write(sys.argv[2], make_clips(Path(sys.argv[1]), 24))
"""


def test_killed_writer_loses_only_its_current_shard(tmp_path: Path, decoded: list[str]) -> None:
    clips = make_clips(tmp_path / "clips", 24)
    target = tmp_path / "shards"
    process = processes.run(["-c", KILLED, tmp_path / "clips", target])
    assert process.returncode == -signal.SIGKILL
    assert not (target / INDEX_FILE).exists()
    inodes = {file: file.stat().st_ino for file in target.glob("train-*-*.*")}
    assert len(inodes) == 4  # of two shards
    (leftover,) = target.glob(".*.tmp")
    os.utime(leftover, (0, 0))  # a younger one may be of a running process on another machine
    index = write(str(target), clips)
    assert index is not None
    assert all(file.stat().st_ino == inode for file, inode in inodes.items())
    probed = 24 + 2
    assert len(decoded) == probed + (24 - 2 * 3) + 2
    assert not list(target.glob(".*.tmp"))
    decoded.clear()
    assert write(str(target), clips) == index
    assert len(decoded) == probed
    assert sorted(row["id"] for row in train_of(str(target))) == sorted(c.id for c in clips)


# ---- streams


def wav(n: int) -> bytes:
    noise = 0.1 * np.random.default_rng(n).standard_normal(1600)
    return encode_audio(to_int16(noise), 16_000, "WAV")


def write_sources(folder: Path, *, kind: str = "parquet") -> None:
    """Write two files of 10 rows, with the audio in them (parquet) or beside them."""
    folder.mkdir()
    for part in range(2):
        rows = [
            {"audio": {"bytes": wav(n), "path": f"{n}.wav"}, "text": f"word {n}", "speaker": "ann"}
            for n in range(10 * part, 10 * part + 10)
        ]
        if kind == "parquet":
            dataset = datasets.Dataset.from_list(rows).cast_column("audio", datasets.Audio())
            dataset.to_parquet(folder / f"part{part}.parquet")
            continue
        for row in rows:
            audio: Any = row["audio"]
            (folder / audio["path"]).write_bytes(audio["bytes"])
            row["audio"] = audio["path"]
        (folder / f"part{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def tables_at(location: Path | str) -> TableFolders:
    return TableFolders(tuple(list_tables(str(location))), TableOptions(language="en"))


def write_tables(target: str, source: Path | str) -> Index | None:
    options, tables = replace(OPTIONS, shard_bytes=11_000), {"train": tables_at(source)}
    with patch.object(read_manifests, "BATCH_ROWS", 2):
        return write_shards(Storage(target), options, tables, {"train": ["train"]})


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.tar", "a.tar.gz"])
@pytest.mark.parametrize(
    "fault", [OSError(errno.ESTALE, "Stale"), FSTimeoutError(), PermissionError("s3"), Exception()]
)
def test_store_that_is_away_is_no_fault_of_a_table(
    location: str, monkeypatch: pytest.MonkeyPatch, name: str, fault: Exception
) -> None:
    Storage(location).write(name, b"\xff" * 2000)
    tables = tables_at(location)
    with pytest.raises(SbkitError, match=f"{name} (must be|is damaged)"):
        list(tables.read(tables.files[0], Path(), 0))
    for method in ("read", "read1"):
        monkeypatch.setattr(MemoryFile, method, Mock(side_effect=fault), raising=False)
    with pytest.raises(SbkitError, match=f"{name} cannot be reached: {type(fault).__name__}"):
        list(tables.read(tables.files[0], Path(), 0))


def test_full_temporary_folder_is_named(
    clips: list[Clip], tmp_path: Path, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sources(tmp_path / "source")
    (tmp_path / "small").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "small"))
    for work in (
        partial(write_tables, str(tmp_path / "shards"), tmp_path / "source"),
        partial(write, location, clips),
    ):
        with largest_file(200), pytest.raises(SbkitError, match="small/.* is full.* TMPDIR"):
            work()


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_table_folders_become_shards_and_leave_no_cache(
    tmp_path: Path, location: str, kind: str, own_cache: Path
) -> None:
    write_sources(tmp_path / "source", kind=kind)
    index = write_tables(location, tmp_path / "source")
    assert index is not None
    assert len(index.splits["train"]) == 6  # of 4, 4 and 2 clips, twice
    manifest = corpus_of(settings(location)).read(settings(location), "train")
    assert isinstance(manifest, Manifest)
    assert sorted(manifest[0].columns) == ["language", "speaker"]
    assert sorted(clip.id for clip in manifest) == sorted(map(str, range(20)))
    assert not own_cache.exists()


@pytest.mark.parametrize("audio", ["file://{}", "{}"])
def test_remote_row_cannot_name_a_local_file(tmp_path: Path, audio: str) -> None:
    (tmp_path / "private.wav").write_bytes(wav(1))
    source = f"memory://{tmp_path.name}-rows"
    row = {"audio": audio.format(tmp_path / "private.wav"), "text": "word"}
    fsspec.filesystem("memory").pipe(f"{source}/part.jsonl", json.dumps(row).encode())
    split = tables_at(source)
    (part,) = split.read(split.files[0], tmp_path, 0)
    assert [row.reason for row in part.excluded] == ["no audio file"]


def test_remote_row_that_names_a_folder_is_excluded(tmp_path: Path) -> None:
    (tmp_path / "source" / "folder").mkdir(parents=True)
    row = {"audio": "folder", "text": "word"}
    (tmp_path / "source" / "part.jsonl").write_text(json.dumps(row))
    (part,) = tables_at(f"file://{tmp_path}/source").read(
        f"file://{tmp_path}/source/part.jsonl", tmp_path, 0
    )
    assert [row.reason for row in part.excluded] == ["no audio file"]


def test_table_folder_at_a_url_resumes_after_their_last_shard(
    tmp_path: Path, location: str, decoded: list[str]
) -> None:
    write_sources(tmp_path / "source", kind="jsonl")
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "source"), f"/{tmp_path.name}-source", recursive=True)
    source = f"memory://{tmp_path.name}-source"
    publish, published = ShardWriter.publish, list[str]()

    def publish_once(
        shard: ShardWriter, target: Storage, name: str, *inputs: Any, **facts: Any
    ) -> None:
        if published:
            raise KeyboardInterrupt
        publish(shard, target, name, *inputs, **facts)
        published.append(name)

    with patch.object(ShardWriter, "publish", publish_once), pytest.raises(KeyboardInterrupt):
        write_tables(location, source)
    decoded.clear()
    assert write_tables(location, source) is not None
    assert len(set(decoded)) == len(decoded) == 16  # all but a shard of four
    counts = Counter(
        clip.id for clip in corpus_of(settings(location)).read(settings(location), "train")
    )
    assert counts == Counter(map(str, range(20)))


def test_prepare_command_makes_shards_of_table_folders(tmp_path: Path, location: str) -> None:
    write_sources(tmp_path / "a")
    write_sources(tmp_path / "b")
    manifest = [f"--manifest={{train: {tmp_path / 'a'}, dev: {tmp_path / 'b'}}}"]
    yaml = str(ROOT / "hparams/ctc.yaml")
    with pytest.raises(SbkitError, match="Make shards of it by `sbkit prepare"):
        sbkit(["prepare", yaml, *manifest])
    shards = ["--shards", location, "--shard-size", "15kB"]
    with patch.object(read_manifests, "BATCH_ROWS", 2):
        assert sbkit(["prepare", yaml, *manifest, *shards]) == 0
    assert len(read_index(Storage(location)).splits["train"]) == 4  # of 6 and 4 clips, twice
    assert sbkit(["prepare", yaml, f"--data_folder={location}", "--min_seconds=0"]) == 0


# ---- bad input


def first(folder: Path, pattern: str) -> Path:
    return min(folder.glob(pattern))


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def spoil(file: Path) -> None:
    """Change every tenth byte of the second half, where there is audio."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 :: 10] = bytes(len(content[len(content) // 2 :: 10]))
    file.write_bytes(content)


def flip_bit(row: dict[str, Any]) -> None:
    file, start, size = (row["audio"][name] for name in ("file", "start", "size"))
    content = bytearray(Path(file).read_bytes())
    content[start + size // 2] ^= 1
    Path(file).write_bytes(content)


def misspell(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"Clip", b"Clap", 1))


def replace_in_index(folder: Path, old: str, new: str) -> None:
    index = folder / INDEX_FILE
    index.write_text(index.read_text().replace(old, new, 1))


FAULTS: dict[str, Callable[[Path], object]] = {
    r"arrow is missing": lambda f: first(f, "train*.arrow").unlink(),
    r"parquet cannot be reached: FileNotFound": lambda f: first(f, "*.parquet").unlink(),
    r"arrow has \d+ bytes instead of \d+": lambda f: cut_short(first(f, "train*.arrow")),
    r"arrow is damaged: the clip at byte": lambda f: spoil(first(f, "train*.arrow")),
    r"parquet is damaged": lambda f: spoil(first(f, "t*.parquet")),
    r"parquet is damaged .*could not verify page": lambda f: misspell(first(f, "t*.parquet")),
    r"is not an index of `sbkit prepare --shards`": lambda f: cut_short(f / INDEX_FILE),
    r"its sample_rate is '16000'": lambda f: replace_in_index(f, "16000", '"16000"'),
    r"its roles name the unknown split more": lambda f: replace_in_index(
        f, '"train"\n', '"more"\n'
    ),
}


@pytest.mark.parametrize("sentence", FAULTS)
def test_damaged_shards_are_refused(
    clips: list[Clip], tmp_path: Path, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(str(tmp_path), clips)
    FAULTS[sentence](tmp_path)
    with pytest.raises(SbkitError, match=sentence):
        list(read_rows(train_of(str(tmp_path)), range(24)))
    if sentence.startswith(("arrow", "parquet")):
        verify = ["prepare", "--verify", str(tmp_path)]
        assert sbkit(verify) == PARTLY_DONE
        table, line, *_ = capsys.readouterr().out.splitlines()
        assert line == f"1 damaged shard in {tmp_path}"
        Path(table).unlink(missing_ok=True)
        write(str(tmp_path), clips)  # writes what is missing
        assert sbkit(verify) == 0
        assert len(list(read_rows(train_of(str(tmp_path)), range(24)))) == 24


def test_impossible_shard_options_are_refused(
    clips: list[Clip], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path / "shards")
    write(folder, clips)
    with pytest.raises(SbkitError, match=r"is 8000, but the shards in .* have 16000 Hz"):
        prepare_transcripts(settings(folder, sample_rate=8_000))
    with pytest.raises(SbkitError, match="must be pcm or flac, but is lazy"):
        write(folder, clips, replace(OPTIONS, store="lazy"))
    for url in ("nope://shards", *(() if find_spec("s3fs") else ("s3://bucket/shards",))):
        with pytest.raises(SbkitError, match="fsspec cannot read the protocol of"):
            corpus_of(settings(url))
    with pytest.raises(SbkitError, match="but is '1 gigabyte'"):
        sbkit(["prepare", str(ROOT / "hparams/ctc.yaml"), "--shards=x", "--shard-size=1 gigabyte"])
    array = {"ID": "7", "MIN": "1", "COUNT": "3"}
    with pytest.raises(SbkitError, match="numbers without gaps, .* has number 6 of 3"):
        work_share({f"SLURM_ARRAY_TASK_{name}": value for name, value in array.items()})
    (tmp_path / "file").touch()
    with pytest.raises(SbkitError, match="cannot be written to"):
        write(str(tmp_path / "file" / "shards"), clips)
    write_sources(tmp_path / "source")
    cut_short(tmp_path / "source/part1.parquet")
    with pytest.raises(SbkitError, match="parquet, JSON Lines in UTF-8 or tar, but cannot be read"):
        write_tables(str(tmp_path / "other"), tmp_path / "source")


def test_table_folders_may_have_different_columns(tmp_path: Path, location: str) -> None:
    write_sources(tmp_path / "source")
    row = {"audio": {"bytes": wav(1), "path": "other.wav"}, "text": "a", "mood": "calm"}
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "source" / "part2.parquet")
    none = datasets.Dataset.from_list([row]).select([])
    none.to_parquet(tmp_path / "source" / "part3.parquet")
    assert write_tables(location, tmp_path / "source") is not None
    clips = corpus_of(settings(location)).read(settings(location), "train")
    columns = {clip.id: {**clip.columns} for clip in clips}
    assert len(columns) == 21
    assert columns["other"] == {"mood": "calm", "language": "en"}
    assert columns["0"] == {"speaker": "ann", "language": "en"}
