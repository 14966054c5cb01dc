"""A rank of a test: `python -m tests.ranks SCENARIO FOLDER ...`.

Each scenario runs the real train.py, some of them several times in one process group.
"""

import ctypes
import errno
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.data import get_worker_info

import train
from recipes.asr.brain import AsrBrain
from sbkit.base.errors import StopRequestedError
from sbkit.base.process import exit_code, run_main
from sbkit.data.filesystem import ByteRange, read_ranges
from sbkit.distributed.ranks import process_group, rank, world_size
from sbkit.runtime.score_sets import read_whole_clips

ACCUMULATIONS = (1, 4)


def run(*arguments: str) -> int:
    """Run train.py within the existing process group."""
    with (
        patch("sbkit.run.run.process_group", lambda device: nullcontext()),
        patch.object(sys, "argv", ["train.py", *arguments]),
    ):
        return train.main()


def exact(folder: Path, finished: Path, arguments: Sequence[str]) -> None:
    """Train with each accumulation; on two ranks, also stop and resume; test a finished run."""
    for accumulation in ACCUMULATIONS:
        output = folder / f"{world_size()}x{accumulation}"
        run(*arguments, f"--output_folder={output}", f"--grad_accumulation_factor={accumulation}")
    if world_size() == 2:
        with_dropout = [*arguments, "--dropout=0.15"]
        run(*with_dropout, f"--output_folder={folder / 'whole'}")
        with patch.object(AsrBrain, "on_fit_batch_end", signal_rank_1):
            code_of_run(*with_dropout, f"--output_folder={folder / 'resumed'}")
        run(*with_dropout, f"--output_folder={folder / 'resumed'}")
    output = folder / f"test-{world_size()}"
    if rank() == 0:
        shutil.copytree(finished, output)
    with recorded_losses() as mean_losses:
        run(*arguments, f"--output_folder={output}")
    (folder / f"loss-{world_size()}-{rank()}.json").write_text(json.dumps(mean_losses))


@contextmanager
def recorded_losses() -> Iterator[list[float]]:
    """Yield a list of the losses that `evaluate` returns."""
    evaluate, mean_losses = AsrBrain.evaluate, list[float]()

    def evaluate_and_record(brain: AsrBrain, *inputs: Any, **options: Any) -> float:
        mean_losses.append(evaluate(brain, *inputs, **options))
        return mean_losses[-1]

    with patch.object(AsrBrain, "evaluate", evaluate_and_record):
        yield mean_losses


def signal_rank_1(brain: AsrBrain, *_: object) -> None:
    if rank() == 1 and brain.optimizer_step >= 9 and not brain.stopping.signals.received:
        os.kill(os.getpid(), signal.SIGUSR1)


@contextmanager
def signal_rank_1_in_test() -> Iterator[None]:
    """Ask only rank 1 to stop, once it scores a batch of a test set, which has several."""
    ping = AsrBrain.ping

    def signal_and_ping(brain: AsrBrain, phase: str, utterances: Sequence[str] = ()) -> bool:
        if rank() == 1 and phase == "test":
            os.kill(os.getpid(), signal.SIGUSR1)
        return ping(brain, phase, utterances)

    small_batches = partial(read_whole_clips, batch_seconds=2.0)
    with (
        patch.object(AsrBrain, "ping", signal_and_ping),
        patch("sbkit.export.parity.read_whole_clips", small_batches),
    ):
        yield


def hang_rank_1(brain: AsrBrain, *_: object) -> None:
    """Let rank 1 sleep forever in C, where it holds Python's lock."""
    if brain.optimizer_step == 3 and rank() == 1:
        ctypes.PyDLL(None).sleep(10_000)


def fill_disk(brain: AsrBrain, *_: object) -> None:
    """Make rank 0 fail to write more than 50 kB to a file, as on a full disk."""
    if rank() == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))


@contextmanager
def store_away_on_rank_0() -> Iterator[None]:
    """Let a worker of rank 0 fail to read for 20 seconds, from its third batch on."""
    num_reads, end = 0, multiprocessing.Value("d", 0.0)

    def read(ranges: Sequence[ByteRange]) -> list[bytes]:
        nonlocal num_reads
        num_reads += get_worker_info() is not None  # the start of a new run waits for no store
        if rank() == 0 and num_reads == 3 and not end.value:
            end.value = time.time() + 20
        if time.time() < end.value:
            raise OSError(errno.ESTALE, "Stale file handle", "/nfs/x")
        return read_ranges(ranges)

    with patch("sbkit.data.shard.read_ranges", read):
        yield


AFTER_BATCH = {"signal_rank_1": signal_rank_1, "hang_rank_1": hang_rank_1, "fill_disk": fill_disk}


def main() -> None:
    scenario, folder, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    with process_group(torch.device("cpu")):
        if scenario == "exact":
            exact(Path(folder), Path(arguments[0]), arguments[1:])
            return
        arguments.append(f"--output_folder={folder}/run")
        if scenario == "store_away":
            with store_away_on_rank_0():
                codes = [code_of_run(*arguments)]
        else:
            with patch.object(AsrBrain, "on_fit_batch_end", AFTER_BATCH[scenario]):
                codes = [code_of_run(*arguments)]
        if scenario == "signal_rank_1":
            with signal_rank_1_in_test():
                codes.append(code_of_run(*arguments))
        Path(folder, f"codes-{rank()}").write_text(" ".join(codes))


def code_of_run(*arguments: str) -> str:
    try:
        return str(run(*arguments))
    except StopRequestedError as error:
        print(error)
        return str(exit_code(error))


if __name__ == "__main__":
    run_main(main)
