"""Read the records that runs and folders of scores contain, such as ``summary.json``."""

import json
from pathlib import Path
from typing import Any

from sbkit.base.errors import BundleError
from sbkit.base.files import parsing_errors, read_file
from sbkit.evaluate.wer import FigureDict

SUMMARY = "summary.json"  # of a run, and of `sbkit score --out`
BUNDLE_CONFIG = "bundle/config.json"  # of a run
BEFORE_TRAINING = "before_training.json"  # of a run: the scores of the initial model
DATA_REPORT = "data_report.json"
SETTINGS_FIELD = "values"  # in RUN_CONFIG_FILE and SUMMARY: the values of a YAML by dotted path
PROVENANCE = "provenance"  # in SUMMARY: the weights and the decoder that were measured


def read_json(file: Path) -> Any:
    """Read a JSON file that training wrote into a run folder; None if it is not there."""
    if not file.exists():
        return None
    with parsing_errors(file, "be what sbkit wrote", fix="Restore it.", is_json=True):
        return json.loads(read_file(file))


def ends_with_start(run: Path) -> bool:
    """Return whether the bundle of a run has the weights that the run started from."""
    config = read_json(run / BUNDLE_CONFIG) or {}
    return config.get("checkpoints") == []


def read_results(folder: Path) -> FigureDict:
    """Return the `summary.json` of a run or a folder of scores."""
    results: FigureDict | None = read_json(folder / SUMMARY)
    if results is None:
        raise BundleError(
            f"{folder} has no scores yet. Finish the run by its command, `train()` or `test()`, or "
            f"measure its model: sbkit score {folder} --out DIR"
        )
    return results
