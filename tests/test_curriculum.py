"""A recipe that plans its own steps trains on any hardware, and resumes within an epoch."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sbkit.base.errors import ASKED_TO_STOP
from tests.runs import ROOT, Workplace, last_parameters, records_of, stopped_after, with_sgd

USER_PARTS = ROOT / "tests/user_parts"
RECIPE = (
    (USER_PARTS / "my_curriculum.py")
    .read_text("utf-8")
    .replace(  # ranks log other names
        'self.log("seconds", batch.seconds, batch.weights)',
        'for name in [f"of_rank_{rank()}", "rows"][:: 1 - 2 * rank()]: '
        "self.log(name, batch.weights, int(should_step))",
    )
)
IMPORTS = """
import random
from dataclasses import replace
from torch.utils.data import DataLoader
from sbkit.distributed.ranks import rank
"""
OWN_LOADER = """
    def make_loaders(self, *arguments):
        return replace(AsrRecipe.make_loaders(*arguments), train=DataLoader([0]))
    brain ="""
OPTIONS = ("--check=false", "--dropout=0", "--lr=0.05", "--max_grad_norm=1000", "--batch_seconds=4")


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    (tmp_path / "my_curriculum.py").write_text(IMPORTS + RECIPE)
    yaml = with_sgd("ctc", tmp_path)
    text = yaml.read_text().replace("recipes.asr.recipe.AsrRecipe", "my_curriculum.Curriculum")
    yaml.write_text(text + "\nsorted_epochs: 1\n")
    return yaml


@pytest.mark.slow
@pytest.mark.ddp
def test_two_ranks_take_the_steps_of_one(workplace: Workplace, tmp_path: Path, yaml: Path) -> None:
    one, two = workplace.parameters_by_ranks(tmp_path, *OPTIONS, yaml=yaml)
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-5
    single, shared = (records_of(tmp_path / run, "step") for run in "12")
    assert [record["rows"] for record in single] == sorted(record["rows"] for record in single)
    for alone, together in zip(single, shared, strict=True):
        for name in ("loss", "ctc", "attention", "grad_norm"):
            assert together[name] == pytest.approx(alone[name], rel=1e-4), name
        means = together["of_rank_0"], together["of_rank_1"]  # each rank has one share of the step
        assert (alone["rows"], together["rows"]) == pytest.approx((sum(means), np.mean(means)))


@pytest.mark.slow
def test_curriculum_resumes_in_an_epoch(workplace: Workplace, tmp_path: Path, yaml: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    options = (*OPTIONS, "--number_of_epochs=2", "--log_every=3", "--grad_accumulation_factor=2")
    assert workplace.train_here(whole, *options, yaml=yaml) == 0
    with stopped_after(4):
        assert workplace.train_here(resumed, *options, yaml=yaml) == ASKED_TO_STOP
    assert workplace.train_here(resumed, *options, yaml=yaml) == 0
    ends = [last_parameters(run) for run in (whole, resumed)]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    rows = [[r["rows"] for r in records_of(run, "step")] for run in (whole, resumed)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("def steps(", "def step(", r"must return .* ShortFirst lacks one of them"),
        ("default.seed, epochs", "1, epochs", r"`seed` \(the run's seed, \d+\)"),
        ("brain =", OWN_LOADER, "`make_sampler` of the recipe has no effect"),
        ("// 2]", "// len(steps) - 1]", "an epoch without steps"),
        ("example.samples for", "random.random() for", "epoch 4 in two ways"),
    ],
)
def test_sampler_that_does_not_fit_is_refused(
    workplace: Workplace,
    tmp_path: Path,
    yaml: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    old: str,
    new: str,
    sentence: str,
) -> None:
    monkeypatch.delitem(sys.modules, "my_curriculum", raising=False)  # of another case
    (tmp_path / "my_curriculum.py").write_text(IMPORTS + RECIPE.replace(old, new))
    workplace.train_here(tmp_path / "run", *OPTIONS, "--check=true", "--sorted_epochs=4", yaml=yaml)
    assert re.search(sentence, " ".join(capsys.readouterr().err.split()))
