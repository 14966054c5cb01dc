"""Try every attack: python -m tests.attacks [GROUP...]

Prints how many were tried, refused and accepted as harmless; leaves with 1 if one ran code, ended
in a traceback or a crash, hung, or took memory without bound.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.attacks.audio import all_audio
from tests.attacks.bundles import all_bundles
from tests.attacks.case import Case, Place
from tests.attacks.decoders import all_decoders
from tests.attacks.inputs import all_inputs
from tests.attacks.resumes import all_resumes
from tests.attacks.runner import GOOD, HARMLESS, REFUSED, Outcome, attack, prepare
from tests.attacks.runs import all_runs
from tests.attacks.yamls import all_yamls


def all_cases() -> list[Case]:
    """List every attack."""
    return [
        *all_bundles(),
        *all_decoders(),
        *all_yamls(),
        *all_runs(),
        *all_audio(),
        *all_inputs(),
        *all_resumes(),
    ]


def try_all(cases: Sequence[Case], healthy: Place) -> list[tuple[Case, Outcome]]:
    """Attack copies of what `prepare` made, with each case in a process of its own."""
    folder = healthy.folder.parent
    return [(case, attack(case, healthy, folder / f"case{n}")) for n, case in enumerate(cases)]


def report(found: Sequence[tuple[Case, Outcome]]) -> int:
    """Print the counts, and what was not withstood; return the exit code."""
    counts = Counter(outcome.kind for _, outcome in found)
    for case, outcome in found:
        if outcome.kind not in GOOD:
            print(f"{outcome.kind}: [{case.group}] {case.name}: {outcome.detail}")
    failed = sum(count for kind, count in counts.items() if kind not in GOOD)
    print(
        f"tried {len(found)}, refused {counts[REFUSED]}, "
        f"accepted as harmless {counts[HARMLESS]}, not withstood {failed}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    wanted = sys.argv[1:]
    chosen = [case for case in all_cases() if not wanted or case.group.startswith(tuple(wanted))]
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(report(try_all(chosen, prepare(Path(temporary)))))
