"""Kill a training run at random moments, and prove that it ends as one that was never stopped.

python -m tools.prove_resume [--kills 20] [--seed 0] [YAML [--knob=value ...]]

The run is small; knobs make it another. It takes SIGKILL, half of the times while a checkpoint is
being written, and the same command again until it has ended; then another run, until there were
enough kills. The exit code is 1 when a loss or a parameter is not bit for bit the same.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch

from sbkit.base.errors import SbkitError
from sbkit.base.process import run_main
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.folder import UNFINISHED
from sbkit.logs.log import LOG_FILE, Record, read_log

ROOT = Path(__file__).parents[1]
YAML = "hparams/ctc.yaml"
SMALL = (
    "--device=cpu",
    "--cnn_channels=32",
    "--d_model=32",
    "--nhead=2",
    "--d_ffn=64",
    "--num_encoder_layers=2",
    "--max_seconds=2",
    "--check=False",
    "--number_of_epochs=10",
    "--log_every=1",
)
CLOCK = ("rtfx", "waiting")  # figures that no two runs share
SAVE_SECONDS = 0.02  # the small model takes 20 to 60 ms, on two busy cores
WATCH_SECONDS = 0.0005
HEAD = "kill  run     epoch  step  saving  went on from"


@dataclass(frozen=True)
class Training:
    """The command that is started again and again."""

    arguments: tuple[str, ...]

    def start(self, run: Path) -> subprocess.Popen[bytes]:
        """Start the run in a folder, or let it go on."""
        with run.with_suffix(".out").open("ab") as printed:
            return subprocess.Popen(
                [sys.executable, "train.py", *self.arguments, f"--output_folder={run}"],
                cwd=ROOT,
                env={"OMP_NUM_THREADS": "1", **os.environ},
                stdout=printed,
                stderr=printed,
            )

    def finish(self, process: subprocess.Popen[bytes], run: Path) -> None:
        """Wait for its end; raises SbkitError when that is not a good one."""
        if process.wait() != 0:
            printed = run.with_suffix(".out").read_text(errors="replace")
            raise SbkitError(
                f"{printed}\ntrain.py must reach its end, but left with {process.returncode}, as "
                f"above. The run is in {run}."
            )


@dataclass(frozen=True)
class Reference:
    """The run that was never stopped: its folder, and how long it took."""

    run: Path
    seconds: float

    @classmethod
    def of(cls, training: Training, run: Path) -> "Reference":
        """Train from the beginning to the end."""
        started = time.monotonic()
        training.finish(training.start(run), run)
        return cls(run, time.monotonic() - started)


@dataclass(frozen=True)
class Moment:
    """Seconds after a start and, for a kill within the next save from then on, seconds into it."""

    seconds: float
    into_save: float | None

    @classmethod
    def choose(cls, dice: random.Random, seconds: float) -> "Moment":
        """Choose one in a run of that many seconds; half of them are within a save."""
        moment, save = dice.uniform(0, seconds), dice.uniform(0, SAVE_SECONDS)
        return cls(moment, save if dice.random() < 0.5 else None)

    def kill(self, process: subprocess.Popen[bytes], run: Path) -> bool:
        """Kill a run at this moment; give whether it was still there."""
        moment = time.monotonic() + self.seconds
        while time.monotonic() < moment or (self.into_save is not None and not is_saving(run)):
            if process.poll() is not None:
                return False
            time.sleep(WATCH_SECONDS)
        time.sleep(self.into_save or 0)
        process.kill()
        return process.wait() == -signal.SIGKILL


@dataclass(frozen=True)
class Kill:
    """How far a run was when it was killed, and the last step of the checkpoint it then had."""

    run: str
    epoch: int
    step: int
    saving: bool
    checkpoint: int

    @classmethod
    def of(cls, run: Path) -> "Kill":
        """Read the log and the checkpoints of a killed run."""
        states = sorted((run / "checkpoints").glob("CKPT*/brain.ckpt"))
        records = read_log(run / LOG_FILE)
        epoch, step = (records[-1]["epoch"], records[-1]["step"]) if records else (0, 0)
        checkpoint = json.loads(states[-1].read_text())["optimizer_step"] if states else 0
        return cls(run.name, epoch, step, is_saving(run), checkpoint)

    def row(self, number: int) -> str:
        """Return its line of the table."""
        point = f"step {self.checkpoint}" if self.checkpoint else "the beginning"
        saving = "yes" if self.saving else "no"
        return f"{number:4}  {self.run:6} {self.epoch:6} {self.step:5}  {saving:6}  {point}"


def is_saving(run: Path) -> bool:
    """Return whether a checkpoint is begun and not complete."""
    return any((run / "checkpoints").glob(f"{UNFINISHED}*"))


def kill_until_it_ends(
    training: Training, run: Path, reference: Reference, *, dice: random.Random, at_most: int
) -> Iterator[Kill]:
    """Start a run and kill it, again and again, until it has ended before it was killed."""
    for _ in range(at_most):
        moment = Moment.choose(dice, reference.seconds)
        process = training.start(run)
        if not moment.kill(process, run):
            break
        yield Kill.of(run)
    else:
        process = training.start(run)
    training.finish(process, run)


# -- what it ended with --------------------------------------------------------------------------


def differences(run: Path, other: Path) -> list[str]:
    """Name the first record that is not the same in two runs, and every such parameter."""
    pairs = zip_longest(timeless(run), timeless(other))
    records = [f"logged {mine}, not {theirs}" for mine, theirs in pairs if mine != theirs]
    mine, theirs = parameters(run), parameters(other)
    return records[:1] + [name for name in mine if not torch.equal(mine[name], theirs[name])]


def timeless(run: Path) -> list[Record]:
    """Read a log without what depends on the clock."""
    records = read_log(run / LOG_FILE)
    return [{name: value for name, value in each.items() if name not in CLOCK} for each in records]


def parameters(run: Path) -> dict[str, torch.Tensor]:
    """Read the model of the last checkpoint."""
    last = Checkpointer(run / "checkpoints").find_checkpoint()
    assert last is not None
    weights: dict[str, torch.Tensor] = torch.load(last.paramfiles["model"], weights_only=True)
    return weights


# -- the command ---------------------------------------------------------------------------------


def with_frequent_saves(yaml: Path, folder: Path) -> Path:
    """Write a YAML that saves every other step; the interval has no knob on the command line."""
    text = yaml.read_text(encoding="utf-8")
    often = re.sub(r"(?m)^ckpt_interval_minutes:.*", "ckpt_interval_steps: 2", text)
    copy = folder / yaml.name
    copy.write_text(often, encoding="utf-8")
    return copy


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line: from the YAML on, it is train.py's."""
    parser = argparse.ArgumentParser("prove_resume", description="Kill, resume and compare a run.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("training", nargs=argparse.REMAINDER, help="YAML [--knob=value ...]")
    return parser.parse_args(arguments)


def main() -> int:
    """Print a line for each kill, and the verdict; give 1 when there is a difference."""
    options = parse(sys.argv[1:])
    dice, folder = random.Random(options.seed), Path(tempfile.mkdtemp(prefix="prove_resume_"))
    yaml, *knobs = options.training or [YAML]
    training = Training((str(with_frequent_saves(ROOT / yaml, folder)), *SMALL, *knobs))
    reference = Reference.of(training, folder / "never_stopped")
    print(f"never stopped: {reference.seconds:.0f} s\n\n{HEAD}")

    kills: list[Kill] = []
    found: dict[str, list[str]] = {}
    while len(kills) < options.kills:
        run = folder / f"run{len(found) + 1}"
        left = options.kills - len(kills)
        for kill in kill_until_it_ends(training, run, reference, dice=dice, at_most=left):
            kills.append(kill)
            print(kill.row(len(kills)), flush=True)
        found[run.name] = differences(run, reference.run)
    return judge(kills, found, folder)


def judge(kills: list[Kill], found: dict[str, list[str]], folder: Path) -> int:
    """Print the verdict, keep what shows a difference, and give the exit code."""
    saving = sum(kill.saving for kill in kills)
    print(f"\n{len(kills)} kills in {len(found)} runs, {saving} of them while saving")
    for run, names in found.items():
        for name in names:
            print(f"{run}: {name}")
    if any(found.values()):
        print(f"DIFFERENT from the run that was never stopped; all are in {folder}")
        return 1
    print("every loss and parameter is bit for bit that of the run that was never stopped")
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    run_main(main)
