"""A comparison of two runs as a page: the report of both, side by side."""

from pathlib import Path

from jinja2 import TemplateError

from sbkit.base.errors import SbkitError
from sbkit.base.printable import printable
from sbkit.inference.compare import RunComparison, read_figures
from sbkit.inference.compare_report import comparison_figures, describe_test
from sbkit.logs.report import REPORT, write_report
from sbkit.logs.report_clips import read_clips
from sbkit.logs.run_results import read_results


def write_comparison(file: Path, compared: RunComparison, a: Path, b: Path) -> None:
    """Write the page; what can be heard is what the reports of ``a`` and ``b`` hold.

    Raises:
        SbkitError: a file of either is not what its name says.
    """
    heard = [read_clips(folder / REPORT) for folder in (a, b)]

    def clips(name: str, ids: list[str], most: int) -> dict[str, str]:
        known = {id: clip for each in reversed(heard) for id, clip in each.get(name, {}).items()}
        found: dict[str, str] = {}
        for id in ids:
            if id in known and (most := most - len(known[id])) >= 0:
                found[id] = known[id]
        return found

    try:
        write_report(
            file,
            [read_results(folder, read_figures(folder)) for folder in (a, b)],
            clips=clips,
            compared=comparison_figures(compared, a, b)["test"],
            notes=[f"{each.name}: {describe_test(each.mapsswe)}" for each in compared.test],
        )
    except (TypeError, ValueError, KeyError, AttributeError, TemplateError) as error:
        raise SbkitError(
            f"The figures, log and data report in {a} and {b} must be as sbkit wrote them, but "
            f"one is not ({printable(str(error))[:200]}). Score again: sbkit score RUN DATA "
            "--out DIR."
        ) from error
