"""Measure the start of a run on many hours of data, and the speed of the loader.

python -m tools.bench_data index --rows 8000000       (shards of 10,000 hours, without audio)
python -m tools.bench_data loader --workers 1         (the default corpus, local, pcm and flac)
python -m tools.bench_data loader --url s3://bucket   (its shards on an S3 server)
python -m tools.bench_data results --utterances 100000   (of a test, without audio)

`index` writes the tables of shards, and prepares a run up to its first batch in three new
processes: the first start, which trains the tokenizer; a later start; and one that resumes in the
middle of an epoch. It reads no audio. `results` makes utterances with about 10 % wrong words, and
prints what it takes to report them.
"""

import argparse
import json
import pickle
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset

from recipes.prepare import collate_clips, prepare_transcripts
from sbkit.commands.cli import run as sbkit
from sbkit.config.hparams import read_knobs
from sbkit.data.batch import make_loader
from sbkit.data.sampler import TrainSampler
from sbkit.data.shard import FACTS_KEY, ShardFacts
from sbkit.data.sharded_corpus import INDEX_FILE, INDEX_FORMAT, Index
from sbkit.data.splits import sample_counts
from sbkit.evaluate.slices import measure_slices, write_slices
from sbkit.evaluate.wer import ScoredUtterance
from sbkit.evaluate.wer_report import slice_figures
from sbkit.logs.handlers import log_to_screen
from sbkit.runtime.test_report import ScoredSet, TestReport
from sbkit.tasks.speech_recognition import SPEECH_RECOGNITION
from sbkit.text.word import Word
from sbkit.train.setup import RunSetup
from tools.bench_sides import convert

SAMPLE_RATE = 16_000
ROWS_PER_SHARD = 7_000  # 1 GB of pcm
MEAN_SECONDS = 4.5
WORDS_PER_SENTENCE = 8
VOCABULARY_WORDS = 50_000
SPEAKERS = 3_000  # of a test
TARGET_RTFX = 8 * 10_000  # of eight GPUs; the last column is the number of workers for them


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    index = commands.add_parser("index")
    index.add_argument("--rows", type=int, default=8_000_000)
    loader = commands.add_parser("loader")
    loader.add_argument("--workers", type=int, default=1)
    loader.add_argument("--seconds", type=float, default=10.0)
    loader.add_argument("--url")
    results = commands.add_parser("results")
    results.add_argument("--utterances", type=int, default=100_000)
    start = commands.add_parser("start")
    start.add_argument("folder", type=Path)
    start.add_argument("--share", type=float, default=0.0)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        if options.command == "index":
            measure_index(Path(folder), options.rows)
        elif options.command == "loader":
            measure_loader(Path(folder), options)
        elif options.command == "results":
            measure_results(Path(folder), options.utterances)
        else:
            start_run(options.folder, options.share)


def measure_index(folder: Path, rows: int) -> None:
    """Print the seconds of each step of three starts, and the memory of each process."""
    write_index(folder / "shards", rows)
    size = sum(file.stat().st_size for file in (folder / "shards").iterdir())
    print(f"{rows:,} rows in {-(-rows // ROWS_PER_SHARD):,} tables of {size / 1e9:.2f} GB")
    for name, share in (("first", 0.0), ("later", 0.0), ("resumed", 0.5)):
        command = [sys.executable, "-m", "tools.bench_data", "start", folder, "--share", share]
        subprocess.run([str(word) for word in command], check=True)
        print(f"({name} start)", flush=True)


