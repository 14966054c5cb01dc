"""What runs and folders of scores record about themselves, and the settings that differ."""

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from sbkit.base.messages import short_value
from sbkit.evaluate.run_results import RUN_CONFIG_FILE, SUMMARY
from sbkit.evaluate.wer import FigureDict

SETTINGS = "values"  # in RUN_CONFIG_FILE and SUMMARY: the values of a YAML by dotted path
OUTPUT_FOLDER = "output_folder"  # a key of every run's YAML
COMPUTED_PREFIXES = ("<", "!apply:")  # of paths in the run folder, and of computed values

Settings = Mapping[str, Any]


def read_records(folder: Path) -> FigureDict:
    """Return all that a run or a folder of scores records in JSON; {} without any such file."""
    files = [folder / name for name in (RUN_CONFIG_FILE, SUMMARY)]
    records = [json.loads(file.read_bytes()) for file in files if file.exists()]
    return {name: value for record in records for name, value in record.items()}


def differing_settings(runs: Mapping[str, Settings]) -> dict[str, Settings]:
    """Return the value of each differing setting in each run, by the runs' names; null if missing.

    A value within an object that follows from a setting is left out: `CNN.d_model` of `d_model`.
    Beside a bundle, which knows a few settings only, these are compared.
    """
    differing: dict[str, Settings] = {}
    are_runs = all(OUTPUT_FOLDER in settings for settings in runs.values())
    names = dict.fromkeys(chain.from_iterable(runs.values()))
    if not are_runs:
        names = {name: None for name in names if all(name in values for values in runs.values())}
    for name in sorted(names, key=lambda name: "." in name):  # settings before what follows
        values = {run: settings.get(name) for run, settings in runs.items()}
        first, *others = values.values()
        is_same = others == [first] * len(others)
        is_computed = any(str(value).startswith(COMPUTED_PREFIXES) for value in values.values())
        causes = [differing[cause] for cause in differing if "." not in cause]
        # Two settings may well change from false to true, but not from 144 to 96.
        is_distinctive = not any(value in (True, False, None) for value in values.values())
        follows = "." in name and is_distinctive and values in causes
        if not (is_same or is_computed or follows or name == OUTPUT_FOLDER):
            differing[name] = values
    return differing


def describe_settings(differing: Mapping[str, Settings]) -> Iterator[str]:
    """Yield a line for each differing setting: `lr: 0.0025 in A and C, 0.001 in B`."""
    if differing:
        yield "settings that differ:"
    for name, values in differing.items():
        runs_of: dict[str, list[str]] = {}
        for run, value in values.items():
            runs_of.setdefault(short_value(value), []).append(run)
        texts = (f"{value} in {' and '.join(runs)}" for value, runs in runs_of.items())
        yield f"  {name}: {', '.join(texts)}"
