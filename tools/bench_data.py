"""Measure the start of a run on many hours of data, and the speed of the loader.

python -m tools.bench_data start --rows 1000000       (beside lhotse, `datasets` and SpeechBrain)
python -m tools.bench_data start --rows 8000000 --shards   (sbkit on shards of 10,000 hours)
python -m tools.bench_data loader --workers 1         (the default corpus, local, pcm and flac)
python -m tools.bench_data loader --url s3://bucket   (its shards on an S3 server)

`start` writes a release with Common Voice's columns, or shards, whose clips are a few hundred files
of noise. Each side then starts in new processes, up to its first batch: sbkit with lazy audio and a
small model, the others up to the paths of the clips. Their tables are written before, because their
users have them. `--folder` keeps the release for the next call; `--ranks 1` leaves out the start
under torchrun.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import soundfile
from datasets import Dataset
from pyarrow import csv

from recipes.debian.release import ReleaseRow
from recipes.prepare import collate_clips, prepare_transcripts
from sbkit.audio.io import declared_seconds, encode_audio
from sbkit.base.errors import SbkitError
from sbkit.base.process import run_main
from sbkit.checkpoint.run_config import CHECKPOINTS
from sbkit.commands.cli import run as sbkit
from sbkit.config.hparams import read_knobs
from sbkit.data.batch import make_loader
from sbkit.data.manifest import MIX_FAULT
from sbkit.data.sampler import TrainSampler
from sbkit.data.shard import AUDIO, FACTS_KEY, WAV_HEADER_BYTES, ShardFacts
from sbkit.data.sharded_corpus import INDEX_FILE, INDEX_FORMAT, Index
from sbkit.data.splits import sample_counts
from tools.bench import Figures, measure_once
from tools.bench_sides import convert

SAMPLE_RATE = 16_000
ROWS_PER_SHARD = 7_000  # 1 GB of pcm
MAX_LINKS = 50_000  # to a file; ext4 allows 65,000
MEAN_SECONDS = 4.5
WORDS_PER_SENTENCE = 8
VOCABULARY_WORDS = 50_000
LARGEST = {"wall s", "peak"}  # of these the largest of all ranks is shown, of others the sum
SMALL = (
    *("--device=cpu", "--audio_store=lazy", "--word_lm_order=0", "--token_lm_order=0"),
    *("--token_type=bpe", "--vocab_size=500", "--batch_seconds=400", "--check=False"),
    *("--num_encoder_layers=1", "--d_model=64", "--nhead=4", "--d_ffn=64", "--cnn_channels=8"),
)
TARGET_RTFX = 8 * 10_000  # of eight GPUs


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    loader = commands.add_parser("loader")
    loader.add_argument("--workers", type=int, default=1)
    loader.add_argument("--seconds", type=float, default=10.0)
    loader.add_argument("--url")
    start = commands.add_parser("start")
    start.add_argument("--rows", type=int, default=1_000_000)
    start.add_argument("--ranks", type=int, default=4)
    start.add_argument("--shards", action="store_true")
    start.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        if options.command == "start":
            measure_start(Path(folder), options)
        else:
            measure_loader(Path(folder), options)


def measure_start(folder: Path, options: argparse.Namespace) -> None:
    """Print a row for each start: its seconds, and memory with that of workers and all ranks."""
    data = options.folder or folder / "data"
    if not data.exists():
        (write_shards if options.shards else write_release)(data, options.rows)
    run = folder / "run"
    sbkit_side = ("sbkit", f"--data_folder={data}", f"--output_folder={run}", *SMALL)

    def start(*words: object, ranks: int = 1) -> Figures:
        of_ranks = launch(folder, [*map(str, words)], ranks)
        return {
            name: (max if name in LARGEST else sum)(figures[name] for figures in of_ranks)
            for name in of_ranks[0]
        }

    def start_again(check: bool) -> Figures:
        shutil.rmtree(run / CHECKPOINTS, ignore_errors=True)  # of the start before
        return start(*sbkit_side, f"--check={check}")

    sides: dict[str, Callable[[], Figures]] = {
        "sbkit, first": partial(start_again, check=False),
        "sbkit, later": partial(start_again, check=False),
        "sbkit, later, with the check": partial(start_again, check=True),
        "sbkit, resumed in the middle of an epoch": partial(start, *sbkit_side),
    }
    if options.ranks > 1:
        name = f"sbkit, resumed by {options.ranks} ranks with 2 workers each, all together"
        sides[name] = partial(start, *sbkit_side, "--num_workers=2", ranks=options.ranks)
    if not options.shards:
        tables = write_tables(data, folder)
        sides |= {side: partial(start, side, tables[side]) for side in tables if find_spec(side)}
    print(f"{options.rows:,} rows\n")
    measure_once(sides)


def launch(folder: Path, words: Sequence[str], ranks: int) -> list[dict[str, float]]:
    """Run `tools.bench_start` in new processes, and return the figures of each."""
    file = folder / "figures.json"
    torchrun = ("torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m")
    process = subprocess.run(
        [sys.executable, "-m", *torchrun * (ranks > 1), "tools.bench_start", str(file), *words],
        env={"OMP_NUM_THREADS": "1", **os.environ, "SBKIT_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
    )
    if process.returncode != 0:
        raise SbkitError(f"{process.stdout}{process.stderr}\n{words[0]} failed; see above.")
    of_ranks: list[dict[str, float]] = json.loads(file.read_text())
    return of_ranks


def write_release(folder: Path, rows: int) -> None:
    """Write a Common Voice release whose clips are links to a few files of noise."""
    for name in ("noise", "clips"):
        (folder / name).mkdir(parents=True)
    sources = []
    for number, clip in enumerate(_make_noise(rows)):
        sources.append(folder / "noise" / f"{number}.mp3")
        soundfile.write(sources[-1], clip, SAMPLE_RATE, format="MP3")
    milliseconds = np.array([round(1000 * declared_seconds(source)) for source in sources])
    empty = asdict(ReleaseRow(client_id="", path="", sentence="", locale="en"))
    for split, numbers, columns in _make_columns(rows, block_rows=100_000):
        constants = {name: pa.repeat(value, len(numbers)) for name, value in empty.items()}
        _append(folder / f"{split}.tsv", constants | columns)
        source_of = numbers % len(sources)
        durations = {"clip": columns["path"], "duration[ms]": milliseconds[source_of]}
        _append(folder / "clip_durations.tsv", durations)
        for path, source in zip(columns["path"], source_of.tolist(), strict=True):
            (folder / "clips" / path).hardlink_to(sources[source])


def write_shards(folder: Path, rows: int) -> None:
    """Write a corpus of shards; the clips of a split are the start of the same noise."""
    noise = _make_noise(rows)
    sizes = np.array([WAV_HEADER_BYTES + clip.nbytes for clip in noise])
    names: dict[str, list[str]] = {"train": [], "dev": [], "test": []}
    folder.mkdir(parents=True)
    for split, numbers, columns in _make_columns(rows, block_rows=ROWS_PER_SHARD):
        if not names[split]:
            longest = np.roll(max(noise, key=len), numbers[0])  # no clip is in two splits
            wav = encode_audio(longest, SAMPLE_RATE, "WAV")
            crcs = np.array([zlib.crc32(wav[:size]) for size in sizes.tolist()])
        names[split].append(f"{split}-{len(names[split]):05d}")
        clip_of = numbers % len(noise)
        audio = pa.StructArray.from_arrays(
            [np.zeros_like(numbers), sizes[clip_of], crcs[clip_of], columns["sentence_id"]],
            ["start", "size", "crc32", "digest"],
        )
        texts = {"sentence": columns["sentence"], "speaker": columns["client_id"]}
        samples = {"samples": np.array([len(clip) for clip in noise])[clip_of]}
        no_faults = {MIX_FAULT: pa.repeat("", len(numbers))}
        table = pa.table({"id": columns["path"], AUDIO: audio, **samples, **texts, **no_faults})
        facts = json.dumps(asdict(ShardFacts(bytes=len(wav), left_out=())))
        file = folder / f"{names[split][-1]}.parquet"
        pq.write_table(table.replace_schema_metadata({FACTS_KEY: facts}), file)
        file.with_suffix(".arrow").write_bytes(wav)
    roles = {"train": ["train"], "valid": ["dev"], "test": ["test"]}
    index = Index(sample_rate=SAMPLE_RATE, roles=roles, splits=names, corpus={})
    (folder / INDEX_FILE).write_text(json.dumps({"format": INDEX_FORMAT, **asdict(index)}))


def _make_noise(rows: int) -> list[Any]:
    """Make the audio of a few hundred clips, as many rows have the same: (S,) int16."""
    random = np.random.default_rng(0)
    count = max(256, -(-rows // MAX_LINKS))
    seconds = np.clip(random.lognormal(np.log(MEAN_SECONDS) - 0.045, 0.3, count), 2.5, 15.0)
    longest = random.normal(0, 1000, int(15.0 * SAMPLE_RATE)).astype(np.int16)
    return [longest[: int(length * SAMPLE_RATE)] for length in seconds]


def _make_columns(rows: int, *, block_rows: int) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield blocks of each split: its name, the numbers of its rows, and columns of texts."""
    random = np.random.default_rng(0)
    words = _make_words(random)
    first = 0
    for split, size in (("train", rows), ("dev", 1000), ("test", 1000)):
        for start in range(first, first + size, block_rows):
            numbers = np.arange(start, min(start + block_rows, first + size))
            sentences = random.choice(words, (len(numbers), WORDS_PER_SENTENCE)).tolist()
            speakers = (f"{split} {number // 50}".encode() for number in numbers)
            yield (
                split,
                numbers,
                {
                    "client_id": [hashlib.sha512(speaker).hexdigest() for speaker in speakers],
                    "path": [f"common_voice_en_{number:08d}.mp3" for number in numbers],
                    "sentence_id": [hashlib.sha256(b"%d" % n).hexdigest() for n in numbers],
                    "sentence": [f"{' '.join(sentence).capitalize()}." for sentence in sentences],
                },
            )
        first += size


