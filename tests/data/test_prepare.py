"""What `sbkit prepare` does: in the cache, and with --out, --share, --finish and --verify."""

import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from itertools import chain, product
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pytest
import soundfile
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.memory import MemoryFileSystem

from recipes.prepare import prepare_transcripts
from sbkit.audio.io import read_audio
from sbkit.base.checksums import checksum
from sbkit.base.errors import ASKED_TO_STOP, PARTLY_DONE, ConfigError, SbkitError, StoreError
from sbkit.commands.cli import run as sbkit
from sbkit.commands.prepare import choose_share
from sbkit.data import prepared, shard, work_units
from sbkit.data.batch import UtteranceDataset
from sbkit.data.cache import CORPUS_FILE
from sbkit.data.filesystem import ByteRange, Storage
from sbkit.data.manifest import Clip
from sbkit.data.prepared import Spec, finish, plan
from sbkit.data.prepared import write as write_unit
from sbkit.data.sampler import RankSampler, TrainSampler
from sbkit.data.shard import WAV_HEADER_BYTES, read_rows
from sbkit.data.splits import sample_counts, shard_numbers
from sbkit.data.work_units import WorkUnit
from sbkit.text.normalization import language_table
from tests.calls import NOTE_READS, Reads, note_calls
from tests.data.test_fresh import Corpus, Row, difference, forget, observe, tone
from tests.data.test_fresh import write as write_files
from tests.data.test_splits import cut, make_clips
from tests.processes import Process, run_fresh
from tests.runs import ROOT, TINY, TINY_VOICE, Workplace, losses_of, train_here
from tests.shortage import largest_file, obeying_modes

YAML = f"{ROOT}/hparams/ctc.yaml"
START = f"{NOTE_READS}\nfrom sbkit.commands.cli import main\nmain()"


# ---- in the cache


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(tmp_path, monkeypatch)


def make_corpus(folder: Path, count: int = 4) -> Corpus:
    """Write a release with so many clips in each split."""
    corpus = Corpus("release")
    first = 0
    for rows in corpus.splits.values():
        numbers = range(first, first := first + count)
        rows[:] = [Row(f"{n}.wav", f"Word {n}.", f"s{n}", tone(n)) for n in numbers]
    write_files(corpus, folder)
    return corpus


def test_starts_at_once_read_each_file_once(tmp_path: Path, reads: Reads) -> None:
    corpus = make_corpus(tmp_path / "corpus", count=40)
    reads.take()
    command = ["-c", START, "prepare", YAML, *corpus.options(tmp_path / "corpus")]
    starts = [Process(command) for _ in range(3)]
    outputs = [process.communicate(timeout=120) for process in starts]
    assert [process.returncode for process in starts] == [0, 0, 0], outputs
    assert {*reads.take().values()} == {1}
    assert {"train: 40 utterances" in output for output, _ in outputs} == {True}
    seen = [observe(corpus, tmp_path / "corpus", tmp_path / name) for name in ("cache", "empty")]
    assert not difference(*seen)


def test_edit_that_keeps_size_and_time_is_found_by_again_only(
    tmp_path: Path, own_cache: Path
) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    before = observe(corpus, tmp_path / "corpus", own_cache)
    corpus.edit_row(0, audio=tone(16))  # as long as it was
    write_files(corpus, tmp_path / "corpus", keep_times=True)
    assert not difference(observe(corpus, tmp_path / "corpus", own_cache), before)
    assert sbkit(["prepare", YAML, *corpus.options(tmp_path / "corpus"), "--again"]) == 0
    seen = observe(corpus, tmp_path / "corpus", own_cache)
    assert difference(seen, before)
    assert not difference(seen, observe(corpus, tmp_path / "corpus", tmp_path / "empty"))


