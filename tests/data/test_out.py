"""What `sbkit prepare --out` writes: by several processes, and read in parts by several ranks."""

import errno
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import fsspec
import numpy as np
import pytest
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.memory import MemoryFile

from recipes.prepare import prepare_transcripts
from sbkit.audio.io import encode_audio, read_audio, to_int16
from sbkit.base.errors import ASKED_TO_STOP, PARTLY_DONE, SbkitError
from sbkit.commands.cli import run as sbkit
from sbkit.commands.prepare import choose_share
from sbkit.data import audio_tables, prepared, shard
from sbkit.data.batch import UtteranceDataset
from sbkit.data.cache import CORPUS_FILE
from sbkit.data.corpus import corpus_of
from sbkit.data.filesystem import ByteRange, Storage
from sbkit.data.manifest import Clip
from sbkit.data.prepared import Spec, finish, plan
from sbkit.data.sampler import MicroBatch, RankSampler, TrainSampler
from sbkit.data.shard import WAV_HEADER_BYTES, read_rows
from sbkit.data.splits import sample_counts, shard_numbers
from sbkit.data.units import Unit, Work, list_shards
from sbkit.data.units import write as write_unit
from tests.calls import note_calls
from tests.data.test_splits import make_clips
from tests.runs import ROOT
from tests.shortage import largest_file

YAML = str(ROOT / "hparams/ctc.yaml")
SHARD_BYTES = 20_000


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Clip]:
    return make_clips(tmp_path_factory.mktemp("corpus"), 24)


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "UNIT_CLIPS", 8)
    monkeypatch.setattr("sbkit.data.units.SHARD_BYTES", SHARD_BYTES)


@pytest.fixture
def location(tmp_path: Path) -> Iterator[str]:
    """Return a URL in memory that no other test uses."""
    yield f"memory://{tmp_path.name}"
    fsspec.filesystem("memory").store.clear()


def tables_of(clips: Sequence[Clip]) -> dict[str, str]:
    """Write a table of clips for training, and one of the first of them."""
    folder = clips[0].path.parent
    for split, rows in (("train", clips), ("dev", clips[:2])):
        lines = ["id,path,sentence,speaker,age", *(["line 9,,,,"] if split == "train" else ())]
        lines += [
            f"{clip.id},{clip.path},{clip.sentence},ann,{clip.columns['age']}" for clip in rows
        ]
        (folder / f"{split}.csv").write_text("\n".join(lines))
    return {split: str(folder / f"{split}.csv") for split in ("train", "dev")}


def spec_of(clips: Sequence[Clip], out: str, **more: Any) -> Spec:
    settings = {"manifest": tables_of(clips), "language": "en", "sample_rate": 16_000, **more}
    return Spec(settings, out)


def write(clips: Sequence[Clip], out: str, **more: Any) -> None:
    spec = spec_of(clips, out, **more)
    for unit in plan(spec):
        write_unit(unit)
    assert finish(spec) == []


def settings(location: str, **more: Any) -> dict[str, Any]:
    common = {"language": "en", "sample_rate": 16_000, "min_seconds": 0.0, "max_seconds": 9.0}
    return {**common, "data_folder": location, **more}


def train_of(location: str) -> datasets.Dataset:
    return prepare_transcripts(settings(location)).train


@pytest.mark.parametrize("store", ["pcm", "flac"])
def test_corpus_gives_back_the_clips_on_any_file_system(
    clips: list[Clip], location: str, tmp_path: Path, store: str
) -> None:
    digests = []
    for target in (location, str(tmp_path / "corpus [fr]*")):  # not a pattern
        write(clips, target, audio_store=store)
        splits = prepare_transcripts(settings(target))
        names = {"id", "text", "sentence", "samples", "speaker", "age", "language", "audio"}
        assert names <= {*splits.train.column_names}
        rows = {row["id"]: row for row in read_rows(splits.train, range(24))}
        assert [*rows] == [clip.id for clip in clips]
        for clip in clips:
            row = rows[clip.id]
            assert (row["sentence"], row["age"]) == (clip.sentence, clip.columns["age"])
            assert np.array_equal(row["audio"], read_audio(clip.path))
        assert [row.reason for row in splits.excluded] == ["no path"]
        assert set(splits.valid) == {"dev"}
        digests.append(splits.fingerprints)
    assert digests[0] == digests[1]


