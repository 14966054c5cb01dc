"""What runs and folders of scores record about themselves, such as ``summary.json``."""

from pathlib import Path

from sbkit.base.errors import BundleError
from sbkit.base.files import RUN_CONFIG_FILE
from sbkit.evaluate.provenance import describe_difference, read_json
from sbkit.evaluate.wer import FigureDict
from sbkit.evaluate.wer_report import PROVENANCE

SUMMARY = "summary.json"  # of a run, and of `sbkit score --out`
BUNDLE_CONFIG = "bundle/config.json"  # of a run
DATA_REPORT = "data_report.json"
SETTINGS = "values"  # in RUN_CONFIG_FILE and SUMMARY: the values of a YAML by dotted path


def read_results(folder: Path) -> FigureDict:
    """Return the `summary.json` of a run or a folder of scores, for all that tell its figures.

    `sbkit tune` may have replaced the decoder that it was measured with.
    """
    summary, config = read_json(folder / SUMMARY), read_json(folder / BUNDLE_CONFIG)
    if summary is None:
        raise BundleError(
            f"{folder} has no scores yet. Finish the run, or measure its model: sbkit score "
            f"{folder} --out DIR"
        )
    results: FigureDict = summary
    current = None if config is None else config.get(PROVENANCE)
    if difference := describe_difference(results.get(PROVENANCE), current):
        raise BundleError(
            f"The scores in {folder} are those of another decoder or model: {difference}. Call "
            f"`test()` of the run, or measure its model: sbkit score {folder} --out DIR"
        )
    return results


def read_records(folder: Path) -> FigureDict:
    """Return all that a run or a folder of scores records in JSON; {} without any such file."""
    records = [read_json(folder / name) or {} for name in (RUN_CONFIG_FILE, SUMMARY)]
    return {name: value for record in records for name, value in record.items()}
