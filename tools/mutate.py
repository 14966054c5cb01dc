"""Put small faults into modules, one at a time, and count the faults that tests notice.

python -m tools.mutate [MODULE.py or FOLDER ...] [--sample 200] [--seed 0] [--jobs 2]
                       [--near | --slow]

The faults are those of cosmic-ray (another operator, comparison, number, constant, a loop that
never runs ...), drawn so that every place of the code is equally likely. Each runs in a copy of
the checkout: first the tests of the module's folder that import it (--near stops here), then every
test that imports it or one of its users, with --slow also those of more than ten seconds; at last a
whole run. Prints a table by folder, and the change of each fault that no test noticed: a person
says which of them mean the same as before.
"""

import argparse
import ast
import difflib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
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
LIMIT = 300  # seconds of a processor for one call of pytest: what loops for ever is noticed
WAITING = 1800  # seconds by the clock: so is what waits for ever, on a busy machine, too
WHOLE_RUN = Path("tests/test_run.py"), "test_a_run_leaves_everything_in_its_folder"
QUICK, ALL_MARKS = "not slow and not ddp and not browser", "not browser"


@dataclass(frozen=True)
class Fault:
    """A change at one position of a module, made by an operator of cosmic-ray."""

    module: Path
    operator: str
    occurrence: int
    line: int

    def apply(self, source: str) -> str:
        """Return the source with the fault in it."""
        return str(mutate_code(source, get_operator(self.operator)(), self.occurrence))

    def is_code(self) -> bool:
        """Return whether the faulty source compiles: any test would notice a syntax error."""
        try:
            ast.parse(self.apply(self.module.read_text(encoding="utf-8")))
        except SyntaxError:
            return False
        return True

    def diff(self, source: str) -> str:
        """Write the changed lines."""
        lines = difflib.unified_diff(source.splitlines(), self.apply(source).splitlines(), n=0)
        changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
        return "\n".join([f"{self.module}:{self.line}", *changed])


