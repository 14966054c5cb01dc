"""Everything about speed that only a machine with a GPU can show, in one call of ten minutes.

python -m tools.bench_gpu [--data_folder=RELEASE] [--seconds 8]

The tests that need a GPU; ctc_large in bfloat16 beside SpeechBrain's recipe; a Conformer CTC of 30
million parameters; where its step spends its time. Without a release it makes one of noise, which
trains as fast as speech does. A part that fails is said, and the others run. The tables come last.
"""

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile

CLIPS, RATE = {"train": 1500, "dev": 20, "test": 20}, 16_000
SECONDS = (1.5, 10.5)  # of a clip, as in Common Voice; drawn from a gamma distribution of mean 5
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "left", "right", "stop", "go")
CONFORMER = (  # 30 million parameters
    *("--d_model=256", "--nhead=4", "--d_ffn=1024", "--num_encoder_layers=20"),
    *("--cnn_channels=128", "--num_decoder_layers=0", "--ctc_weight=1.0", "--token_type=char"),
    *("--vocab_size=null", "--precision=bf16"),
)


@dataclass(frozen=True)
class Part:
    """A command, and the seconds after which it is ended."""

    title: str
    command: Sequence[str]
    limit: float


def main() -> None:
    """Run all parts, and print their ends together."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--data_folder", type=Path, help="a release of Common Voice")
    parser.add_argument("--seconds", type=float, default=8.0, help="of training in a round")
    options, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        release = options.data_folder or make_release(Path(folder) / "release", CLIPS)
        each = [f"--data_folder={release}", f"--seconds={options.seconds}", *more]
        ends = [run(part) for part in parts(each, Path(folder) / "run")]
    print("\n\n".join(["", *ends]))


def parts(each: Sequence[str], folder: Path) -> list[Part]:
    """List what is run; ``each`` are options of all that train."""
    python = (sys.executable, "-m")
    bench = (*python, "tools.bench_train", "--rounds=2", *each)
    large, conformer = "hparams/ctc_large.yaml", "hparams/ctc.yaml"
    knobs = [option for option in each if not option.startswith("--seconds")]
    short = ("--profile", "--batch_seconds=200", "--number_of_epochs=1", "--check=False")
    profiled = ("train.py", conformer, *CONFORMER, *knobs, *short, f"--output_folder={folder}")
    return [
        Part("tests on a GPU", (*python, "pytest", "-q", "-m", "gpu"), 150),
        Part("ctc_large in bf16", (*bench, "--yaml", large, "--precision=bf16"), 200),
        Part("Conformer CTC, 30 M", (*bench, "--alone", "--batch_seconds=1600", *CONFORMER), 100),
        Part("its profile", (sys.executable, *profiled), 100),
    ]


def run(part: Part) -> str:
    """Run a part, show what it prints, and return its end."""
    print(f"== {part.title}: {shlex.join(part.command)}", flush=True)
    began = time.perf_counter()
    try:
        done = subprocess.run(
            part.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=part.limit,
            check=False,
        )
        printed, ended = done.stdout, f"exit code {done.returncode}"
    except subprocess.TimeoutExpired as error:
        printed = (error.stdout or b"").decode(errors="replace")
        ended = f"ended after {part.limit:g} s"
    print(printed, flush=True)
    took = time.perf_counter() - began
    return "\n".join([f"{part.title} ({ended}, {took:.0f} s)", *printed.splitlines()[-14:]])


def make_release(folder: Path, clips: dict[str, int]) -> Path:
    """Write a release of noise that comes and goes, with sentences of numbers."""
    random = np.random.default_rng(0)
    (folder / "clips").mkdir(parents=True)
    for split, count in clips.items():
        rows = ["path\tsentence"]
        for number in range(count):
            seconds = float(np.clip(random.gamma(4.0, 1.25), *SECONDS))
            loudness = np.abs(np.sin(np.arange(int(seconds * RATE)) * 2 * np.pi * 4 / RATE))
            noise = random.standard_normal(len(loudness)) * loudness * 0.1
            name = f"{split}-{number}.wav"
            soundfile.write(folder / "clips" / name, noise.astype(np.float32), RATE)
            sentence = " ".join(random.choice(WORDS, max(1, int(seconds * 1.5))))
            rows.append(f"{name}\t{sentence} {number}")
        (folder / f"{split}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


if __name__ == "__main__":
    main()
