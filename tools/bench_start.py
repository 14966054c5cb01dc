"""Start a side of `python -m tools.bench_data start` up to its first batch, and measure that.

python -m tools.bench_start FIGURES sbkit --KEY=VALUE ...     (of hparams/ctc.yaml)
python -m tools.bench_start FIGURES lhotse|datasets|speechbrain TABLE

FIGURES is the JSON file to write. A side imports only what its users import, and that counts.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import active_children
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from sbkit.base.process import run_main

BATCH_SECONDS = 400.0
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Start a side, and write what its process and the workers have used."""
    file, side, *arguments = sys.argv[1:]
    if side == "sbkit":
        start_sbkit(Path(file), arguments)
        return
    loader, paths = SIDES[side](*arguments)
    assert paths
    assert all(Path(path).is_file() for path in paths)
    Path(file).write_text(json.dumps([measure_processes()]))
    del loader  # which was measured


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


def start_sbkit(file: Path, arguments: Sequence[str]) -> None:
    """Start training like train.py, and leave at the first step as if it were in mid-epoch."""
    from sbkit.base.allocator import keep_freed_memory

    keep_freed_memory()
    from sbkit.base.errors import StopRequestedError
    from sbkit.config.overrides import parse_command
    from sbkit.distributed.ranks import gather_over_ranks, rank
    from sbkit.logs.handlers import log_to_screen
    from sbkit.run.run import Run
    from sbkit.train.brain import Brain

    def measure_and_leave(brain: Brain, batch: object) -> NoReturn:
        assert brain.loaders is not None
        gather_over_ranks(None)  # until all have their first batch
        of_ranks = gather_over_ranks(measure_processes())
        if rank() == 0:
            file.write_text(json.dumps(of_ranks))
        brain.optimizer_step = brain.step = len(brain.loaders.train) // 2
        brain.save_or_leave.save()
        brain.save_or_leave.leave(brain.optimizer_step)

    stopping = patch.object(Brain, "fit_batch", measure_and_leave)
    with stopping, log_to_screen(), suppress(StopRequestedError):
        Run(*parse_command(["hparams/ctc.yaml", *arguments])).train()


def start_lhotse(table: str) -> tuple[object, list[str]]:
    """Read cuts lazily, as in icefall's recipes."""
    from lhotse import load_manifest_lazy
    from lhotse.dataset import DynamicBucketingSampler

    cuts = load_manifest_lazy(table)
    sampler = DynamicBucketingSampler(
        cuts, max_duration=BATCH_SECONDS, num_buckets=30, shuffle=True
    )
    return sampler, [cut.recording.sources[0].source for cut in next(iter(sampler))]


def start_datasets(table: str) -> tuple[object, list[str]]:
    """Map a table, and draw a batch from all of its rows."""
    from datasets import load_from_disk
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(load_from_disk(table), batch_size=64, shuffle=True)
    return loader, next(iter(loader))["wav"]


def start_speechbrain(table: str) -> tuple[object, list[str]]:
    """Read a CSV, and plan dynamic batches as the recipes for Common Voice do."""
    from speechbrain.dataio.dataset import DynamicItemDataset
    from speechbrain.dataio.sampler import DynamicBatchSampler

    rows = DynamicItemDataset.from_csv(table, output_keys=["id", "wav"])
    sampler = DynamicBatchSampler(
        rows, BATCH_SECONDS, num_buckets=200, length_func=lambda row: row["duration"]
    )
    return (rows, sampler), [rows[row]["wav"] for row in next(iter(sampler))]


SIDES: dict[str, Callable[[str], tuple[object, list[str]]]] = {
    "lhotse": start_lhotse,
    "datasets": start_datasets,
    "speechbrain": start_speechbrain,
}


if __name__ == "__main__":
    run_main(main)
