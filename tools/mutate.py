"""Put small faults into modules, one at a time, and count the faults that tests notice.

python -m tools.mutate [MODULE.py or FOLDER ...] [--faults 200] [--seed 0] [--jobs 2]

cosmic-ray makes the faults (another operator, comparison, number, constant, a loop that never runs
...). They are drawn so that every position in the code is equally likely. Each is tried in a copy
of the checkout, by the quick tests that import the module directly or by another module, the
nearest first. Prints each fault that no test noticed: a person must judge whether it changes what
the code does.
"""

import argparse
import ast
import difflib
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from queue import SimpleQueue

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from sbkit.base.errors import SbkitError
from sbkit.base.process import run_main

FOLDERS = ("audio", "models", "decoding", "checkpoint", "train", "data", "evaluate")
# Limits of one call of pytest: a fault is noticed if tests compute or wait forever.
CPU_SECONDS = 300
WALL_SECONDS = 1800  # the machine may be busy
QUICK_TESTS = "not slow and not ddp and not browser"  # marks of pytest


@dataclass(frozen=True)
class Fault:
    """A change at one position of a module, made by an operator of cosmic-ray."""

    module: Path
    operator: str
    occurrence: int
    line: int

    @property
    def code(self) -> str:
        """The module without the fault."""
        return self.module.read_text(encoding="utf-8")

    def apply(self) -> str:
        """Return the code with the fault in it."""
        return str(mutate_code(self.code, get_operator(self.operator)(), self.occurrence))

    def parses(self) -> bool:
        """Return whether the faulty code parses; any test would notice if it did not."""
        try:
            ast.parse(self.apply())
        except SyntaxError:
            return False
        return True

    def diff(self) -> str:
        """Format the changed lines."""
        lines = difflib.unified_diff(self.code.splitlines(), self.apply().splitlines(), n=0)
        changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
        return "\n".join([f"{self.module}:{self.line}", *changed])


def main() -> None:
    """Draw faults, try them, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = [Path("sbkit", folder) for folder in FOLDERS]
    parser.add_argument("modules", nargs="*", type=Path, default=default)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    faults = draw(options.modules, options.faults, random.Random(options.seed))
    copies: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.jobs):
            copies.put(copy := copy_checkout(Path(folder, str(number))))

        def find_noticing(fault: Fault) -> list[str]:
            copy = copies.get()
            try:
                tests = try_fault(fault, copy)
            finally:
                copies.put(copy)
            print("noticed" if tests else "MISSED ", f"{fault.module}:{fault.line}", flush=True)
            return tests

        with ThreadPoolExecutor(options.jobs) as pool:
            noticing_tests = list(pool.map(find_noticing, faults))
        print(f"{sum(map(bool, noticing_tests))} of {len(faults)} faults were noticed")
        for fault, tests in zip(faults, noticing_tests, strict=True):
            if not tests:
                print(f"\n{fault.diff()}")
        tests = sorted(set(chain(*noticing_tests)))
        if tests and (names := failing(copy, tests)):
            raise SbkitError(f"{', '.join(names)} fails without a fault, in a copy of git's files.")


def draw(modules: Iterable[Path], count: int, dice: random.Random) -> list[Fault]:
    """Draw positions in the modules without repetition, and one fault for each.

    Raises SbkitError if a module is not in the working folder.
    """
    positions: list[list[Fault]] = []
    for module in modules:
        files = sorted(module.rglob("*.py")) if module.is_dir() else [module]
        if not all(file.is_file() for file in files) or not files:
            raise SbkitError(f"There is no module {module} in this folder.")
        positions += [faults for file in files for faults in faults_by_position(file)]
    dice.shuffle(positions)
    shuffled = (dice.sample(faults, len(faults)) for faults in positions)
    first_faults = (next(filter(Fault.parses, faults), None) for faults in shuffled)
    return [*islice(filter(None, first_faults), count)]


def faults_by_position(module: Path) -> list[list[Fault]]:
    """Return the faults at each position of a module, except in annotations."""
    code = module.read_text(encoding="utf-8")
    annotations = [*_annotations(ast.parse(code))]
    nodes = list(ast_nodes(get_ast(code)))
    faults: dict[tuple[str, tuple[int, int]], list[Fault]] = defaultdict(list)
    for name in operator_names():
        operator_class = get_operator(name)
        if operator_class.arguments():
            continue  # an argument says what to replace
        operator = operator_class()
        positions = (position for node in nodes for position in operator.mutation_positions(node))
        for occurrence, (start, end) in enumerate(positions):
            is_annotation = any(first <= start < last for first, last in annotations)
            if not is_annotation and not _is_separator(code, start, end):
                fault = Fault(module, name, occurrence, start[0])
                faults[name.split("_")[0], start].append(fault)
    return list(faults.values())


def _is_separator(code: str, start: tuple[int, int], end: tuple[int, int]) -> bool:
    """Return whether a token is the `*` or `/` of a signature, which is no operator."""
    line = code.splitlines()[start[0] - 1]
    return line[start[1] : end[1]] in ("*", "/") and line[end[1] : end[1] + 1] in (",", ")")


def _annotations(tree: ast.AST) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the first and the last line and column of each annotation."""
    for node in ast.walk(tree):
        for hint in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(hint, ast.expr):
                last = hint.end_lineno or hint.lineno, hint.end_col_offset or hint.col_offset
                yield (hint.lineno, hint.col_offset), last


