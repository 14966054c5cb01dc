"""What runs and folders of scores record about themselves, such as ``summary.json``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sbkit.base.files import to_json, write_text_atomically
from sbkit.base.machine import cpu_name, usable_cores
from sbkit.base.versions import git_commit, versions
from sbkit.evaluate.wer import FigureDict

SUMMARY = "summary.json"  # of a run, and of `sbkit score --out`
RUN_CONFIG_FILE = "run_config.json"  # what a run was begun with
DATA_REPORT = "data_report.json"
SETTINGS = "values"  # in RUN_CONFIG_FILE and SUMMARY: the values of a YAML by dotted path


def write_summary(path: Path, *, test: Mapping[str, FigureDict], device: str, **facts: Any) -> None:
    """Write the figures of each test set as JSON, with facts about the model and its training.

    device: where the model was tested.
    """
    accelerator = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    summary = {
        "test": test,
        **facts,
        "versions": versions(),
        "git_commit": git_commit(Path(__file__).parent),
        "machine": {
            "cpu": cpu_name(),
            "cores": usable_cores(),
            "device": device,
            "accelerator": accelerator,
        },
    }
    write_text_atomically(path, to_json(summary, indent=2) + "\n")


def read_records(folder: Path) -> FigureDict:
    """Return all that a run or a folder of scores records in JSON; {} without any such file."""
    files = [folder / name for name in (RUN_CONFIG_FILE, SUMMARY)]
    records = [json.loads(file.read_bytes()) for file in files if file.exists()]
    return {name: value for record in records for name, value in record.items()}