def write_index(folder: Path, rows: int) -> None:
    """Write the index and the tables of shards, with lengths and transcripts but without audio."""
    random = np.random.default_rng(0)
    words = _make_words(random)
    counts = {"train": rows, "dev": 1000, "test": 1000}
    names = {
        split: [f"{split}-{number:05d}" for number in range(-(-count // ROWS_PER_SHARD))]
        for split, count in counts.items()
    }
    folder.mkdir()
    for split, num_rows in counts.items():
        for number, name in enumerate(names[split]):
            size = min(ROWS_PER_SHARD, num_rows - number * ROWS_PER_SHARD)
            table = _make_table(random, words, size=size, first=number * ROWS_PER_SHARD)
            facts = json.dumps(asdict(ShardFacts(bytes=0, left_out=())))
            pq.write_table(
                table.replace_schema_metadata({FACTS_KEY: facts}), folder / f"{name}.parquet"
            )
            (folder / f"{name}.arrow").touch()
    roles = {"train": ["train"], "valid": ["dev"], "test": ["test"]}
    index = Index(sample_rate=SAMPLE_RATE, roles=roles, splits=names, corpus={})
    (folder / INDEX_FILE).write_text(json.dumps({"format": INDEX_FORMAT, **asdict(index)}))


def _make_words(random: np.random.Generator) -> Any:
    letters = np.array(list("etaoinshrdlu"))
    lengths = random.integers(2, 9, VOCABULARY_WORDS)
    return np.array(["".join(random.choice(letters, length)) for length in lengths])


def _make_table(random: np.random.Generator, words: Any, *, size: int, first: int) -> pa.Table:
    seconds = np.clip(random.lognormal(np.log(MEAN_SECONDS) - 0.125, 0.5, size), 1.0, 20.0)
    samples = (seconds * SAMPLE_RATE).astype(np.int64)
    sentences = [" ".join(row) for row in random.choice(words, (size, WORDS_PER_SENTENCE))]
    numbers = np.arange(first, first + size)
    audio = pa.StructArray.from_arrays(
        [np.cumsum(samples) * 2, samples * 2, numbers, [f"{number:032x}" for number in numbers]],
        ["start", "size", "crc32", "digest"],
    )
    ids = [f"common_voice_xx_{number:08d}" for number in numbers]
    speakers = [f"speaker-{number % 20_000}" for number in numbers]
    return pa.table(
        {"samples": samples, "audio": audio, "id": ids, "sentence": sentences, "speaker": speakers}
    )


def start_run(folder: Path, share: float) -> None:
    """Time a run up to its first batch; share: of the epoch that it has behind it."""
    overrides = {
        "data_folder": str(folder / "shards"),
        "output_folder": str(folder / "run"),
        "word_lm_order": 0,
        "token_lm_order": 0,
    }
    setup = RunSetup(Path("hparams/ctc_large.yaml"), overrides)
    preparations: dict[str, Callable[[], object]] = {
        "splits": setup.prepare_splits,
        "tokenizer": setup.prepare_labels,
        "model": setup.build_hparams,
        "loaders": setup.make_loaders,
        "first batch": lambda: next(_planned_batches(setup, share)),
    }
    seconds = {}
    with log_to_screen():
        for name, prepare in preparations.items():
            start = time.perf_counter()
            prepare()
            seconds[name] = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e9
    seconds["total"] = sum(seconds.values())
    print(", ".join(f"{name} {value:.1f} s" for name, value in seconds.items()))
    print(f"memory: {resident:.2f} GB, at most {peak:.2f} GB")


def _planned_batches(setup: RunSetup, share: float) -> Iterator[Any]:
    sampler = setup.make_loaders().train.batch_sampler
    assert isinstance(sampler, TrainSampler)
    sampler.set_epoch(1, start=int(len(sampler) * share))
    return iter(sampler)


def measure_results(folder: Path, count: int) -> None:
    """Print the CPU seconds and the peak memory of each part of a test's report."""
    results = _make_results(count)
    speakers = [utterance.speaker for utterance in results]
    ids = [utterance.id for utterance in results]
    rows = Dataset.from_dict({"id": ids, "samples": [0] * count, "speaker": speakers})
    scored = ScoredSet(name="test", rows=rows, results=results)
    no_mp3 = 1  # Hz: no clip is read
    report = TestReport(folder, SPEECH_RECOGNITION, sample_rate=no_mp3, quiet=True)
    columns = [(speaker,) for speaker in speakers]
    parts: dict[str, Callable[[], object]] = {
        "results": lambda: report.add(scored),
        "slices by speaker": lambda: write_slices(
            folder / "slices.tsv", measure_slices(["speaker"], columns, results, slice_figures)
        ),
        "report": lambda: report.write(known_words=None, notes=(), device="cpu"),
        "described": lambda: report.describe(scored),
    }
    size = len(pickle.dumps(results))
    print(f"{count:,} utterances, which a rank sends as {size / 1e6:.0f} MB\n")
    print("| | CPU s | peak GB |\n|---|---|---|")
    for name, measure in parts.items():
        Path("/proc/self/clear_refs").write_text("5")  # begin a new peak
        start = time.process_time()
        measure()
        seconds = time.process_time() - start
        (peak,) = re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
        print(f"| {name} | {seconds:.1f} | {int(peak) * 1024 / 1e9:.2f} |", flush=True)


def _make_results(count: int) -> list[ScoredUtterance]:
    random = np.random.default_rng(0)
    vocabulary = _make_words(random)
    shape = (count, WORDS_PER_SENTENCE)
    references = random.choice(vocabulary, shape)
    hypotheses = np.where(random.random(shape) < 0.1, random.choice(vocabulary, shape), references)
    confidences = random.beta(6, 1, shape).tolist()
    results: list[ScoredUtterance] = []
    for number, (reference, hypothesis) in enumerate(zip(references, hypotheses, strict=True)):
        timed = enumerate(zip(hypothesis.tolist(), confidences[number], strict=True))
        words = tuple(Word(text, 0.5 * n, 0.5 * n + 0.4, sure) for n, (text, sure) in timed)
        texts = (" ".join(reference), " ".join(hypothesis))
        id, speaker = f"common_voice_xx_{number:08d}", f"speaker-{number % SPEAKERS}"
        utterance = ScoredUtterance(id, *texts, speaker=speaker, seconds=4.0, words=words)
        results.append(utterance)
    return results


def measure_loader(folder: Path, options: argparse.Namespace) -> None:
    """Print a row for each store: seconds of audio per second and worker, and workers needed."""
    release = str(convert(folder / "release"))
    sources = {}
    for store in ("pcm", "flac"):
        if options.url is None:
            sources[store] = {"data_folder": release, "audio_store": store}
        else:
            url = f"{options.url}/{store}"
            yaml = ("hparams/ctc.yaml", f"--data_folder={release}", f"--audio_store={store}")
            sbkit(["prepare", *yaml, "--shards", url])
            sources[f"{store}, {url}"] = {"data_folder": url}
    for name, overrides in sources.items():
        rate = loader_rate(overrides, workers=options.workers, seconds=options.seconds)
        workers = TARGET_RTFX / rate * options.workers
        print(f"| {name} | {rate / options.workers:,.0f} | {workers:.0f} |", flush=True)


def loader_rate(overrides: Mapping[str, object], *, workers: int, seconds: float) -> float:
    """Load batches for some seconds; return seconds of audio per second."""
    knobs = read_knobs(Path("hparams/ctc.yaml"), overrides)
    train = prepare_transcripts(knobs).train
    sampler = TrainSampler(samples=sample_counts(train), batch_seconds=60, seed=0)
    collate = partial(collate_clips, sample_rate=SAMPLE_RATE)
    loader = make_loader(
        train, sampler=sampler, collate=collate, num_workers=workers, pin_memory=False
    )
    audio_seconds = 0.0
    start = time.perf_counter()
    for epoch in count(1):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if epoch == 1 and number == 2 * workers:  # the workers have started
                audio_seconds = 0.0
                start = time.perf_counter()
            audio_seconds += float(batch.seconds)
            if time.perf_counter() - start > seconds:
                return audio_seconds / (time.perf_counter() - start)
    raise AssertionError("an endless loop ended")


if __name__ == "__main__":
    main()