def test_damaged_shard_is_prepared_again_and_other_damage_may_be_an_error(
    tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    expected = observe(corpus, tmp_path / "corpus", own_cache)
    files = [path for path in own_cache.rglob("[!.]*") if path.is_file()]
    shards = [path for path in files if path.match("*-last.clips")]
    for file, damage in [*product(files, [cut]), *product(shards, [Path.unlink])]:
        shutil.copytree(own_cache, tmp_path / "damaged")
        caplog.clear()
        damage(tmp_path / "damaged" / file.relative_to(own_cache))
        seen = observe(corpus, tmp_path / "corpus", tmp_path / "damaged")
        is_refused = file not in shards and seen.startswith("error: ")
        assert not difference(seen, expected) or is_refused, file
        assert file not in shards or "The clips are decoded again" in caplog.text
        shutil.rmtree(tmp_path / "damaged")


@pytest.mark.slow(60)
@pytest.mark.parametrize(("yaml", "tiny"), [("ctc", TINY), ("tts", TINY_VOICE)])
def test_run_on_edited_corpus_is_as_with_an_empty_cache(
    yaml: str, tiny: Sequence[str], workplace: Workplace, tmp_path: Path
) -> None:
    """Token counts, symbols, pitch and statistics of features decide its losses."""
    release = Path(shutil.copytree(workplace.release, tmp_path / "release"))
    words = ("train.py", f"hparams/{yaml}.yaml", f"--data_folder={release}", *tiny)
    losses = []
    for run, cache in (("first", "used"), ("second", "used"), ("third", "empty")):
        output = f"--output_folder={tmp_path / run}"
        assert train_here([*words, "--number_of_epochs=1", output], tmp_path / cache) == 0
        losses.append(losses_of(tmp_path / run))
        if run == "first":
            clips = sorted((release / "clips").iterdir())
            shutil.copy(clips[0], clips[-1])
            table = release / "train.tsv"
            head, _, _ = table.read_text().rstrip().rpartition("\t")
            table.write_text(f"{head}\tAnother sentence.\n")
    assert losses[1] == losses[2] != losses[0]


# ---- where the user says


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Clip]:
    return make_clips(tmp_path_factory.mktemp("corpus"), 24)


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "UNIT_CLIPS", 8)
    monkeypatch.setattr(work_units, "SHARD_BYTES", 20_000)


@pytest.fixture
def location(tmp_path: Path) -> Iterator[str]:
    """Return a URL in memory that no other test uses."""
    yield f"memory://{tmp_path.name}"
    fsspec.filesystem("memory").store.clear()


def spec_of(clips: Sequence[Clip], out: object) -> Spec:
    """Write a table of clips for training, and one of the first of them."""
    folder = clips[0].path.parent
    for split, rows in (("train", clips), ("dev", clips[:2])):
        lines = ["id,path,sentence,speaker,age", *(["line 9,,,,"] if split == "train" else ())]
        lines += [f"{c.id},{c.path},{c.sentence},ann,{c.columns['age']}" for c in rows]
        (folder / f"{split}.csv").write_text("\n".join(lines))
    tables = {split: str(folder / f"{split}.csv") for split in ("train", "dev")}
    return Spec.of(YAML, {"manifest": tables}, str(out))


def prepare_out(spec: Spec, *options: str) -> int:
    keys = (f"--{name}={json.dumps(value)}" for name, value in spec.settings.items() if value)
    return sbkit(["prepare", YAML, *keys, "--out", spec.out, *options])


def settings(location: object, **more: Any) -> dict[str, Any]:
    common = {"language": "en", "sample_rate": 16_000, "min_seconds": 0.0, "max_seconds": 9.0}
    return {**common, "data_folder": str(location), **more}


def train_of(location: object) -> datasets.Dataset:
    return prepare_transcripts(settings(location)).train


def test_transcripts_of_train_decide_whether_words_are_separated(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(16_000), 16_000)
    for name, text in (("train", "請輸入 您的密碼"), ("dev", "press 請 輸")):
        (tmp_path / f"{name}.csv").write_text(f"path,text\na.wav,{text}\n", encoding="utf-8")
    tables = {name: str(tmp_path / f"{name}.csv") for name in ("train", "dev")}
    for language in ("hak", "zh"):
        splits = prepare_transcripts(settings("", manifest=tables, language=language))
        assert splits.table == replace(language_table(language), spaces=False)
        assert [*splits.train["text"], *splits.valid["dev"]["text"]] == [
            "請輸入您的密碼",
            "press請輸",
        ]


