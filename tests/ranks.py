"""What the ranks of a test do: `python -m tests.ranks SCENARIO FOLDER ...`.

Each scenario runs the real train.py, several times where one group of processes can serve.
"""

import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import train
from recipes.asr.recipe import AsrBrain
from sbkit.distributed.ranks import process_group, rank, world_size
from sbkit.train import watchdog

ACCUMULATIONS = (1, 4)


def run(*arguments: str) -> None:
    """Run train.py within the group that is there."""
    with (
        patch("sbkit.commands.train.process_group", lambda device: nullcontext()),
        patch.object(sys, "argv", ["train.py", *arguments]),
    ):
        train.main()


def exact(folder: Path, finished: Path, arguments: Sequence[str]) -> None:
    """Train with several accumulations, two ranks also stopped once; test a finished run."""
    for accumulation in ACCUMULATIONS:
        output = folder / f"{world_size()}x{accumulation}"
        run(*arguments, f"--output_folder={output}", f"--grad_accumulation_factor={accumulation}")
    if world_size() == 2:
        drawing = [*arguments, "--dropout=0.15"]
        run(*drawing, f"--output_folder={folder / 'whole'}")
        with patch.object(AsrBrain, "on_fit_batch_end", after("signalled")), suppress(SystemExit):
            run(*drawing, f"--output_folder={folder / 'resumed'}")
        run(*drawing, f"--output_folder={folder / 'resumed'}")
    output = folder / f"test-{world_size()}"
    if rank() == 0:
        shutil.copytree(finished, output)
    with losses() as seen:
        run(*arguments, f"--output_folder={output}")
    (folder / f"loss-{world_size()}-{rank()}.json").write_text(json.dumps(seen))


@contextmanager
def losses() -> Iterator[list[float]]:
    """Note what `evaluate` gives."""
    evaluate, seen = AsrBrain.evaluate, list[float]()

    def noting(brain: AsrBrain, *inputs: Any, **options: Any) -> float:
        seen.append(evaluate(brain, *inputs, **options))
        return seen[-1]

    with patch.object(AsrBrain, "evaluate", noting):
        yield seen


def signalled(brain: AsrBrain) -> None:
    """Ask rank 1 alone to stop."""
    if rank() == 1 and brain.optimizer_step >= 9 and not brain.signals.received:
        os.kill(os.getpid(), signal.SIGUSR1)


def hanging(brain: AsrBrain) -> None:
    """Let rank 1 sleep for ever, which may take four seconds; all before may take its time."""
    if brain.optimizer_step == 3:
        brain.watchdog._stall_seconds = 4
        time.sleep(10_000 * rank())


def full(brain: AsrBrain) -> None:
    """Let rank 0 write no file of more than 50 kB from here on, as on a disk that is full."""
    if rank() == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))


AFTER_BATCH = {"signalled": signalled, "hanging": hanging, "full": full}


def main() -> None:
    """Run the scenario that the command line names."""
    scenario, folder, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    watchdog.REPORT_SECONDS = 2.0
    with process_group(torch.device("cpu")):
        if scenario == "exact":
            exact(Path(folder), Path(arguments[0]), arguments[1:])
            return
        with patch.object(AsrBrain, "on_fit_batch_end", after(scenario)):
            try:
                run(*arguments, f"--output_folder={folder}/run")
            except SystemExit as left:
                Path(folder, f"code-{rank()}").write_text(str(left.code))
                return
    Path(folder, f"code-{rank()}").write_text("0")


def after(scenario: str) -> Any:
    """Give a hook that does something after every micro-batch."""

    def on_fit_batch_end(brain: AsrBrain, *inputs: Any) -> None:
        AFTER_BATCH[scenario](brain)

    return on_fit_batch_end


if __name__ == "__main__":
    main()