def copy_checkout(folder: Path) -> Path:
    """Copy the files that git tracks into a folder."""
    folder.mkdir()
    pipe = f"git ls-files -z | xargs -0 cp --parents --target-directory={shlex.quote(str(folder))}"
    subprocess.run(pipe, shell=True, check=True)
    return folder


def try_fault(fault: Fault, copy: Path) -> list[str]:
    """Put a fault into a copy of the checkout, and return the tests that notice it."""
    (copy / fault.module).write_text(fault.apply(), encoding="utf-8")
    try:
        return failing(copy, tests_of(fault.module))
    finally:
        (copy / fault.module).write_text(fault.code, encoding="utf-8")


def tests_of(module: Path) -> list[str]:
    """Return the tests of a module, the nearest first.

    The tests in its folder come first, then other tests that import the module, then tests that
    import a module that does.
    """
    tests = sorted(Path("tests").rglob("test_*.py"))
    importing = importers(module, tests)
    modules = sorted([*Path("sbkit").rglob("*.py"), *Path("recipes").rglob("*.py")])
    if module.parts[0] == "recipes":
        near = [*Path("tests/recipes").glob(f"test_{module.parent.name}.py")]
    else:
        folder = Path("tests", *module.parent.parts[1:])
        near = [test for test in importing if test.parent == folder]
        near = near or sorted(folder.glob("test_*.py"))
    near.sort(key=lambda test: test.stem != f"test_{module.stem}")
    far = chain(importing, *(importers(user, tests) for user in importers(module, modules)))
    return [*map(str, dict.fromkeys([*near, *far]))]


def importers(module: Path, files: Iterable[Path]) -> list[Path]:
    """Return the files that import a module."""
    package = ".".join(module.parent.parts)
    name = module.stem
    imports = re.compile(rf"from {package}(\.{name} import| import .*\b{name}\b)")
    return [file for file in files if imports.search(file.read_text(encoding="utf-8"))]


def failing(copy: Path, tests: Sequence[str]) -> list[str]:
    """Run tests in a copy of the checkout; return the first failure, or all tests if they hang."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    # `timeout` also kills the children of pytest.
    limits = ["timeout", "--signal=KILL", str(WALL_SECONDS), "prlimit", f"--cpu={CPU_SECONDS}"]
    command = [*limits, *command, "-m", QUICK_TESTS, *tests]
    process = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    if process.returncode in (0, 5):  # 5: no test has such marks
        return []
    return re.findall(r"(?m)^(?:FAILED|ERROR) (.+?)(?: - .*)?$", process.stdout) or [*tests]


if __name__ == "__main__":
    run_main(main)
