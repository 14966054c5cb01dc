"""A sampler with a state plans the same steps on any hardware, and after a resume."""

import re
import sys
from pathlib import Path

import pytest
import torch

from sbkit.base.errors import ASKED_TO_STOP, BAD_INPUT
from tests.runs import Workplace, last_parameters, records_of, stopped_after, with_sgd

RECIPE = '''
from recipes.asr.brain import AsrBrain
from recipes.asr.recipe import AsrRecipe
from sbkit.distributed.ranks import gather_over_ranks


class Pruned:
    """Leave out the clips of the highest loss so far."""

    def __init__(self, default, ids, share):
        self.default, self.seed, self.ids, self.share = default, default.seed, ids, share
        self.losses = {}

    def set_epoch(self, epoch):
        self.default.set_epoch(epoch)

    def steps(self):
        ranked = sorted(self.losses, key=self.losses.get)
        dropped = {*ranked[int(len(ranked) * (1 - self.share)) :]}
        kept = [[e for e in s if self.ids[e.rows[0]] not in dropped] for s in self.default.steps()]
        return [step for step in kept if step]

    def state_dict(self):
        return {"losses": self.losses}

    def load_state_dict(self, state):
        self.losses = dict(state["losses"])


class PruningBrain(AsrBrain):
    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        rows = zip(batch.ids, batch.weights.tolist(), loss.sums.tolist(), strict=True)
        seen = {id: value for id, weight, value in rows if weight}
        sampler = self.loaders.train.batch_sampler.sampler
        for losses in gather_over_ranks(seen):
            sampler.losses.update(losses)
        self.log("rows", batch.weights)


class PruningRecipe(AsrRecipe):
    brain = PruningBrain

    def make_sampler(self, hparams, splits, default):
        return Pruned(default, splits.train["id"], hparams["prune"])
'''
OPTIONS = (
    *("--dropout=0", "--lr=0.05", "--max_grad_norm=1000", "--batch_seconds=4", "--concat_prob=0"),
    *("--number_of_epochs=3", "--log_every=1", "--speeds=[1.0]"),
)


def write(folder: Path, monkeypatch: pytest.MonkeyPatch, old: str = "", new: str = "") -> Path:
    monkeypatch.delitem(sys.modules, "my_pruning", raising=False)  # of another case
    assert old in RECIPE
    (folder / "my_pruning.py").write_text(RECIPE.replace(old, new) if old else RECIPE)
    yaml = with_sgd("ctc", folder)
    text = yaml.read_text().replace("recipes.asr.recipe.AsrRecipe", "my_pruning.PruningRecipe")
    yaml.write_text(text + "\nprune: 0.4\n")
    return yaml


@pytest.mark.slow
def test_state_of_a_sampler_is_resumed_within_an_epoch(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    yaml = write(tmp_path, monkeypatch)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert workplace.train_here(whole, *OPTIONS, yaml=yaml) == 0
    steps = records_of(whole, "step")
    counts = [sum(step["epoch"] == epoch for step in steps) for epoch in (1, 2)]
    assert counts[0] > counts[1] > 1
    for stop in (counts[0] + 1, sum(counts) + 1):  # in the second epoch and in the third
        with stopped_after(stop):
            assert workplace.train_here(resumed, *OPTIONS, yaml=yaml) == ASKED_TO_STOP
    assert workplace.train_here(resumed, *OPTIONS, yaml=yaml) == 0
    ends = [last_parameters(run) for run in (whole, resumed)]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    assert [s["loss"] for s in records_of(resumed, "step")] == [s["loss"] for s in steps]


@pytest.mark.slow
@pytest.mark.ddp
def test_two_ranks_plan_alike_or_are_refused(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    yaml = write(tmp_path, monkeypatch)
    epochs = ("--number_of_epochs=2", "--check=false")
    one, two = workplace.parameters_by_ranks(tmp_path, *OPTIONS, *epochs, yaml=yaml)
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-4
    yaml = write(tmp_path, monkeypatch, "gather_over_ranks(seen)", "[seen]")
    words = (*OPTIONS, *epochs)
    process = workplace.train_forked(tmp_path / "alone", *words, ranks=2, yaml=yaml)
    assert process.returncode == BAD_INPUT
    assert "plans other steps of epoch 2 on other processes" in process.stderr


def test_state_that_no_checkpoint_holds_is_refused(
    workplace: Workplace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    yaml = write(tmp_path, monkeypatch, "def state_dict", "def my_state")
    options = (*OPTIONS, "--check=True")
    assert workplace.train_here(tmp_path / "run", *options, yaml=yaml) == BAD_INPUT
    printed = " ".join(capsys.readouterr().err.split())
    assert re.search("epoch 3 in two ways.*`state_dict` and `load_state_dict`", printed)