def test_later_start_reads_neither_rows_nor_tables_again(
    clips: list[Clip], location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(clips, location)
    first = prepare_transcripts(settings(location))
    reads = note_calls(monkeypatch, Storage, "read", lambda _, name: name)
    fetched = note_calls(monkeypatch, Storage, "fetch", lambda _, name, *__: name)
    later = prepare_transcripts(settings(location))
    assert {*reads} == {CORPUS_FILE} and not fetched
    assert later.train[:] == first.train[:]


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
    write(clips, location)
    train = train_of(location)
    numbers = shard_numbers(train)
    assert len({*numbers}) == 4
    plans = [sampler(train), sampler(train)]
    for epoch, batches in enumerate(plans):
        batches.set_epoch(epoch)
        rows = rows_of([*batches])
        assert sorted(rows) == list(range(24))
    orders = [[int(numbers[row]) for row in rows_of([*batches])] for batches in plans]
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
    write(clips, location)
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
    assert max(read) < 2.2 * total / world_size
    assert sum(read) <= 1.4 * total  # a rank without a share of a step repeats its shortest clip


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_damaged_clip_counts_for_nothing_on_any_rank(
    clips: list[Clip], tmp_path: Path, world_size: int
) -> None:
    write(clips, str(tmp_path / "corpus"))
    train = train_of(str(tmp_path / "corpus"))
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
    cure = f"prepare --verify {tmp_path / 'corpus'}"
    with pytest.raises(SbkitError, match=f"More than 5 clips of train are damaged.*{cure}"):
        load_batches(train, sampler(train), listing)
    with pytest.raises(SbkitError, match=cure):  # as in an evaluation
        load_batches(train, sampler(train))


# ---- sharing the work


def test_units_are_plain_and_may_be_written_in_any_order_by_anyone(
    clips: list[Clip], tmp_path: Path, opened: list[str]
) -> None:
    write(clips, str(tmp_path / "one"))
    assert sorted(opened) == sorted(str(clip.path) for clip in clips)  # also those of two splits
    spec = spec_of(clips, str(tmp_path / "many"))
    units: list[Unit] = json.loads(json.dumps(plan(spec)))
    assert sorted(finish(spec)) == sorted({unit["unit"] for unit in map(name_of, units)})
    with ThreadPoolExecutor(4) as pool:
        assert sum(done["clips"] for done in pool.map(write_unit, units[::-1] * 2)) == 2 * 24
    assert finish(spec) == []
    for file in (tmp_path / "one").iterdir():
        assert (tmp_path / "many" / file.name).is_file()
    assert train_of(str(tmp_path / "many"))[:]["id"] == train_of(str(tmp_path / "one"))[:]["id"]
    opened.clear()
    for unit in units:
        write_unit(unit)
    assert not opened
    assert not [*(tmp_path / "many").glob("*.tmp")]


def name_of(unit: Unit) -> Unit:
    return {**unit, "unit": Work.of(unit).name}


def prepare_out(clips: Sequence[Clip], out: str, *options: str) -> int:
    manifest = f"--manifest={json.dumps(tables_of(clips))}"
    return sbkit(["prepare", YAML, manifest, "--out", out, *options])


def test_shares_are_written_by_tasks_of_an_array_and_finished(
    clips: list[Clip],
    location: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    for name, value in {"MIN": 1, "COUNT": 2, "ID": 2}.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))
    assert prepare_out(clips, location) == 0
    assert "Share 2 of 2 is written. `--finish` writes the index." in caplog.messages
    with pytest.raises(SbkitError, match="is half written: it has shards, but no corpus.json"):
        corpus_of(settings(location))
    assert prepare_out(clips, location, "--finish") == ASKED_TO_STOP
    missing = [line for line in caplog.messages if line.startswith("missing: ")]
    assert f"{len(missing)} units missing; the same command writes them" in caplog.messages
    assert prepare_out(clips, location, "--share=1/2") == 0  # whatever the array says
    assert prepare_out(clips, location, "--finish") == 0
    assert caplog.messages[-1] == f"Train with --data_folder={location}"
    assert len(train_of(location)) == 24


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (1, 1)),
        ({"SLURM_ARRAY_TASK_ID": "9", "MIN": "5", "STEP": "2", "COUNT": "4"}, (3, 4)),
        (
            {"SLURM_ARRAY_TASK_ID": "7", "MIN": "1", "COUNT": "3"},
            "gaps.* has number 6 of 3",
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (1, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, "RANK is set, .* Pass --share K/N"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "SLURM_PROCID is set"),
        ({"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX is set"),
        ({"AWS_BATCH_JOB_ARRAY_INDEX": "1"}, "AWS_BATCH_JOB_ARRAY_INDEX is set"),
    ],
)
def test_share_is_that_of_the_job(
    variables: dict[str, str], expected: tuple[int, int] | str
) -> None:
    long = {"MIN", "STEP", "COUNT"}
    names = {f"SLURM_ARRAY_TASK_{n}" if n in long else n: v for n, v in variables.items()}
    assert choose_share((2, 5), names) == (2, 5)
    if isinstance(expected, tuple):
        assert choose_share(None, names) == expected
    else:
        with pytest.raises(SbkitError, match=expected):
            choose_share(None, names)


