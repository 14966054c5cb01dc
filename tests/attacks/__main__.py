"""Try every attack: python -m tests.attacks [GROUP...]

Prints how many of each group were tried, refused and accepted as harmless; leaves with 1 if one ran
code, wrote elsewhere, ended in a traceback or a crash, hung, or took memory without bound.
"""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

from tests.attacks.archives import all_archives
from tests.attacks.audio import all_audio
from tests.attacks.bundles import all_bundles
from tests.attacks.case import Case, Place
from tests.attacks.decoders import all_decoders
from tests.attacks.inputs import all_inputs
from tests.attacks.links import all_links
from tests.attacks.mutants import all_mutants
from tests.attacks.onnx import all_onnx
from tests.attacks.resumes import all_resumes
from tests.attacks.runner import GOOD, HARMLESS, REFUSED, Outcome, attack, prepare
from tests.attacks.runs import all_runs
from tests.attacks.tables import all_tables


def all_cases() -> list[Case]:
    """List every attack, those of a group together."""
    cases = [
        *all_bundles(),
        *all_decoders(),
        *all_runs(),
        *all_audio(),
        *all_inputs(),
        *all_resumes(),
        *all_mutants(),
        *all_tables(),
        *all_archives(),
        *all_links(),
        *all_onnx(),
    ]
    return sorted(cases, key=lambda case: case.group)


def try_all(cases: Iterable[Case], healthy: Place) -> Iterator[tuple[Case, Outcome]]:
    """Attack copies of what `prepare` made, each case in a process of its own; yield outcomes."""
    folder = healthy.folder.parent
    for number, case in enumerate(cases):
        yield case, attack(case, healthy, folder / f"case{number}")


def report(found: Iterable[tuple[Case, Outcome]]) -> int:
    """Print what was not withstood at once, and each group's counts; return the exit code."""
    total = Counter[str]()
    for group, tried in groupby(found, key=lambda each: each[0].group):
        counts, began = Counter[str](), time.monotonic()
        for case, outcome in tried:
            counts[outcome.kind] += 1
            if outcome.kind not in GOOD:
                print(f"{outcome.kind}: [{group}] {case.name}: {outcome.detail}", flush=True)
        seconds = time.monotonic() - began
        print(
            f"{time.strftime('%H:%M:%S')} {group}: {_describe(counts)}, {seconds:.1f} s", flush=True
        )
        total += counts
    print(_describe(total))
    return 0 if set(total) <= {*GOOD} else 1


def _describe(counts: Mapping[str, int]) -> str:
    tried = sum(counts.values())
    refused, harmless = (counts.get(kind, 0) for kind in (REFUSED, HARMLESS))
    return (
        f"tried {tried}, refused {refused}, accepted as harmless {harmless}, "
        f"not withstood {tried - refused - harmless}"
    )


if __name__ == "__main__":
    wanted = sys.argv[1:]
    chosen = [case for case in all_cases() if not wanted or case.group.startswith(tuple(wanted))]
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(report(try_all(chosen, prepare(Path(temporary)))))
