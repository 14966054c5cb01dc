"""The settings of compared runs, and those that differ.

A run has the values of its YAML by dotted path; `sbkit score --out` records those of its model.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from sbkit.base.messages import short_value
from sbkit.evaluate.run_results import RUN_CONFIG_FILE, SCORES

SETTINGS = "settings"  # in SCORES
OUTPUT_FOLDER = "output_folder"  # a key of every run's YAML
NO_SETTING = ("<", "!apply:")  # the beginnings of paths in the run folder, and of computed values

Settings = Mapping[str, Any]  # by dotted path


def read_settings(folder: Path) -> Settings:
    """Return the settings of a run or of the model of scores; {} if they are not known."""
    for name, key in ((RUN_CONFIG_FILE, "values"), (SCORES, SETTINGS)):
        if (folder / name).exists():
            settings: Settings = json.loads((folder / name).read_bytes()).get(key, {})
            return settings
    return {}


def differing_settings(runs: Mapping[str, Settings]) -> dict[str, dict[str, Any]]:
    """Return the value of each differing setting in each run that has it, by the runs' names.

    A value within an object that follows from a setting is left out: `CNN.d_model` of `d_model`.
    """
    have_knobs = all(OUTPUT_FOLDER in settings for settings in runs.values())
    differing: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(chain.from_iterable(runs.values())):
        values = {run: settings[name] for run, settings in runs.items() if name in settings}
        is_everywhere = len(values) == len(runs)
        is_comparable = is_everywhere or len(values) > 1 or have_knobs
        is_equal = all(value == next(iter(values.values())) for value in values.values())
        if (is_equal and (is_everywhere or not have_knobs)) or not is_comparable:
            continue
        if name == OUTPUT_FOLDER or any(str(v).startswith(NO_SETTING) for v in values.values()):
            continue
        if "." not in name or (is_everywhere and not _follows(name, values, differing)):
            differing[name] = values
    return differing


def _follows(name: str, values: Settings, differing: Mapping[str, Settings]) -> bool:
    """Return whether a setting has the values of another that differs, by a reference to it."""
    is_telling = not any(isinstance(value, bool | None) for value in values.values())
    last = name.rpartition(".")[2]
    return any(
        values == others and (is_telling or last == other.rpartition(".")[2])
        for other, others in differing.items()
    )


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
