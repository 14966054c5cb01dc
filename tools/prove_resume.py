"""Kill a training run at random moments, and prove that it ends like an uninterrupted one.

python -m tools.prove_resume [--kills 20] [--seed 0] [--ranks 2] [YAML [--setting=value ...]]

The run is small; settings change it. SIGKILL ends it, in half of the cases while it writes a
checkpoint, and the same command resumes it until it has finished. Further runs follow until there
were enough kills. The exit code is 1 if a loss or a parameter differs in a bit.

With `--ranks 2`, every other start has two processes, and the others two micro-batches in a step.
Dropout is off then, because each rank draws its own. With `--data_folder` or `--manifest`, the
first run prepares the splits, and the others read them.
"""

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from sbkit.base.errors import SbkitError
from sbkit.base.process import run_main
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.folder import UNFINISHED
from sbkit.config.document import read_document
from sbkit.config.hparams import read_spec
from sbkit.logs.run_log import LOG_FILE, Record, read_log

ROOT = Path(__file__).parents[1]
YAML = "hparams/ctc.yaml"
SMALL_RUN = (
    *("--device=cpu", "--cnn_channels=32", "--d_model=32", "--nhead=2", "--d_ffn=64"),
    *("--num_encoder_layers=2", "--max_seconds=2", "--check=False", "--number_of_epochs=10"),
    "--log_every=1",
)
CLOCK_FIGURES = ("rtfx", "data_wait_share")  # they differ between any two runs
SAVE_SECONDS = 0.02  # a save of the small model takes 20 to 60 ms on two busy cores
POLL_SECONDS = 0.0005


def start(arguments: Sequence[str], ranks: int, run: Path) -> subprocess.Popen[bytes]:
    """Start or resume the run in a folder, in one process or several."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}")
    words = (*torchrun * (ranks > 1), "train.py", *arguments, f"--output_folder={run}")
    with run.with_suffix(".out").open("ab") as output:
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        options: Any = {"cwd": ROOT, "env": environment, "stdout": output, "stderr": output}
        return subprocess.Popen([sys.executable, *words], **options)


def finish(process: subprocess.Popen[bytes], run: Path) -> None:
    """Wait for the end of a run; raise SbkitError if it failed."""
    if process.wait() != 0:
        output = run.with_suffix(".out").read_text(errors="replace")
        raise SbkitError(
            f"{output}\ntrain.py failed with exit code {process.returncode}, in the folder {run}."
        )


def is_saving(run: Path) -> bool:
    """Return whether a checkpoint is being written."""
    return any((run / "checkpoints").glob(f"{UNFINISHED}*"))


def kill(process: subprocess.Popen[bytes], run: Path, seconds: float, dice: random.Random) -> bool:
    """Kill a run after a random share of the seconds; in half of the calls, during the next save.

    Return False if the run has already finished.
    """
    delay, delay_in_save = dice.uniform(0, seconds), dice.uniform(0, SAVE_SECONDS)
    in_save = dice.random() < 0.5
    start = time.monotonic()
    while time.monotonic() < start + delay or (in_save and not is_saving(run)):
        if process.poll() is not None:
            return False
        time.sleep(POLL_SECONDS)
    time.sleep(delay_in_save if in_save else 0)
    with suppress(OSError):  # it may have ended
        os.kill(process.pid, signal.SIGSTOP)  # so that torchrun starts no more ranks
        for rank in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(rank), signal.SIGKILL)
    process.kill()
    return process.wait() == -signal.SIGKILL


def differences(run: Path, other: Path) -> list[str]:
    """Name the first record and all parameters that differ between two runs."""
    logs = (read_log(folder / LOG_FILE) for folder in (run, other))
    pairs = zip_longest(*(map(without_clock, log) for log in logs))
    records = [f"logged {ours}, not {expected}" for ours, expected in pairs if ours != expected]
    weights, expected_weights = parameters(run), parameters(other)
    names = [name for name in weights if not torch.equal(weights[name], expected_weights[name])]
    return records[:1] + names


def without_clock(record: Record) -> Record:
    """Leave out the figures that depend on the clock."""
    return {name: value for name, value in record.items() if name not in CLOCK_FIGURES}


def parameters(run: Path) -> dict[str, torch.Tensor]:
    """Read the model of the last checkpoint."""
    last = Checkpointer(run / "checkpoints").find_checkpoint()
    assert last is not None
    weights: dict[str, torch.Tensor] = torch.load(last.paramfiles["model"], weights_only=True)
    return weights


def with_frequent_saves(yaml: Path, folder: Path) -> Path:
    """Write a YAML that saves every other step; the command line cannot change the interval."""
    text = read_spec(yaml).one_file
    copy = folder / yaml.name
    copy.write_text(re.sub(r"(?m)^ckpt_interval_minutes:.*", "ckpt_interval_steps: 2", text))
    return copy


def main() -> int:
    """Print a line for each kill and difference, and the verdict; return 1 for a difference."""
    parser = argparse.ArgumentParser("prove_resume", description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments")
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2))
    parser.add_argument("training", nargs=argparse.REMAINDER, help="YAML [--setting=value ...]")
    options = parser.parse_args()
    dice = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="prove_resume_"))
    yaml, *settings = options.training or [YAML]
    copy = with_frequent_saves(ROOT / yaml, folder)
    keys = read_document(copy).root  # not every model has a `d_model`
    small = [option for option in SMALL_RUN if option.strip("-").partition("=")[0] in keys]
    starts = [((str(copy), *small, *settings), 1)]
    if options.ranks == 2:
        arguments = (*starts[0][0], *["--dropout=0"] * ("dropout" in keys))
        starts = [((*arguments, f"--grad_accumulation_factor={2 // n}"), n) for n in (1, 2)]
    reference = folder / "never_stopped"
    start_time = time.monotonic()
    finish(start(*starts[0], reference), reference)
    seconds = time.monotonic() - start_time

    kills = 0
    mismatches: list[str] = []
    while kills < options.kills:
        run = folder / f"after_{kills}_kills"
        process = start(*starts[kills % len(starts)], run)
        while kills < options.kills and kill(process, run, seconds, dice):
            kills += 1
            print(f"kill {kills}, {'in' if is_saving(run) else 'outside of'} a save", flush=True)
            process = start(*starts[kills % len(starts)], run)
        finish(process, run)
        mismatches += [f"{run}: {difference}" for difference in differences(run, reference)]
    if mismatches:
        print(*mismatches, "DIFFERENT from the uninterrupted run", sep="\n")
        return 1
    print(f"{kills} kills; all losses and parameters equal the uninterrupted run's, bit for bit")
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    run_main(main)
