"""Measure the start of a run by its rows, and extrapolate it to a hundred thousand hours.

python -m tools.bench_data --rows 250000 500000 1000000

Writes releases with Common Voice's columns, whose clips are a few hundred files of noise. A small
model with lazy audio then starts in new processes, up to its first step. A line through the sizes
gives the figures of 72 million rows. `--folder` keeps the releases for the next call.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import soundfile
from pyarrow import csv

from recipes.debian.release import ReleaseRow
from sbkit.audio.io import declared_seconds
from sbkit.base.errors import SbkitError, StopRequestedError
from sbkit.base.process import run_main
from sbkit.base.threads_and_memory import keep_freed_memory
from sbkit.checkpoint.run_config import CHECKPOINTS
from sbkit.config.overrides import parse_command
from sbkit.distributed.ranks import gather_over_ranks, rank
from sbkit.logs.handlers import log_to_screen
from sbkit.run.run import Run
from sbkit.train.brain import Brain
from tools.bench import Figures, Sides, measure_once

SAMPLE_RATE = 16_000
ALL_ROWS = 72_000_000  # a hundred thousand hours, of clips of 5 s
ROWS_PER_BLOCK = 100_000  # made and written at a time
MIN_CLIPS = 256  # clips of noise, each for many rows
MAX_LINKS = 50_000  # links to a clip; ext4 allows 65,000
NUM_EVALUATED = 1000  # rows of dev, and as many of test
MEAN_SECONDS = 4.5
WORDS_PER_SENTENCE = 8
VOCABULARY_WORDS = 50_000
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
LARGEST_FIGURES = {"wall s", "peak"}  # the largest of all ranks is shown, for others the sum
START = ("tools.bench_data", "--begin")  # the module and option of a process that `launch` starts
SMALL_MODEL = (
    *("--device=cpu", "--audio_store=lazy", "--word_lm_order=0", "--token_lm_order=0"),
    *("--token_type=bpe", "--vocab_size=500", "--batch_seconds=400", "--check=False"),
    *("--num_encoder_layers=1", "--d_model=64", "--nhead=4", "--d_ffn=64", "--cnn_channels=8"),
)


def main() -> None:
    """Print a row for each start: the seconds and the memory of all ranks and their workers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[250_000, 500_000, 1_000_000])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--begin", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.begin:
        start_run(*options.begin)
        return
    figures_of: dict[int, Mapping[str, Figures]] = {}
    for rows in options.rows:
        with TemporaryDirectory() as folder:
            data = (options.folder or Path(folder)) / f"{rows}-rows"
            if not data.exists():
                write_release(data, rows)
            print(f"\n{rows:,} rows\n")
            figures_of[rows] = measure_starts(Path(folder), data, options.ranks)
    if len(figures_of) > 1:
        print(f"\nper million rows, and {ALL_ROWS:,} rows by a line through those above\n")
        starts = figures_of[options.rows[0]]
        measure_once({start: partial(extrapolate, figures_of, start) for start in starts})


def measure_starts(folder: Path, data: Path, ranks: int) -> Mapping[str, Figures]:
    """Start a run in each way, and return the figures of each start."""
    run = folder / "run"
    arguments = (f"--data_folder={data}", f"--output_folder={run}", *SMALL_MODEL)

    def start(*settings: str, anew: bool = False, ranks: int = 1) -> Figures:
        if anew:
            shutil.rmtree(run / CHECKPOINTS, ignore_errors=True)  # from the previous start
        by_rank = launch(folder, [*arguments, *settings], ranks)
        return {
            name: (max if name in LARGEST_FIGURES else sum)(figures[name] for figures in by_rank)
            for name in by_rank[0]
        }

    starts: Sides = {
        "first": partial(start, "--check=False", anew=True),
        "later": partial(start, "--check=False", anew=True),
        "later, with the check": partial(start, "--check=True", anew=True),
        "resumed in the middle of an epoch": start,
        f"resumed by {ranks} ranks with workers": partial(start, "--num_workers=2", ranks=ranks),
    }
    return measure_once(starts)


def extrapolate(figures_of: Mapping[int, Mapping[str, Figures]], start: str) -> Figures:
    """Return the slope of each figure by millions of rows, and its value for `ALL_ROWS`."""
    lines = {
        name: np.polyfit([*figures_of], [starts[start][name] for starts in figures_of.values()], 1)
        for name in ("CPU s", "private", "peak")
    }
    slopes = {f"{name} per million": 1e6 * float(line[0]) for name, line in lines.items()}
    return slopes | {name: float(np.polyval(line, ALL_ROWS)) for name, line in lines.items()}


