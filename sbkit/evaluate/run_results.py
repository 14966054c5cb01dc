"""What runs and folders of scores record about themselves, such as ``summary.json``."""

import json
from pathlib import Path

from sbkit.evaluate.wer import FigureDict

SUMMARY = "summary.json"  # of a run, and of `sbkit score --out`
RUN_CONFIG_FILE = "run_config.json"  # what a run was begun with
DATA_REPORT = "data_report.json"
SETTINGS = "values"  # in RUN_CONFIG_FILE and SUMMARY: the values of a YAML by dotted path


def read_records(folder: Path) -> FigureDict:
    """Return all that a run or a folder of scores records in JSON; {} without any such file."""
    files = [folder / name for name in (RUN_CONFIG_FILE, SUMMARY)]
    records = [json.loads(file.read_bytes()) for file in files if file.exists()]
    return {name: value for record in records for name, value in record.items()}
