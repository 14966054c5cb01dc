"""Evaluation: error rates with intervals, comparisons of runs, calibration and reports.

Counts are added over a test set and divided once.
"""

from typing import TYPE_CHECKING

from sbkit.base.imports import lazy_names

if TYPE_CHECKING:
    from sbkit.evaluate.calibration import Calibration as Calibration
    from sbkit.evaluate.compare import compare_runs as compare_runs
    from sbkit.evaluate.intervals import Interval as Interval
    from sbkit.evaluate.report import write_report as write_report
    from sbkit.evaluate.wer import ErrorCounts as ErrorCounts
    from sbkit.evaluate.wer import ScoredUtterance as ScoredUtterance
    from sbkit.evaluate.wer import TextErrors as TextErrors
    from sbkit.evaluate.wer import count_errors as count_errors

__getattr__, __dir__ = lazy_names(
    "sbkit.evaluate",
    Calibration="calibration",
    ErrorCounts="wer",
    Interval="intervals",
    ScoredUtterance="wer",
    TextErrors="wer",
    compare_runs="compare",
    count_errors="wer",
    write_report="report",
)
