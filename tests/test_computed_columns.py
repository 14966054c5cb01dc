"""A recipe reports its test by columns that it computes from audio and texts."""

import csv
from pathlib import Path

import pytest

from tests.runs import ROOT, Workplace, read_json

RECIPE = """
import numpy as np

from recipes.asr.recipe import AsrRecipe
from recipes.prepare import with_column
from sbkit.data.shard import read_rows


def noise_levels(split):
    for row in read_rows(split, range(len(split))):
        windows = np.array_split(row["audio"].astype(float), max(1, len(row["audio"]) // 400))
        levels = [10 * np.log10(np.mean(window**2) + 1) for window in windows]
        yield "clean" if np.ptp(np.percentile(levels, [10, 90])) > 15 else "noisy"


def rates_of_speech(split):
    for row in read_rows(split, range(len(split))):
        per_second = 16_000 * len(row["text"]) / len(row["audio"])
        yield "fast" if per_second > 14 else "slow"


class Reported(AsrRecipe):
    def prepare_splits(self, settings):
        splits = super().prepare_splits(settings)
        splits = with_column(splits, "noise", noise_levels, identity=[400, 15])
        return with_column(splits, "rate", rates_of_speech, identity=[14])
"""


@pytest.mark.slow
def test_run_and_score_report_by_noise_and_rate_of_speech(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reported.py").write_text(RECIPE)
    yaml = tmp_path / "reported.yaml"
    lines = (
        f"base: {ROOT}/hparams/ctc.yaml",
        "recipe: reported.Reported",
        "report_by: [noise, rate]",
    )
    yaml.write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    assert workplace.train_here(tmp_path / "run", "--number_of_epochs=1", yaml=yaml) == 0
    figures = read_json(tmp_path / "run/summary.json")["test"]["test"]
    assert {*figures["report_by"]} == {"noise", "rate"}
    assert {*figures["report_by"]["noise"]} <= {"clean", "noisy"}
    for column in ("noise", "rate"):
        slices = figures["report_by"][column].values()
        assert sum(part["utterances"] for part in slices) == figures["utterances"]
    with (tmp_path / "run/report_by_test.tsv").open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file, delimiter="\t")]
    assert {row["column"] for row in rows} == {"noise", "rate"}
    options = ("--report-by", "rate", "--import", "reported", "--out", "scores")
    assert workplace.sbkit("score", "run", *options) == 0
    assert (tmp_path / "scores/report_by_test.tsv").is_file()
