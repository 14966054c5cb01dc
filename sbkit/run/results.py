"""Whether the results in a run folder are those of its bundle."""

from pathlib import Path

from sbkit.base.errors import BundleError
from sbkit.bundle.config import CONFIG_FILE
from sbkit.checkpoint.provenance import describe_difference, read_json
from sbkit.checkpoint.run_config import BUNDLE, RUN_YAML
from sbkit.evaluate.run_results import SUMMARY
from sbkit.evaluate.wer_report import PROVENANCE


def require_current_results(folder: Path) -> None:
    """Raise BundleError if a run has no results, or if its bundle has another decoder now."""
    config, summary = read_json(folder / BUNDLE / CONFIG_FILE), read_json(folder / SUMMARY)
    if summary is None and (folder / RUN_YAML).exists():
        raise BundleError(
            f"{folder} has no scores yet. Finish the run, or measure its model: sbkit score "
            f"{folder} --out DIR"
        )
    if config is None or summary is None:
        return
    difference = describe_difference(summary.get(PROVENANCE), config.get(PROVENANCE))
    if difference is not None:
        raise BundleError(
            f"The scores in {folder} are outdated: {difference}. Measure them again: sbkit score "
            f"{folder} --out DIR"
        )