def test_unit_without_its_first_shard_is_written_again(
    clips: list[Clip], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audio_tables, "MAX_BATCH_BYTES", 10_000)
    source = write_parquet(tmp_path / "source")
    tables = {"manifest": {"train": source, "dev": source}}
    write(clips, str(tmp_path), **tables)
    shards = max(list_shards(Storage(tmp_path)).values(), key=len)
    assert len(shards) > 1
    (tmp_path / f"{shards[0]}.parquet").unlink()
    assert finish(spec_of(clips, str(tmp_path), **tables)) == [shards[0].rpartition("-")[0]]
    write(clips, str(tmp_path), **tables)
    assert len(train_of(str(tmp_path))) == 20


def write_parquet(folder: Path) -> str:
    """Write a table with 20 clips in it."""
    folder.mkdir()
    rows = [
        {"audio": {"bytes": wav(n), "path": f"{n}.wav"}, "text": f"word {n}"} for n in range(20)
    ]
    dataset = datasets.Dataset.from_list(rows).cast_column("audio", datasets.Audio())
    dataset.to_parquet(folder / "a.parquet", batch_size=2)
    return str(folder / "a.parquet")


def wav(n: int) -> bytes:
    noise = 0.1 * np.random.default_rng(n).standard_normal(1600, np.float32)
    return encode_audio(to_int16(noise), 16_000, "WAV")


# ---- stores