def launch(folder: Path, arguments: Sequence[str], ranks: int) -> list[dict[str, float]]:
    """Call `start_run` in new processes, and return the figures of each."""
    file = folder / "figures.json"
    torchrun = ("torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m")
    process = subprocess.run(
        [sys.executable, "-m", *torchrun * (ranks > 1), *START, str(file), *arguments],
        env={"OMP_NUM_THREADS": "1", **os.environ, "SBKIT_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
    )
    if process.returncode != 0:
        raise SbkitError(f"{process.stdout}{process.stderr}\nThe start failed; see above.")
    return list(json.loads(file.read_text()))


def start_run(file: str, *arguments: str) -> None:
    """Start training; at the first step, write each rank's figures, and stop as in mid-epoch."""
    keep_freed_memory()
    run = Run(*parse_command(["hparams/ctc.yaml", *arguments]))
    fit_batch = Brain.fit_batch

    def measure_and_stop(brain: Brain, batch: object) -> object:
        if brain.run_folder != run.folder or brain.loaders is None:  # a step of the check
            return fit_batch(brain, batch)
        gather_over_ranks(None)  # waits until all have their first batch
        by_rank = gather_over_ranks(measure_processes())
        if rank() == 0:
            Path(file).write_text(json.dumps(by_rank))
        brain.optimizer_step = brain.step = len(brain.loaders.train) // 2
        brain.stopping.save()
        return brain.stopping.leave(brain.optimizer_step)

    stopping = patch.object(Brain, "fit_batch", measure_and_stop)
    with stopping, log_to_screen(), suppress(StopRequestedError):
        run.train()


def measure_processes() -> dict[str, float]:
    """Measure this process and its workers, in seconds and GB."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    wall_seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - started / TICKS_PER_SECOND
    figures = {"CPU s": 0.0, "wall s": wall_seconds}
    figures |= {"RSS (GB)": 0.0, "private": 0.0, "PSS": 0.0, "peak": 0.0}
    for process in (os.getpid(), *(worker.pid for worker in active_children())):
        folder = Path(f"/proc/{process}")
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        text = "".join((folder / name).read_text() for name in ("smaps_rollup", "status"))
        gigabytes = {
            name: int(size) * 1024 / 1e9 for name, size in re.findall(r"(\w+):\s+(\d+) kB", text)
        }
        figures["CPU s"] += sum(map(int, fields[11:15])) / TICKS_PER_SECOND  # with ended children
        figures["RSS (GB)"] += gigabytes["Rss"]
        figures["private"] += gigabytes["Private_Clean"] + gigabytes["Private_Dirty"]
        figures["PSS"] += gigabytes["Pss"]
        figures["peak"] = max(figures["peak"], gigabytes["VmHWM"])
    return figures


def write_release(folder: Path, rows: int) -> None:
    """Write a Common Voice release whose clips are links to a few files of noise."""
    (folder / "clips").mkdir(parents=True)
    random = np.random.default_rng(0)
    count = max(MIN_CLIPS, -(-rows // MAX_LINKS))
    seconds = np.clip(random.lognormal(np.log(MEAN_SECONDS) - 0.045, 0.3, count), 2.5, 15.0)
    longest = random.normal(0, 1000, int(15.0 * SAMPLE_RATE)).astype(np.int16)
    sources = [folder / f"noise-{number}.mp3" for number in range(count)]
    for source, length in zip(sources, seconds, strict=True):
        soundfile.write(source, longest[: int(length * SAMPLE_RATE)], SAMPLE_RATE, format="MP3")
    milliseconds = np.array([round(1000 * declared_seconds(source)) for source in sources])
    empty = asdict(ReleaseRow(client_id="", path="", sentence="", locale="en"))
    for split, numbers, columns in _make_columns(rows):
        constants = {name: pa.repeat(value, len(numbers)) for name, value in empty.items()}
        _append(folder / f"{split}.tsv", constants | columns)
        source_of = numbers % len(sources)
        durations = {"clip": columns["path"], "duration[ms]": milliseconds[source_of]}
        _append(folder / "clip_durations.tsv", durations)
        for path, source in zip(columns["path"], source_of.tolist(), strict=True):
            (folder / "clips" / path).hardlink_to(sources[source])


def _make_columns(rows: int) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield blocks of rows: the name of the split, the numbers of the rows, and text columns."""
    random = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlu"))
    lengths = random.integers(2, 9, VOCABULARY_WORDS)
    words = np.array(["".join(random.choice(letters, length)) for length in lengths])
    first = 0
    for split, size in (("train", rows), ("dev", NUM_EVALUATED), ("test", NUM_EVALUATED)):
        for start in range(first, first + size, ROWS_PER_BLOCK):
            numbers = np.arange(start, min(start + ROWS_PER_BLOCK, first + size))
            sentences = random.choice(words, (len(numbers), WORDS_PER_SENTENCE)).tolist()
            speakers = (f"{split} {number // 50}".encode() for number in numbers)
            columns = {
                "client_id": [hashlib.sha512(speaker).hexdigest() for speaker in speakers],
                "path": [f"common_voice_en_{number:08d}.mp3" for number in numbers],
                "sentence_id": [hashlib.sha256(b"%d" % n).hexdigest() for n in numbers],
                "sentence": [f"{' '.join(sentence).capitalize()}." for sentence in sentences],
            }
            yield split, numbers, columns
        first += size


def _append(file: Path, columns: Mapping[str, Any]) -> None:
    with file.open("ab") as stream:
        if stream.tell() == 0:
            stream.write(("\t".join(columns) + "\n").encode())
        options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
        csv.write_csv(pa.table(dict(columns)), stream, options)


if __name__ == "__main__":
    run_main(main)