def main() -> int:
    """Draw faults, try them, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    default = [Path("sbkit", folder) for folder in FOLDERS]
    parser.add_argument("modules", nargs="*", type=Path, default=default)
    parser.add_argument("--sample", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    how_far = parser.add_mutually_exclusive_group()
    how_far.add_argument("--near", action="store_true")
    how_far.add_argument("--slow", action="store_true")
    options = parser.parse_args()
    faults = draw(options.modules, options.sample, random.Random(options.seed))
    copies: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.jobs):
            copies.put(copy := copy_checkout(Path(folder, str(number))))

        def find_noticing(fault: Fault) -> list[str]:
            copy = copies.get()
            try:
                marks = ALL_MARKS if options.slow else QUICK
                tests = try_fault(fault, copy, marks=marks, near_only=options.near)
            finally:
                copies.put(copy)
            print("noticed" if tests else "MISSED ", f"{fault.module}:{fault.line}", flush=True)
            return tests

        with ThreadPoolExecutor(options.jobs) as pool:
            noticing = list(pool.map(find_noticing, faults))
        print(as_table(faults, list(map(bool, noticing))))
        for fault, tests in zip(faults, noticing, strict=True):
            if not tests:
                print(f"\n{fault.diff(fault.module.read_text(encoding='utf-8'))}")
        check_tests(sorted(set(chain(*noticing))), copy)
    return 0


def draw(modules: Iterable[Path], count: int, chance: random.Random) -> list[Fault]:
    """Draw positions in the modules without repetition, and one fault for each.

    Raises SbkitError: a module is not in the working folder.
    """
    places = []
    for module in modules:
        files = sorted(module.rglob("*.py")) if module.is_dir() else [module]
        if not all(file.is_file() for file in files) or not files:
            raise SbkitError(f"A module must be a file of this checkout, but {module} is not.")
        places += [place for file in files for place in faults_by_place(file)]
    chance.shuffle(places)
    drawn = (chance.sample(alternatives, len(alternatives)) for alternatives in places)
    faults = (next(filter(Fault.is_code, candidates), None) for candidates in drawn)
    return list(islice(filter(None, faults), count))


def faults_by_place(module: Path) -> list[list[Fault]]:
    """Return the faults at each position of a module, except in annotations."""
    source = module.read_text(encoding="utf-8")
    annotated = set(_annotated_places(ast.parse(source)))
    nodes = list(ast_nodes(get_ast(source)))
    places: dict[tuple[str, tuple[int, int]], list[Fault]] = defaultdict(list)
    for name in operator_names():
        operator_class = get_operator(name)
        if operator_class.arguments():
            continue  # those need to be told what to replace
        operator = operator_class()
        positions = (place for node in nodes for place in operator.mutation_positions(node))
        for occurrence, (start, end) in enumerate(positions):
            if start not in annotated and not _is_separator(source, start, end):
                fault = Fault(module, name, occurrence, start[0])
                places[name.split("_")[0], start].append(fault)
    return list(places.values())


def _is_separator(source: str, start: tuple[int, int], end: tuple[int, int]) -> bool:
    """Return whether a token is the `*` or `/` of a signature, which is no operator."""
    line = source.splitlines()[start[0] - 1]
    return line[start[1] : end[1]] in ("*", "/") and line[end[1] : end[1] + 1] in (",", ")")


def _annotated_places(tree: ast.AST) -> Iterator[tuple[int, int]]:
    for node in ast.walk(tree):
        for hint in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(hint, ast.expr) and hint.end_lineno and hint.end_col_offset:
                for line in range(hint.lineno, hint.end_lineno + 1):
                    first = hint.col_offset if line == hint.lineno else 0
                    last = hint.end_col_offset if line == hint.end_lineno else 200
                    yield from ((line, column) for column in range(first, last))


def copy_checkout(folder: Path) -> Path:
    """Copy the files that git tracks into a folder."""
    files = subprocess.run(
        ["git", "ls-files", "-z"], check=True, capture_output=True, text=True
    ).stdout.split("\0")
    for file in filter(None, files):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, folder / file)
    return folder


def try_fault(fault: Fault, copy: Path, *, marks: str, near_only: bool) -> list[str]:
    """Put a fault into a copy of the checkout and return the tests of its module that notice it."""
    source = fault.module.read_text(encoding="utf-8")
    near, all_of_them = tests_of(fault.module)
    (copy / fault.module).write_text(fault.apply(source), encoding="utf-8")
    try:
        tests = near and failing(copy, near, QUICK)
        if near_only:
            return tests
        tests = tests or failing(copy, all_of_them, marks)
        if not tests and WHOLE_RUN[0].exists():
            tests = failing(copy, ["{}::{}".format(*WHOLE_RUN)], ALL_MARKS)
        return tests
    finally:
        (copy / fault.module).write_text(source, encoding="utf-8")


def check_tests(tests: Sequence[str], copy: Path) -> None:
    """Raise SbkitError if a test that noticed a fault also fails without it."""
    if tests and (failed := failing(copy, tests, ALL_MARKS)):
        raise SbkitError(
            f"Tests must pass without a fault to tell of one, but {', '.join(failed)} fails in a "
            "copy of what git lists. Add new files to git, and run it."
        )


def tests_of(module: Path) -> tuple[list[str], list[str]]:
    """Return the tests of a module that are in its folder, and all, the nearest first.

    All are those that import it, and then those that import a module that does.
    """
    tests = sorted(Path("tests").rglob("test_*.py"))
    direct = importers(module, tests)
    users = importers(
        module, sorted([*Path("sbkit").rglob("*.py"), *Path("recipes").rglob("*.py")])
    )
    if module.parts[0] == "recipes":
        near = [*Path("tests/recipes").glob(f"test_{module.parent.name}.py")]
    else:
        mirror = Path("tests", *module.parent.parts[1:])
        near = [test for test in direct if test.parent == mirror]
        near = near or sorted(mirror.glob("test_*.py"))
    near.sort(key=lambda test: test.stem != f"test_{module.stem}")
    far = chain(direct, *(importers(user, tests) for user in users))
    return [*map(str, near)], [*map(str, dict.fromkeys([*near, *far]))]


def importers(module: Path, files: Iterable[Path]) -> list[Path]:
    """Return the files that import a module."""
    package, name = ".".join(module.parent.parts), module.stem
    imports = re.compile(rf"from {package}(\.{name} import| import .*\b{name}\b)")
    return [file for file in files if imports.search(file.read_text(encoding="utf-8"))]


def failing(copy: Path, tests: Sequence[str], marks: str) -> list[str]:
    """Run tests in a copy of the checkout; return the first failure, or all tests if they hang."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    limits = ["timeout", "--signal=KILL", str(WAITING), "prlimit", f"--cpu={LIMIT}"]
    command = [*limits, *command, *tests]  # its children, too
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    if done.returncode in (0, 5):  # 5: none of them was chosen
        return []
    return re.findall(r"(?m)^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout) or [*tests]


def as_table(faults: Sequence[Fault], noticed: Sequence[bool]) -> str:
    """Count the faults of each folder, and those that were noticed."""
    counts, seen = Counter[str](), Counter[str]()
    for fault, is_noticed in zip(faults, noticed, strict=True):
        for folder in (str(fault.module.parent), "all"):
            counts[folder] += 1
            seen[folder] += is_noticed
    rows = [
        f"| {folder} | {count} | {seen[folder]} | {seen[folder] / count:.0%} |"
        for folder, count in sorted(counts.items(), key=lambda item: (item[0] == "all", item[0]))
    ]
    return "\n".join(["| | faults | noticed | |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    run_main(main)
