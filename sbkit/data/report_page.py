"""The report of a run's data, as JSON and as one HTML page that loads nothing from elsewhere."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets

from sbkit.base.files import to_json, write_text_atomically
from sbkit.data.players import encode_clips
from sbkit.data.report import measure_data
from sbkit.data.splits import Splits
from sbkit.logs.page import render_page

NAME = "data_report"
LONGEST_PLAYED = 20  # seconds of an example


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
    title = f"Data of this run: {', '.join(facts['splits'])}"
    content = render_page("data_report.html.j2", facts=facts, players=players, title=title)
    write_text_atomically(page, content)
    return data, page


def _players(
    unused: datasets.Dataset, facts: Mapping[str, Any], sample_rate: int
) -> dict[tuple[str, str], str]:
    """Return MP3 in base64 of the examples whose audio is there, by split and id."""
    wanted = [
        example["id"]
        for each in facts["left_out"]
        if each["split"] == "train"
        for example in each["examples"]
    ]
    clips = encode_clips(unused, wanted, sample_rate=sample_rate, longest=LONGEST_PLAYED)
    return {("train", id): clip for id, clip in clips.items()}
