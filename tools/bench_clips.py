"""The test clips of a run and the cells of a table, for `bench_codec` and `bench_synthesis`."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sbkit.checkpoint.run_config import RESOLVED
from sbkit.config.hparams import read_knobs
from sbkit.data.batch import UtteranceDataset
from sbkit.evaluate.intervals import Grouping, interval_of
from sbkit.evaluate.wer import ErrorCounts
from sbkit.train.recipe import load_recipe


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Make a parser with the options that both benchmarks have."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--recognizer", type=Path)
    parser.add_argument("--most", type=int, default=1000)
    return parser


def read_clips(run: Path, num_clips: int, **overrides: object) -> list[Mapping[str, Any]]:
    """Return the first test clips of a run, with their audio (S,) int16."""
    knobs = read_knobs(run / RESOLVED, {})
    knobs.update({name: value for name, value in overrides.items() if value})
    test = load_recipe(knobs, run / RESOLVED).prepare_splits(knobs).test
    readers = [UtteranceDataset(split) for split in test.values()]
    return [reader[index] for reader in readers for index in range(len(reader))][:num_clips]


def table_row(*cells: str) -> str:
    """Write a row of a table."""
    return f"| {' | '.join(cells)} |"


def error_rate(counts: Sequence[ErrorCounts]) -> str:
    """Write an error rate with its counts and its 95 % interval over clips."""
    total = sum(counts, ErrorCounts())
    clips = Grouping("clip", tuple(map(str, range(len(counts)))))
    return f"{100 * total.rate:.1f} % ({total}; {interval_of(counts, clips)})"
