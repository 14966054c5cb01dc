"""Measure the training speed of a GPU in one call of ten minutes.

python -m tools.bench_gpu [--data_folder=RELEASE] [--seconds 8]

Runs the tests that need a GPU, ctc_large in bfloat16 beside SpeechBrain's recipe, and a Conformer
CTC of 30 million parameters. Without a release, the clips are noise, which trains as fast as
speech. A part that fails is reported, and the others run. The tables come last.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile

BENCH = (sys.executable, "-m", "tools.bench_train", "--rounds=2")
CLIP_COUNTS = {"train": 1500, "dev": 20, "test": 20}
RATE = 16_000
GPU_TESTS = ("tests/test_gpu.py", "tests/checkpoint/test_rng.py")
COPIES = 8  # of a training clip; one is too few for SpeechBrain's buckets, and for long epochs
NUM_WORKERS = 8  # processes that read ahead
CLIP_SECONDS = (1.5, 10.5)  # as in Common Voice; drawn from a gamma distribution of mean 5
SYLLABLES = [*map("".join, product("bdfghklmnprstvwz", "aeiou"))]
NUM_WORDS = 8000  # enough for a unigram tokenizer with the 5120 tokens of ctc_large
NUM_LAST_LINES = 24  # of the output of a part
CONFORMER = (  # 30 million parameters
    *("--d_model=256", "--nhead=4", "--d_ffn=1024", "--num_encoder_layers=20"),
    *("--cnn_channels=128", "--num_decoder_layers=0", "--ctc_weight=1.0", "--token_type=char"),
    *("--vocab_size=null", "--precision=bf16"),
)


class TimedCommand(NamedTuple):
    """A command with its time limit."""

    title: str
    command: Sequence[str]
    max_seconds: float


def main() -> None:
    """Run all parts, and print the last lines of each together."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data_folder", type=Path, help="a release of Common Voice")
    parser.add_argument("--seconds", type=float, default=8.0, help="of training in a round")
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        release = options.data_folder or make_release(Path(folder) / "release", CLIP_COUNTS)
        # Each worker has two batches of 51 MB in shared memory.
        has_room = shutil.disk_usage("/dev/shm").free > NUM_WORKERS * 2 * 100e6
        common = [f"--data_folder={release}", f"--num_workers={NUM_WORKERS if has_room else 0}"]
        common += [f"--seconds={options.seconds}", *overrides]
        parts = make_parts(common)
        print("\n\n".join(["", *[run(part) for part in parts]]))


def make_parts(common: Sequence[str]) -> list[TimedCommand]:
    """List the parts; ``common``: options of all training commands."""
    bench = (*BENCH, *common)
    large = (*bench, "--yaml", "hparams/ctc_large.yaml", "--precision=bf16")
    conformer = (*bench, "--only-sbkit", "--batch_seconds=1600", *CONFORMER)
    # Other test files need packages that a bare machine lacks, and its versions may warn.
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--timeout=90", "-W", "default"]
    if find_spec("xdist"):  # one after another, the tests take more than 200 s
        tests += ["-n", "4", "--dist=load"]
    return [
        TimedCommand(
            "tests on a GPU", (*tests, "--continue-on-collection-errors", *GPU_TESTS), 200
        ),
        TimedCommand("ctc_large in bf16", large, 155),
        TimedCommand("Conformer CTC, 30 M", conformer, 80),
    ]


def run(part: TimedCommand) -> str:
    """Run a part, print its output, and return the last lines."""
    print(f"== {part.title}: {shlex.join(part.command)}", flush=True)
    start = time.perf_counter()
    # `timeout` also kills the part's children: a suspended one would keep its GPU memory.
    command = ["timeout", "--signal=KILL", str(part.max_seconds), *part.command]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, flush=True)
    outcome = f"exit code {done.returncode}, {time.perf_counter() - start:.0f} s"
    last_lines = done.stdout.splitlines()[-NUM_LAST_LINES:]
    return "\n".join([f"{part.title} ({outcome})", *last_lines])


def make_release(folder: Path, clip_counts: dict[str, int]) -> Path:
    """Write a release of modulated noise, with sentences of made-up words."""
    random = np.random.default_rng(0)
    syllable_counts = random.integers(2, 5, NUM_WORDS)
    words = ["".join(random.choice(SYLLABLES, count)) for count in syllable_counts]
    loudness = np.abs(np.sin(np.arange(60 * RATE) * 2 * np.pi * 4 / RATE))
    noise = (random.standard_normal(len(loudness)) * loudness * 0.1).astype(np.float32)

    def make_clips(count: int, copies: int) -> Iterator[tuple[Any, list[str]]]:
        for _ in range(count):
            seconds = float(np.clip(random.gamma(4.0, 1.25), *CLIP_SECONDS))
            start = int(random.integers(len(noise) - int(seconds * RATE)))
            num_words = max(1, int(seconds * 1.5))
            sentences = [" ".join(random.choice(words, num_words)) for _ in range(copies)]
            yield noise[start : start + int(seconds * RATE)], sentences

    for split, count in clip_counts.items():
        copies = COPIES if split == "train" else 1
        write_split(folder, split, make_clips(count, copies), RATE, "wav")
    return folder


def write_split(
    release: Path, split: str, clips: Iterable[tuple[Any, list[str]]], rate: int, suffix: str
) -> None:
    """Write a split in the form of Common Voice; a clip has a copy (a link) for each sentence."""
    folder = release / "clips"
    folder.mkdir(parents=True, exist_ok=True)
    rows = ["path\tsentence"]
    for audio, sentences in clips:
        first = folder / f"{split}-{len(rows)}.{suffix}"
        soundfile.write(first, audio, rate)
        for sentence in sentences:
            file = first.with_stem(f"{split}-{len(rows)}")
            if file != first:
                file.hardlink_to(first)
            rows.append(f"{file.name}\t{sentence}")
    (release / f"{split}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