class Proxy(BaseHTTPRequestHandler):
    """Answer any request with its URL, which is whole only if the client uses a proxy."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.path.encode())


def test_corpus_is_read_through_the_proxy_of_the_environment(
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


@pytest.mark.parametrize(
    "fault", [OSError(errno.ESTALE, "Stale"), FSTimeoutError(), PermissionError("s3"), Exception()]
)
def test_store_that_is_away_is_no_fault_of_the_corpus(
    clips: list[Clip], location: str, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    write(clips, location)
    monkeypatch.setattr(MemoryFile, "read", Mock(side_effect=fault), raising=False)
    with pytest.raises(SbkitError, match=f"cannot be reached: {type(fault).__name__}"):
        prepare_transcripts(settings(location))


def test_full_disks_are_named(
    clips: list[Clip], tmp_path: Path, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "small"))
    for out, expected in ((str(tmp_path / "out"), "out is full"), (location, "small/.* is full")):
        unit, *_ = plan(spec_of(clips, out))
        with largest_file(200), pytest.raises(SbkitError, match=f"{expected}.* TMPDIR"):
            write_unit(unit)


# ---- damage


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


def replace_in_index(folder: Path, old: str, new: str) -> None:
    index = folder / CORPUS_FILE
    assert old in index.read_text()
    index.write_text(index.read_text().replace(old, new, 1))


FAULTS: dict[str, Callable[[Path], object]] = {
    r"arrow is missing": lambda f: first(f, "train-*.arrow").unlink(),
    r"arrow has \d+ bytes instead of \d+": lambda f: cut_short(first(f, "train-*.arrow")),
    r"arrow is damaged: the clip at byte": lambda f: spoil(first(f, "train-*.arrow")),
    r"corpus.json is damaged": lambda f: cut_short(f / CORPUS_FILE),
    r"corpus.json has the format 3": lambda f: replace_in_index(f, '"format": 5', '"format": 3'),
    r"corpus.json is damaged .its shard.*--finish": lambda f: replace_in_index(
        f, '"shards"', '"shard"'
    ),
    r"train.arrow .*(missing|reached|damaged)": lambda f: (f / "train.arrow").unlink(),
    r"dev.arrow .*(missing|reached|damaged)": lambda f: cut_short(f / "dev.arrow"),
}


@pytest.mark.parametrize("sentence", FAULTS)
def test_damaged_corpus_is_refused(
    clips: list[Clip], tmp_path: Path, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(clips, str(tmp_path))
    FAULTS[sentence](tmp_path)
    with pytest.raises(SbkitError, match=sentence):
        [*read_rows(train_of(str(tmp_path)), range(24))]
    assert sbkit(["prepare", "--verify", str(tmp_path)]) == (
        PARTLY_DONE if sentence.startswith("arrow") else 0
    )
    lines = capsys.readouterr().out.splitlines()
    tables = [line for line in lines if line.endswith(".parquet")]
    assert len(tables) == sentence.startswith("arrow")
    for table in tables:
        Path(table).unlink()
    write(clips, str(tmp_path))  # writes what is missing
    assert sbkit(["prepare", "--verify", str(tmp_path)]) == 0
    assert len([*read_rows(train_of(str(tmp_path)), range(24))]) == 24


@pytest.mark.parametrize("damage", [cut_short, spoil, Path.unlink])
def test_damaged_table_of_a_shard_is_written_again(
    clips: list[Clip], tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    write(clips, str(tmp_path))
    file = first(tmp_path, "train-*.parquet")
    damage(file)
    if file.exists():
        with pytest.raises(SbkitError, match=f"{file.name} is damaged .* Remove it, and"):
            write(clips, str(tmp_path))
        assert sbkit(["prepare", "--verify", str(tmp_path)]) == PARTLY_DONE
        file.unlink()
    else:
        assert finish(spec_of(clips, str(tmp_path))) == [file.name.rpartition("-0")[0]]
    write(clips, str(tmp_path))
    assert len([*read_rows(train_of(str(tmp_path)), range(24))]) == 24


def test_impossible_options_are_refused(clips: list[Clip], tmp_path: Path) -> None:
    folder = str(tmp_path / "corpus")
    write(clips, folder)
    with pytest.raises(SbkitError, match=r"is 8000, but the audio in .* has 16000 Hz"):
        prepare_transcripts(settings(folder, sample_rate=8_000))
    with pytest.raises(SbkitError, match="--out holds its audio. Set `audio_store: flac`"):
        write(clips, folder, audio_store="lazy")
    for url in ("nope://corpus", *(() if find_spec("s3fs") else ("s3://bucket/corpus",))):
        with pytest.raises(SbkitError, match="fsspec cannot read the protocol of"):
            corpus_of(settings(url))
    (tmp_path / "file").touch()
    with pytest.raises(SbkitError, match="cannot be written to"):
        write(clips, str(tmp_path / "file" / "corpus"))
    for options, sentence in (
        (("--share=1/2",), "--share and --finish need --out"),
        (("--finish",), "--share and --finish need --out"),
        (("--out=x", "--report=y"), "--out writes no report"),
        (("--verify",), "has no shards of `sbkit prepare --out`"),
    ):
        with pytest.raises(SbkitError, match=sentence):
            sbkit(["prepare", YAML, *options])
