"""Measure the training speed of a GPU in one call of ten minutes.

python -m tools.bench_gpu [--data_folder=RELEASE] [--seconds 4] [--key=value of the YAML ...]

The parts run one after the other, each in its own process with a time limit: a Conformer CTC of 30
million parameters and its profile; this model in turns with SWITCHES; SpeechBrain's recipe with as
many parameters; ctc_large, Whisper base with random weights, and ctc.yaml; the tests that need a
GPU. Without a release, the clips are noise, which trains as fast as speech. After each part comes
the block for docs/benchmarks.md: card, torch, commit, how the parts ended, and the figures so far.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from subprocess import getstatusoutput
from typing import Any, NamedTuple

import numpy as np
import soundfile

from tools.bench import Figures, print_medians

BENCH = (sys.executable, "-um", "tools.bench_train", "--rounds=2")
MAX_SECONDS = 590  # for all parts and for making the release, which takes 20
CLIP_COUNTS = {"train": 1500, "dev": 20, "test": 20}
RATE = 16_000
GPU_TESTS = ("tests/test_gpu.py", "tests/checkpoint/test_rng.py")
COPIES = 8  # of each training clip: SpeechBrain's buckets and long epochs need more than one
NUM_WORKERS = 8  # processes that read ahead
CLIP_SECONDS = (1.5, 10.5)  # as in Common Voice; drawn from a gamma distribution of mean 5
SYLLABLES = [*map("".join, product("bdfghklmnprstvwz", "aeiou"))]
NUM_WORDS = 8000  # enough for a unigram tokenizer with the 5120 tokens of ctc_large
CONFORMER = (  # 30 million parameters
    *("--d_model=256", "--nhead=4", "--d_ffn=1024", "--num_encoder_layers=20"),
    *("--cnn_channels=128", "--num_decoder_layers=0", "--ctc_weight=1.0", "--token_type=char"),
    *("--vocab_size=null", "--precision=bf16", "--batch_seconds=1600"),
)
IN_TURNS = "plain, in turns"
SWITCHES = ("--batch_seconds=800", "--batch_seconds=3200", "--num_workers=14", "--compile=True")
WHISPER = (  # base, with random weights
    "--encoder_config={model_type: whisper, d_model: 512, encoder_layers: 6, "
    "encoder_attention_heads: 8, encoder_ffn_dim: 2048}",
    *("--freeze={}", "--precision=bf16", "--batch_seconds=1600"),
)


class Part(NamedTuple):
    """A command with its time limit; None: the remaining time."""

    title: str
    command: Sequence[str]
    max_seconds: float | None


def main() -> None:
    """Run all parts, and print the block after each."""
    begin = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data_folder", type=Path, help="a release of Common Voice")
    parser.add_argument("--seconds", type=float, default=4.0, help="of training in a round")
    _, commit = getstatusoutput("git describe --always --dirty")
    parser.add_argument("--commit", default=commit, help="of a copy without .git")
    options, overrides = parser.parse_known_args()
    _, card = getstatusoutput("nvidia-smi --id=0 --query-gpu=name --format=csv,noheader")
    rounds_of: dict[str, list[Figures]] = {}
    outcomes = [f"{card}, torch {version('torch')}, {options.commit}"]
    with tempfile.TemporaryDirectory() as folder:
        release = options.data_folder or make_release(Path(folder) / "release", CLIP_COUNTS)
        # Each worker has two batches of 51 MB in shared memory.
        has_room = shutil.disk_usage("/dev/shm").free > NUM_WORKERS * 2 * 100e6
        common = [f"--data_folder={release}", f"--num_workers={NUM_WORKERS if has_room else 0}"]
        for part in make_parts([*common, f"--seconds={options.seconds}", *overrides]):
            seconds = part.max_seconds or max(1, MAX_SECONDS - time.perf_counter() + begin)
            outcomes.append(run(part._replace(max_seconds=seconds), rounds_of))
            print("", *outcomes, "", sep="\n")
            print_medians(rounds_of, IN_TURNS if IN_TURNS in rounds_of else "plain")


def make_parts(common: Sequence[str]) -> list[Part]:
    """List the parts; ``common``: options of all training commands."""
    plain = (*BENCH, "--side=sbkit", *CONFORMER, *common)
    switches = [f"--switch={switch}" for switch in SWITCHES]
    yaml = (*BENCH, "--side=sbkit", "--yaml")
    # Other test files need packages that a bare machine lacks, and its versions may warn.
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--timeout=90", "-W", "default"]
    if find_spec("xdist"):  # one after another, the tests take more than 200 s
        tests += ["-n", "4", "--dist=load"]
    return [
        Part("plain", (*plain, "--profile"), 100),
        Part(IN_TURNS, (*plain, *switches), 185),
        Part("SpeechBrain", (*plain, "--side=speechbrain"), 60),
        Part("ctc_large", (*yaml, "hparams/ctc_large.yaml", *common), 55),
        Part("Whisper base", (*yaml, "hparams/ctc_whisper.yaml", *WHISPER, *common), 35),
        Part("ctc.yaml", (*yaml, "hparams/ctc.yaml", *common), 30),
        Part("tests", (*tests, "--continue-on-collection-errors", *GPU_TESTS), None),
    ]


def run(part: Part, rounds_of: dict[str, list[Figures]]) -> str:
    """Run a part, print its output as it arrives, collect its figures, and return its outcome."""
    print(f"\n== {part.title}: {shlex.join(part.command)}", flush=True)
    start = time.perf_counter()
    last_line = ""
    # `timeout` also kills the part's children: a worker would keep its memory.
    command = ["timeout", "--signal=KILL", f"{part.max_seconds:.0f}", *part.command]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, **pipes, text=True, errors="replace") as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if line.startswith('{"side"'):
                figures = json.loads(line)
                side = figures.pop("side")
                row = side if side.startswith("--") else part.title
                rounds_of.setdefault(row, []).append(figures)
            elif line[0] not in "|{\n":
                last_line = line.strip()
    seconds = time.perf_counter() - start
    return f"{part.title}: exit code {process.returncode}, {seconds:.0f} s. {last_line}"


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
