"""`sbkit check`: everything that would go wrong in a run, found before its first step."""

from typing import TYPE_CHECKING

from sbkit.base.imports import lazy_names

if TYPE_CHECKING:
    from sbkit.check.check import check_planned_run as check_planned_run
    from sbkit.check.planned_run import Finding as Finding
    from sbkit.check.planned_run import PlannedRun as PlannedRun

__getattr__, __dir__ = lazy_names(
    "sbkit.check", Finding="planned_run", PlannedRun="planned_run", check_planned_run="check"
)
