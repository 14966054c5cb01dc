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
from itertools import product
from typing import Any

from sbkit.base.errors import SbkitError

Figures = Mapping[str, Any]  # the results of a round by column title: numbers or cells of text
Sides = Mapping[str, Callable[[], Figures]]


def measure_once(sides: Sides) -> dict[str, Figures]:
    """Measure each side, print its row of the table, and return its figures."""
    figures_of: dict[str, Figures] = {}
    columns: list[str] = []
    for name, measure in sides.items():
        figures_of[name] = measure()
        columns = columns or _print_header(figures_of[name])
        _print_row(name, columns, figures_of[name])
    return figures_of


def take_turns(sides: Sides, rounds: int, base: str) -> dict[str, list[Figures]]:
    """Measure the sides in alternating rounds, print each as JSON, and print their medians.

    Each side warms up with a round that does not count. A side that fails is left out of the next
    rounds; if the base fails, its error is raised. Returns the rounds of each side.
    """
    rounds_of: dict[str, list[Figures]] = {name: [] for name in sides}
    failed = set[str]()
    for number, (name, measure) in product(range(rounds), sides.items()):
        if name in failed:
            continue
        try:
            if number == 0:
                measure()
            figures = measure()
        except (RuntimeError, SbkitError) as error:  # such as torch.OutOfMemoryError
            if name == base:
                raise
            failed.add(name)
            figures = {"problem": f"{type(error).__name__}: {error}".splitlines()[0][:80]}
        rounds_of[name].append(figures)
        print(json.dumps({"side": name, **figures}), flush=True)
    print_medians(rounds_of, base)
    return rounds_of


def print_medians(rounds_of: Mapping[str, Sequence[Figures]], base: str) -> None:
    """Print the medians of all rounds, and the ratio of each first figure to the base's."""
    columns = [*{key: None for rounds in rounds_of.values() for r in rounds for key in r}]
    ratio = f"beside {base}"
    _print_header(dict.fromkeys([*columns, ratio]))
    medians: dict[str, dict[str, Any]] = {name: {} for name in rounds_of}
    for name, column in product(rounds_of, columns):
        if values := [figures[column] for figures in rounds_of[name] if column in figures]:
            medians[name][column] = statistics.median(values)
    for name, figures in medians.items():
        if columns[0] in figures and columns[0] in medians.get(base, {}):
            figures[ratio] = figures[columns[0]] / medians[base][columns[0]]
        _print_row(name, [*columns, ratio], figures)


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

    facts: the first answer of the process.
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

    name: begins with the name of the side. variables: variables of the environment.
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
