"""The harness of the benchmarks: sides that take turns, their medians, and one table.

A side is a function that measures one round. A side with a toolkit or a model of its own is a
process, which is suspended between its turns so that none of its threads spins.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

Figures = Mapping[str, Any]  # of a round, by the title of their column: numbers or whole cells
Sides = Mapping[str, Callable[[], Figures]]


def measure_once(sides: Sides) -> None:
    """Measure each side, and print its row of the table."""
    columns: list[str] = []
    for name, measure in sides.items():
        figures = measure()
        columns = columns or _print_header(figures)
        _print_row(name, columns, figures)


def take_turns(sides: Sides, rounds: int, base: str) -> dict[str, list[Figures]]:
    """Measure the sides in alternating rounds, after one that warms up; return the rounds of each.

    The last rows of the table are medians. Their last column is the ratio of the first figure to
    that of the base, the name of a side.
    """
    rounds_of: dict[str, list[Figures]] = {name: [] for name in sides}
    columns: list[str] = []
    for number in range(rounds + 1):
        for name, measure in sides.items():
            figures = measure()
            columns = columns or _print_header({**figures, f"beside {base}": 1.0})
            if number:
                rounds_of[name].append(figures)
                _print_row(f"{name}, round {number}", columns, figures)
    medians = {
        name: {figure: statistics.median(r[figure] for r in measured) for figure in measured[0]}
        for name, measured in rounds_of.items()
    }
    for name, figures in medians.items():
        ratio = figures[columns[0]] / medians[base][columns[0]]
        _print_row(f"{name}, median", columns, {**figures, columns[-1]: ratio})
    return rounds_of


def _print_header(figures: Figures) -> list[str]:
    """Print the first two lines of a table, and return the titles of its columns."""
    print(f"| | {' | '.join(figures)} |\n|{' --- |' * (1 + len(figures))}", flush=True)
    return [*figures]


def _print_row(name: str, columns: Sequence[str], figures: Figures) -> None:
    cells = [name]
    for column in columns:
        value = figures.get(column, "-")
        if isinstance(value, float | int):
            value = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
        cells.append(value)
    print(f"| {' | '.join(cells)} |", flush=True)


class Worker:
    """A process that measures rounds on request, and is suspended otherwise.

    facts: its first answer.
    """

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self._process = process
        self.facts = self._read()

    def measure(self) -> Figures:
        """Resume the process until it has measured a round."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Figures:
        """Read the next answer of the process, and suspend it."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._process.send_signal(signal.SIGSTOP)
                answer: Figures = json.loads(line)
                return answer
        raise SystemExit(f"The process of {self.name} has ended. Its error is above.")


@contextmanager
def start_worker(
    module: str, name: str, arguments: Sequence[str], **variables: str
) -> Iterator[Worker]:
    """Run `python -m MODULE --side NAME ...`, which calls `answer`; kill it at the end.

    name: its first word is that of the side; variables: of the environment.
    """
    with subprocess.Popen(
        [sys.executable, "-m", module, "--side", name.split()[0], *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    ) as process:
        try:
            yield Worker(name, process)
        finally:
            process.kill()


def answer(facts: Figures, measure: Callable[[], Figures]) -> None:
    """Act as a worker: print the facts, and measure a round for each line of standard input."""
    print(json.dumps(facts), flush=True)
    for _ in sys.stdin:
        print(json.dumps(measure()), flush=True)