@pytest.mark.parametrize("store", ["pcm", "flac"])
def test_corpus_gives_back_the_clips_on_any_file_system(
    clips: list[Clip], location: str, tmp_path: Path, store: str
) -> None:
    digests = []
    for target in (location, str(tmp_path / "corpus [fr]*")):  # not a pattern
        assert prepare_out(spec_of(clips, target), f"--audio_store={store}") == 0
        splits = prepare_transcripts(settings(target))
        names = {"id", "text", "sentence", "samples", "speaker", "age", "language", "audio"}
        assert names <= {*splits.train.column_names}
        rows = {row["id"]: row for row in read_rows(splits.train, range(24))}
        assert [*rows] == [clip.id for clip in clips]
        for clip in clips:
            row = rows[clip.id]
            assert (row["sentence"], row["age"]) == (clip.sentence, clip.columns["age"])
            assert np.array_equal(row["audio"], read_audio(clip.path))
        assert {location["file_rate"] for location in splits.train["audio"]} == {16_000}
        assert [row.reason for row in splits.excluded] == ["no path"]
        assert set(splits.valid) == {"dev"}
        digests.append(splits.fingerprints)
    assert digests[0] == digests[1]


def test_later_start_reads_neither_rows_nor_tables_again(
    clips: list[Clip], location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_out(spec_of(clips, location))
    first = train_of(location)
    reads = note_calls(monkeypatch, Storage, "read", lambda _, name: name)
    fetched = note_calls(monkeypatch, Storage, "fetch", lambda _, name, *__: name)
    later = train_of(location)
    assert {*reads} == {CORPUS_FILE} and not fetched
    assert later[:] == first[:]


@pytest.mark.parametrize("form", ["csv", "tar", "url"])
def test_corpus_written_again_is_as_in_an_empty_folder(form: str, tmp_path: Path) -> None:
    corpus = Corpus(form)
    out, folder = tmp_path / "out", tmp_path / "corpus"
    write_files(corpus, folder)
    write_out(corpus, folder, out)
    for number, values in enumerate(({"text": "Wart 1."}, {"audio": tone(8)})):
        corpus.edit_row(0, **values)
        write_files(corpus, folder)
        seen, expected = (
            write_out(corpus, folder, place) for place in (out, tmp_path / f"empty {number}")
        )
        assert not difference(seen, expected) and not seen.startswith("error")


def write_out(corpus: Corpus, folder: Path, out: Path) -> str:
    """Write a corpus to a folder of its own; return what `observe` tells of that."""
    forget()
    assert sbkit(["prepare", YAML, *corpus.options(folder), "--out", str(out)]) == 0
    written = Corpus("release", keys={"data_folder": str(out), "splits": None})
    return observe(written, out, out.parent / f"cache of {out.name}").replace(str(out), "OUT")


@pytest.mark.slow(10)
def test_moved_corpus_that_is_read_only_can_be_trained_on(
    workplace: Workplace, tmp_path: Path
) -> None:
    data = f"--data_folder={workplace.release}"
    assert sbkit(["prepare", YAML, data, "--out", str(tmp_path / "written")]) == 0
    shared = (tmp_path / "written").rename(tmp_path / "shared")
    for path in (shared, *shared.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    output = f"--output_folder={tmp_path / 'run'}"
    words = ["train.py", YAML, f"--data_folder={shared}", output, *TINY, "--number_of_epochs=1"]
    with obeying_modes():
        with pytest.raises(PermissionError):
            (shared / "file").touch()
        assert train_here(words, tmp_path / "cache") == 0


# ---- read in parts by several ranks


def sampler(split: datasets.Dataset, rank: int = 0, world_size: int = 1) -> RankSampler:
    plan = TrainSampler(
        samples=sample_counts(split),
        shards=shard_numbers(split),
        shuffle_shards=2,
        batch_seconds=2.0,
        seed=3,
        concat_prob=0.3,
        speeds=(0.9, 1.0),
    )
    return RankSampler(plan, rank=rank, world_size=world_size)


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


def num_bytes(requests: list[list[ByteRange]]) -> int:
    return sum(size for request in requests for _, _, size in request)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_get_the_same_batches_and_read_each_clip_once(
    clips: list[Clip], location: str, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = note_calls(monkeypatch, shard, "read_ranges", list)
    prepare_out(spec_of(clips, location))
    train = train_of(location)
    assert len({*shard_numbers(train)}) == 4  # the windows of an epoch
    single = load_batches(train, sampler(train))
    total = num_bytes(fetched)
    assert total == 24 * WAV_HEADER_BYTES + 24 // 3 * 2 * (1600 + 3200 + 4800)
    read, ranks = [], []
    for rank in range(world_size):
        fetched.clear()
        ranks.append(load_batches(train, sampler(train, rank, world_size)))
        read.append(num_bytes(fetched))
    joined = [sorted(chain(*parts)) for parts in zip(*ranks, strict=True)]
    assert joined == [sorted(batch) for batch in single]
    assert max(read) < 2.2 * total / world_size
    assert sum(read) <= 1.4 * total  # a rank without a share of a step repeats its shortest clip


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_damaged_clip_counts_for_nothing_on_any_rank(
    clips: list[Clip], tmp_path: Path, world_size: int
) -> None:
    prepare_out(spec_of(clips, tmp_path / "corpus"))
    train = train_of(tmp_path / "corpus")
    whole = load_batches(train, sampler(train))
    lost = [train[row] for row in range(0, 20, 4)]
    for row in lost:
        flip_bit(row)
    listing = tmp_path / "left_out.tsv"
    listing.touch()
    plans = [sampler(train, rank, world_size) for rank in range(world_size)]
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


def flip_bit(row: dict[str, Any]) -> None:
    file, start, size = (row["audio"][name] for name in ("file", "start", "size"))
    content = bytearray(Path(file).read_bytes())
    content[start + size // 2] ^= 1
    Path(file).write_bytes(content)


# ---- sharing the work


def test_units_are_plain_and_may_be_written_in_any_order_by_anyone(
    clips: list[Clip], tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = note_calls(monkeypatch, work_units, "stat_files", len)
    prepare_out(spec_of(clips, tmp_path / "one"))
    assert sorted(opened) == sorted(str(clip.path) for clip in clips)  # also those of two splits
    spec = spec_of(clips, tmp_path / "many")
    looks.clear()
    todo = json.loads(json.dumps(plan(spec)))
    assert not looks  # at audio files
    assert sorted(finish(spec)) == sorted({WorkUnit.of(unit).name for unit in todo})
    with ThreadPoolExecutor(4) as pool:
        assert sum(unit["clips"] for unit in pool.map(write_unit, todo[::-1] * 2)) == 2 * 24
    assert finish(spec) == []
    one, many = ({file.name for file in (tmp_path / name).iterdir()} for name in ("one", "many"))
    assert one == many
    assert train_of(tmp_path / "many")[:]["id"] == train_of(tmp_path / "one")[:]["id"]
    opened.clear()
    for unit in todo:
        write_unit(unit)
    assert not opened


def test_shares_write_all_units_once_and_finish_lists_the_others(
    clips: list[Clip], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = spec_of(clips, tmp_path / "out")
    names = [WorkUnit.of(unit).name for unit in plan(spec)]
    array = {"ID": "7", "MIN": "5", "STEP": "2", "COUNT": "2"}  # the second of two tasks
    with patch.dict(os.environ, {f"SLURM_ARRAY_TASK_{name}": n for name, n in array.items()}):
        assert prepare_out(spec) == 0
        before = shards_of(spec)
        assert prepare_out(spec, "--share=3/256") == 0  # whatever the array says
    with patch.dict(os.environ, {"JOB_COMPLETION_INDEX": "0"}):
        assert prepare_out(spec, "--finish") == ASKED_TO_STOP
        output = "".join(capfd.readouterr())
        assert "Share 2 of 2 is written. `--finish` writes the index." in output
        missing = [*names[:1], *names[4::2]]
        assert [name for name in names if f"missing: {name}" in output] == missing
        assert f"{len(missing)} unit" in output and "Rerun their shares, then `--finish`." in output
        assert prepare_out(spec, "--share=1/1") == 0
    assert f"Train with --data_folder={spec.out}" in "".join(capfd.readouterr())
    assert {**shards_of(spec), **before} == shards_of(spec)  # what was there is not written again
    assert len(train_of(spec.out)) == 24
    assert sbkit(["prepare", "--verify", spec.out]) == 0


def shards_of(spec: Spec) -> dict[str, tuple[bytes, int]]:
    """Return the content and the time of all shards by name."""
    files = Path(spec.out).glob("t*-*.*")
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


@pytest.mark.parametrize(
    ("options", "variables", "expected"),
    [
        ("--share 4/3 --out o", {}, "must be K/N with K from 1 to N"),
        ("--share 0/3 --out o", {}, "must be K/N with K from 1 to N"),
        ("--share 1/3", {}, "--share and --finish need --out: a folder or URL"),
        ("--finish", {}, "--share and --finish need --out"),
        ("--out o --report r", {}, "--out writes no report"),
        ("--out o --again", {}, "--again is for the cache"),
        ("--verify", {}, "has no shards of `sbkit prepare --out`"),
        ("--out o --audio_store lazy", {}, "--out stores its audio. Set `audio_store: flac`"),
        ("--out nope://corpus", {}, "fsspec cannot open nope:"),
        ("--data_folder nope://corpus", {}, "fsspec cannot open nope:"),
        ("--out o", {"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX is set"),
        ("", {"AWS_BATCH_JOB_ARRAY_INDEX": "2"}, "AWS_BATCH_JOB_ARRAY_INDEX is set"),
        ("--out s3://b/o", {"SLURM_PROCID": "1", "SLURM_NTASKS": "9"}, "SLURM_PROCID is set"),
        ("", {"PBS_ARRAY_INDEX": "0"}, "PBS_ARRAY_INDEX is set"),
        ("", {"SGE_TASK_ID": "3"}, "SGE_TASK_ID is set"),
        ("", {"RANK": "0", "WORLD_SIZE": "2"}, "RANK is set, .* Pass --share K/N"),
        (
            "--out o",
            {f"SLURM_ARRAY_TASK_{n}": v for n, v in {"ID": "9", "MIN": "1", "COUNT": "4"}.items()},
            "without gaps.* this is task 8 of 4",
        ),
    ],
)
def test_impossible_options_and_shares_are_refused_in_one_sentence(
    options: str, variables: Mapping[str, str], expected: str
) -> None:
    with patch.dict(os.environ, variables), pytest.raises(SbkitError, match=expected):
        sbkit(["prepare", YAML, *options.split()])


def test_job_that_is_no_part_of_an_array_writes_all() -> None:
    variables = {"SGE_TASK_ID": "undefined", "LSB_JOBINDEX": "0", "PMI_RANK": "0", "PMI_SIZE": "1"}
    assert choose_share(None, variables) == (1, 1)


def test_out_needs_files_and_no_prepared_corpus(clips: list[Clip], tmp_path: Path) -> None:
    lost = [replace(clip, path=clip.path.with_name("gone.flac")) for clip in clips]
    with pytest.raises(SbkitError, match="None of 1 file can be read, such as .*gone.flac"):
        prepare_out(spec_of(lost, tmp_path / "lost"))
    prepare_out(spec_of(clips, tmp_path / "out"))
    options = [f"--data_folder=[{tmp_path / 'out'}]", "--out", str(tmp_path / "again")]
    with pytest.raises(SbkitError, match="out.* has written. Copy its folder"):
        sbkit(["prepare", YAML, *options])
    columns = {"columns": {"text": "speaker"}}
    with pytest.raises(SbkitError, match="`columns` names columns of tables, but the rows of"):
        prepare_transcripts({**settings(tmp_path / "out"), **columns})


def test_killed_process_loses_one_unit(
    clips: list[Clip], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "UNIT_CLIPS", 2)
    spec = spec_of(clips, tmp_path / "out")
    todo = plan(spec)
    slow = "import sbkit.data.work_units as u, time, sys, json\npublish = u.ShardWriter.publish\n"
    slow += "def wait(*words, **options):\n    publish(*words, **options)\n    time.sleep(0.3)\n"
    slow += "u.ShardWriter.publish = wait\nfor unit in json.loads(sys.argv[1]): u.write(unit)\n"
    process = Process(["-c", slow, json.dumps(todo)])
    while len(shards_of(spec)) < 4:
        time.sleep(0.01)
    process.kill()
    process.wait(timeout=60)
    before = shards_of(spec)
    missing = finish(spec)
    assert 0 < len(missing) < len(todo) - 1
    assert prepare_out(spec) == 0
    whole = {name: content for name, content in before.items() if name[:22] not in missing}
    assert whole and {**shards_of(spec), **whole} == shards_of(spec)
    assert sbkit(["prepare", "--verify", spec.out]) == 0


@pytest.mark.slow(60)
@pytest.mark.skipif(not find_spec("ray"), reason="no Ray here")
def test_ray_writes_the_units(clips: list[Clip], tmp_path: Path) -> None:
    spec = spec_of(clips, tmp_path / "out")
    code = f"""
import json, sys, ray
from sbkit.data.prepared import Spec, finish, plan, write
ray.init(num_cpus=2, include_dashboard=False)
spec = Spec.of({YAML!r}, {{"manifest": json.loads(sys.argv[1])}}, sys.argv[2])
ray.data.from_items(plan(spec)).map(write).materialize()
assert finish(spec) == []
"""
    process = run_fresh(code, json.dumps(spec.settings["manifest"]), spec.out)
    assert process.returncode == 0, process.stderr
    assert sbkit(["prepare", "--verify", spec.out]) == 0


# ---- damage


def first(folder: Path, pattern: str) -> Path:
    return min(folder.glob(pattern))


def spoil(file: Path) -> None:
    """Change every tenth byte of the second half, where there is audio."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 :: 10] = bytes(len(content[len(content) // 2 :: 10]))
    file.write_bytes(content)


def edit_index(folder: Path, **values: object) -> None:
    record = {**json.loads((folder / CORPUS_FILE).read_text()), **values}
    (folder / CORPUS_FILE).write_text(json.dumps({k: v for k, v in record.items() if v}))


def change_text(file: Path) -> None:
    content = file.read_bytes()
    assert b"Clip 7!" in content
    file.write_bytes(content.replace(b"Clip 7!", b"Clap 7!"))


def lead_out(folder: Path) -> None:
    """Name a shard outside of the corpus in the rows of train."""
    rows = pa.ipc.open_stream((folder / "train.arrow").read_bytes()).read_all().combine_chunks()
    audio = pa.Table.from_struct_array(rows["audio"])
    files = pa.array(["../planted.arrow"] * len(rows))
    audio = audio.set_column(audio.column_names.index("file"), "file", files).to_struct_array()
    rows = rows.set_column(rows.column_names.index("audio"), "audio", audio)
    with pa.ipc.new_stream(str(folder / "train.arrow"), rows.schema) as writer:
        writer.write_table(rows)
    splits = json.loads((folder / CORPUS_FILE).read_text())["splits"]
    splits["train"]["sha256"] = checksum(folder / "train.arrow")
    edit_index(folder, splits=splits)


def rename_split(folder: Path, name: str) -> None:
    splits = json.loads((folder / CORPUS_FILE).read_text())["splits"]
    splits[name] = splits["train"]
    edit_index(folder, splits=splits, roles={"train": [name], "valid": ["dev"], "test": ["test"]})


# What happens to a corpus, what a run says, and how many tables --verify lists
FAULTS: list[tuple[Callable[[Path], object], str, int]] = [
    (lambda f: first(f, "train-*.clips").unlink(), "clips is missing.*--verify", 1),
    (lambda f: cut(first(f, "train-*.clips")), r"clips has \d+ bytes instead.*--verify", 1),
    (lambda f: spoil(first(f, "train-*.clips")), "is damaged: .* clip at byte.*--verify", 1),
    (lambda f: first(f, "train-*.parquet").unlink(), "parquet is missing.*--out` writes", 0),
    (lambda f: (f / CORPUS_FILE).unlink(), "is half written: it has shards, but.*--finish", 0),
    (lambda f: cut(f / CORPUS_FILE), "corpus.json is damaged.*--finish", 0),
    (lambda f: edit_index(f, format=3), "has the format 3.*prepare the corpus again", 0),
    (lambda f: edit_index(f, shards=None), "is damaged .its shards is missing.*--finish", 0),
    (lambda f: edit_index(f, shards={"../a.arrow": 9}), "corpus.json must name files in its", 0),
    (lambda f: rename_split(f, "../../planted"), "must name .* but names '../../planted'", 0),
    (lead_out, "must name files in its own folder, but names '../planted.arrow'", 0),
    (lambda f: (f / "train.arrow").unlink(), "train.arrow is missing.*--finish", 0),
    (lambda f: cut(f / "train.arrow"), "train.arrow is missing or damaged.*--finish", 0),
    (
        lambda f: shutil.copy(f / "dev.arrow", f / "train.arrow"),
        "train.arrow .*not the one of corpus.json.*--finish",
        0,
    ),
    (lambda f: change_text(f / "train.arrow"), "train.arrow .*not the one of.*--finish", 0),
]


@pytest.mark.parametrize(("damage", "expected", "num_listed"), FAULTS)
def test_damaged_corpus_is_refused_by_name_and_not_repaired(
    damage: Callable[[Path], object],
    expected: str,
    num_listed: int,
    clips: list[Clip],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    prepare_out(spec_of(clips, out))
    damage(out)
    before = {file.name: file.read_bytes() for file in out.glob("*.*")}
    with pytest.raises(SbkitError, match=f"(?s){out}.*{expected}"):
        [*read_rows(train_of(out), range(24))]
    assert {file.name: file.read_bytes() for file in out.glob("*.*")} == before
    capsys.readouterr()
    assert sbkit(["prepare", "--verify", str(out)]) == (PARTLY_DONE if num_listed else 0)
    tables = [line for line in capsys.readouterr().out.split("\n") if line.endswith(".parquet")]
    assert len(tables) == num_listed
    for table in tables:
        Path(table).unlink()
    assert prepare_out(spec_of(clips, out)) == 0  # writes what is missing
    assert sbkit(["prepare", "--verify", str(out)]) == 0
    assert len([*read_rows(train_of(out), range(24))]) == 24


@pytest.mark.parametrize("damage", [cut, spoil])
def test_damaged_table_of_a_shard_is_refused_until_it_is_removed(
    clips: list[Clip], tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    """A unit is written again, even if its first shard alone is missing."""
    spec = spec_of(clips, tmp_path / "out")
    prepare_out(spec)
    file = first(tmp_path / "out", "train-*-000.parquet")
    damage(file)
    with pytest.raises(SbkitError, match=f"{file.name} is damaged .* Remove it, and"):
        prepare_out(spec)
    assert sbkit(["prepare", "--verify", spec.out]) == PARTLY_DONE
    file.unlink()
    assert finish(spec) == [file.name.removesuffix("-000.parquet")]
    assert prepare_out(spec) == 0
    assert len([*read_rows(train_of(spec.out), range(24))]) == 24


def test_other_sample_rate_than_that_of_the_corpus_is_refused(
    clips: list[Clip], tmp_path: Path
) -> None:
    prepare_out(spec_of(clips, tmp_path / "out"))
    with pytest.raises(ConfigError, match=r"is 8000, but the audio in .* has 16000 Hz"):
        prepare_transcripts(settings(tmp_path / "out", sample_rate=8_000))


def test_shortest_length_above_the_longest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`min_seconds` must be at most `max_seconds`, but is 5"):
        prepare_transcripts(settings(tmp_path, min_seconds=5, max_seconds=1))


def test_mix_of_a_validation_set_is_refused_before_audio_is_read(
    tmp_path: Path, opened: list[str]
) -> None:
    make_corpus(tmp_path)
    with pytest.raises(ConfigError, match="`mix` names 'dev', but the training sources are train"):
        prepare_transcripts(settings(tmp_path / "cv", mix={"dev": 0.5}))
    assert opened == []


# ---- stores and disks


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


BUSY = OSError("Please reduce your rate")


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        *((method, BUSY) for method in ("put_file", "pipe_file", "cat_file", "get_file", "find")),
        *(("cat_file", fault) for fault in (OSError(errno.ESTALE, "Stale"), FSTimeoutError())),
        *(("cat_file", fault) for fault in (PermissionError("s3"), Exception())),
    ],
)
def test_store_that_is_away_is_no_fault_of_its_files(
    method: str, fault: Exception, clips: list[Clip], location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryFileSystem, method, Mock(side_effect=fault))
    with pytest.raises(SbkitError, match=f"cannot be reached: {type(fault).__name__}") as caught:
        prepare_out(spec_of(clips, location))
        sbkit(["prepare", YAML, f"--data_folder={location}"])
    assert "damaged" not in str(caught.value)
    is_temporary = not isinstance(fault, PermissionError)
    assert isinstance(caught.value, StoreError) == is_temporary
    assert ("Rerun the same command once the store answers" in str(caught.value)) == is_temporary


def test_disks_that_cannot_be_written_to_are_named(
    clips: list[Clip], tmp_path: Path, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "small"))
    for out, expected in (
        (tmp_path / "out", "out is full.* TMPDIR"),
        (location, "small/.* is full.* TMPDIR"),
        (clips[0].path / "out", "out .* set SBKIT_CACHE for prepared data"),
    ):
        unit, *_ = plan(spec_of(clips, out))
        with largest_file(200), pytest.raises(SbkitError, match=expected):
            write_unit(unit)
