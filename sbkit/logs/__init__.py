"""The logs of a run: messages, figures, curves, progress, and report pages."""

from typing import TYPE_CHECKING

from sbkit.base.imports import lazy_names

if TYPE_CHECKING:
    from sbkit.logs.handlers import log_to_screen as log_to_screen
    from sbkit.logs.metric import Metric as Metric
    from sbkit.logs.progress import progress_bar as progress_bar
    from sbkit.logs.run_log import read_log as read_log

__getattr__, __dir__ = lazy_names(
    "sbkit.logs",
    Metric="metric",
    log_to_screen="handlers",
    progress_bar="progress",
    read_log="run_log",
)
