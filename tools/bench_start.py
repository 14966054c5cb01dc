"""Start a run of `python -m tools.bench_data` up to its first step, and measure that.

python -m tools.bench_start FIGURES --KEY=VALUE ...     (of hparams/ctc.yaml)

FIGURES is the JSON file to write. Imports count, so only what train.py needs is imported.
"""

import json
import os
import re
import sys
import time
from contextlib import suppress
from multiprocessing import active_children
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

from sbkit.base.allocator import keep_freed_memory
from sbkit.base.process import run_main

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Start training like train.py, and leave at the first step as if it were in mid-epoch."""
    keep_freed_memory()
    from sbkit.base.errors import StopRequestedError
    from sbkit.config.overrides import parse_command
    from sbkit.distributed.ranks import gather_over_ranks, rank
    from sbkit.logs.handlers import log_to_screen
    from sbkit.run.run import Run  # imports torch, once `run_main` set how threads wait
    from sbkit.train.brain import Brain

    file, *arguments = sys.argv[1:]

    def measure_and_leave(brain: Brain, batch: object) -> NoReturn:
        assert brain.loaders is not None
        gather_over_ranks(None)  # until all have their first batch
        of_ranks = gather_over_ranks(measure_processes())
        if rank() == 0:
            Path(file).write_text(json.dumps(of_ranks))
        brain.optimizer_step = brain.step = len(brain.loaders.train) // 2
        brain.save_or_leave.save()
        brain.save_or_leave.leave(brain.optimizer_step)

    stopping = patch.object(Brain, "fit_batch", measure_and_leave)
    with stopping, log_to_screen(), suppress(StopRequestedError):
        Run(*parse_command(["hparams/ctc.yaml", *arguments])).train()


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


if __name__ == "__main__":
    run_main(main)
