"""The report of a run's data, as JSON and as one HTML page that loads nothing from elsewhere."""

import base64
import io
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import datasets
import jinja2
import numpy as np
import soundfile

from sbkit.base.errors import SbkitError
from sbkit.base.files import to_json, write_text_atomically
from sbkit.data.audio_store import read_rows, read_stored
from sbkit.data.columns import take_columns
from sbkit.data.report import measure_data
from sbkit.data.splits import Splits

NAME = "data_report"
LONGEST_PLAYED = 20  # seconds of an example
MPEG_RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)  # Hz


def write_data_report(
    splits: Splits, folder: Path, *, sample_rate: int, language: object
) -> tuple[Path, Path]:
    """Write ``data_report.json`` and ``data_report.html``; return both paths.

    Examples of what is left out for its length can be played.
    """
    facts = measure_data(splits, sample_rate=sample_rate, language=language)
    folder.mkdir(parents=True, exist_ok=True)
    data, page = folder / f"{NAME}.json", folder / f"{NAME}.html"
    write_text_atomically(data, to_json(facts, indent=2) + "\n")
    players = {} if splits.unused is None else _players(splits.unused, facts, sample_rate)
    write_text_atomically(page, _render(facts, players))
    return data, page


def _render(facts: Mapping[str, Any], players: Mapping[tuple[str, str], str]) -> str:
    """Fill in the page; what comes from the data is escaped."""
    source = files("sbkit.data").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    names = ", ".join(facts["splits"])
    return environment.from_string(source).render(
        facts=facts, players=players, title=f"Data of this run: {names}"
    )


def _players(
    unused: datasets.Dataset, facts: Mapping[str, Any], sample_rate: int
) -> dict[tuple[str, str], str]:
    """Return MP3 in base64 of the examples whose audio is there, by split and id."""
    if sample_rate not in MPEG_RATES:
        return {}
    wanted = {
        example["id"]
        for each in facts["left_out"]
        if each["split"] == "train"
        for example in each["examples"]
    }
    found = {}
    for row, utterance in enumerate(take_columns(unused, "id")["id"].to_pylist()):
        if utterance in wanted:
            try:
                (clip,) = read_rows(unused, [row])
                audio = np.frombuffer(read_stored(clip), "<i2")
            except SbkitError:
                continue
            found["train", utterance] = _mp3(audio[: LONGEST_PLAYED * sample_rate], sample_rate)
    return found


def _mp3(samples: np.ndarray[Any, np.dtype[np.int16]], sample_rate: int) -> str:
    content = io.BytesIO()
    soundfile.write(content, samples, sample_rate, format="MP3")
    return base64.b64encode(content.getvalue()).decode()