def _make_words(random: np.random.Generator) -> Any:
    letters = np.array(list("etaoinshrdlu"))
    lengths = random.integers(2, 9, VOCABULARY_WORDS)
    return np.array(["".join(random.choice(letters, length)) for length in lengths])


def _append(file: Path, columns: Mapping[str, Any]) -> None:
    with file.open("ab") as stream:
        if stream.tell() == 0:
            stream.write(("\t".join(columns) + "\n").encode())
        options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
        csv.write_csv(pa.table(dict(columns)), stream, options)


def write_tables(release: Path, folder: Path) -> dict[str, Path]:
    """Write the training rows as the users of other toolkits have them, by package."""
    tabs = csv.ParseOptions(delimiter="\t", quote_char=False)
    train, durations = (
        csv.read_csv(release / f"{name}.tsv", parse_options=tabs)
        for name in ("train", "clip_durations")
    )
    ids, speakers, texts = (train[name] for name in ("path", "client_id", "sentence"))
    seconds = pc.divide(durations["duration[ms]"][: len(ids)].cast("float64"), 1000.0)
    paths = pc.binary_join_element_wise(str(release / "clips"), ids, "/")
    rows = pa.table(
        {"ID": ids, "duration": seconds, "wav": paths, "spk_id": speakers, "wrd": texts}
    )
    files = {name: folder / name for name in ("lhotse", "datasets", "speechbrain")}
    files["lhotse"] = folder / "cuts.jsonl"
    with files["lhotse"].open("w") as lines:
        for batch in rows.to_batches():
            lines.writelines(f"{json.dumps(_to_cut(row))}\n" for row in batch.to_pylist())
    Dataset(rows).save_to_disk(files["datasets"])
    csv.write_csv(rows, files["speechbrain"])
    return files


def _to_cut(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as lhotse writes a cut."""
    span = {"id": row["ID"], "start": 0.0, "duration": row["duration"], "channel": 0}
    texts = {"recording_id": row["ID"], "text": row["wrd"], "speaker": row["spk_id"]}
    recording = {
        "id": row["ID"],
        "sources": [{"type": "file", "channels": [0], "source": row["wav"]}],
        "sampling_rate": SAMPLE_RATE,
        "num_samples": round(row["duration"] * SAMPLE_RATE),
        "duration": row["duration"],
        "channel_ids": [0],
    }
    return {**span, "supervisions": [span | texts], "recording": recording, "type": "MonoCut"}


def measure_loader(folder: Path, options: argparse.Namespace) -> None:
    """Print a row for each store: the speed of a worker is in seconds of audio per second."""
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

    def measure(overrides: Mapping[str, object]) -> Figures:
        rate = loader_rate(overrides, workers=options.workers, seconds=options.seconds)
        workers = TARGET_RTFX / rate * options.workers
        return {"speed of a worker": rate / options.workers, "workers for eight GPUs": workers}

    measure_once({name: partial(measure, overrides) for name, overrides in sources.items()})


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
    run_main(main)
