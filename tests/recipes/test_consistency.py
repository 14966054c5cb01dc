"""Consistency-regularized CTC: two views of each batch, and the divergence of their frames."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from speechbrain import Stage

from recipes.asr.recipe import AsrBrain
from sbkit.audio.draws import seeded_draws
from sbkit.base.errors import ConfigError
from sbkit.check.dry_run import small_batch
from sbkit.data.batch import TextBatch
from sbkit.train.brain import training_loss
from sbkit.train.run import Run
from tests.check.harness import planned_run
from tests.models.pretrained.folders import FRAMES, make_folder
from tests.runs import ROOT, TINY, Workplace

CONSISTENT = ("--dropout=0.0", "--consistency_weight=0.3", "--consistency_warmup=0.4")
CTC = ROOT / "hparams/ctc.yaml"
MASKED_BY_ENCODER = ("--device=cpu", "--activation_dropout=0.0", "--mask_channel_length=4")


@pytest.mark.parametrize("name", ["ctc", "ctc_streaming", "ctc_pretrained"])
@torch.no_grad()
def test_loss_equals_a_loop_over_utterances(
    name: str, workplace: Workplace, tmp_path: Path
) -> None:
    options: Any = {"yaml": ROOT / f"hparams/{name}.yaml", "tiny": TINY}
    if name == "ctc_pretrained":
        folder = make_folder(tmp_path / "tiny", **FRAMES)
        options["tiny"] = (*MASKED_BY_ENCODER, f"--pretrained={folder}")
    with planned_run(workplace, tmp_path / "run", *CONSISTENT, **options) as planned:
        brain = cast(AsrBrain, planned.make_cpu_brain())
        batch = cast(TextBatch, small_batch(planned))
    brain.hparams.epoch_counter.current = 1
    brain.epoch_share = brain.hparams.epoch_counter.limit / 10
    weight = 0.3 * brain.hparams.ctc_weight / 4  # a tenth of the run is a quarter of its warm-up
    brain.modules.train()
    with seeded_draws(batch.ids):
        loss = training_loss(brain, batch)
    assert loss.penalty is not None
    for row, id in enumerate(batch.ids):
        alone = batch.take(slice(row, row + 1))
        with seeded_draws([id]):
            first = brain.compute_forward(alone, Stage.TRAIN)
        second = first.second_view
        assert second is not None and len(second.log_probs) == len(first.log_probs) == 1
        p, q = (view.log_probs[0, : view.frame_lengths[0]] for view in (first, second))
        divergence = 0.5 * (q.exp() * (q - p) + p.exp() * (p - q)).sum()
        assert divergence > 0
        torch.testing.assert_close(loss.penalty[row], weight * divergence, rtol=1e-3, atol=0)
        losses = [brain.compute_view_loss(view, alone, Stage.TRAIN) for view in (first, second)]
        expected = (losses[0].sums[0] + losses[1].sums[0]) / 2 + weight * divergence
        torch.testing.assert_close(loss.sums[row], expected, rtol=1e-4, atol=0)
    with seeded_draws(batch.ids):
        filled = training_loss(brain, replace(batch, weights=torch.tensor([1.0, 0.0])))
    assert filled.counts.tolist() == [loss.counts[0], 0]
    assert filled.sums.tolist() == [loss.sums[0], 0.0]
    assert brain.compute_forward(batch, Stage.VALID).second_view is None


def test_yaml_without_the_keys_has_one_view(workplace: Workplace, tmp_path: Path) -> None:
    yaml = tmp_path / "without.yaml"
    yaml.write_text(re.sub(r"(?m)^consistency_.*\n", "", CTC.read_text(encoding="utf-8")))
    with planned_run(workplace, tmp_path / "run", yaml=yaml) as planned:
        assert planned.make_cpu_brain().views == 1


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("consistency_weight", -0.2, "a number of at least 0, but is -0.2. Pass 0 for none."),
        ("consistency_warmup", 1000, "a number from 0 to 1, but is 1000.0. 0 is none, 1 is all."),
    ],
)
def test_values_out_of_range_are_refused(key: str, value: object, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Run(CTC, {key: value}).check_ranges()
    assert str(refused.value) == f"`{key}` must be {text}"
