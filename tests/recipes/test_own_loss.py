"""The examples of new losses: two views of each batch, and the frames of a frozen teacher."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import soundfile
import torch
from speechbrain import Stage

from docs.examples.two_views import TwoViewsBrain, divergence_of
from sbkit.audio.random_draws import seeded_draws
from sbkit.base.errors import BAD_INPUT
from sbkit.check.checked_run import CPU_OPTIONS
from sbkit.check.dry_run import short_rows
from sbkit.commands.cli import run as sbkit
from sbkit.data.batch import TextBatch
from sbkit.models.encoder import Predictions
from sbkit.runtime.runtimes import load_bundle
from sbkit.train.brain import training_loss
from sbkit.train.setup import build_again, make_brain
from tests.check.harness import checked_run
from tests.models.pretrained.folders import FRAMES, make_folder
from tests.runs import ROOT, TINY, Workplace, read_json

YAML = """
base: {base}
recipe: docs.examples.two_views.TwoViews
consistency_weight: 0.3
"""
MASKED_BY_ENCODER = ("--device=cpu", "--activation_dropout=0.0", "--mask_channel_length=4")


@pytest.mark.parametrize("name", ["ctc", "ctc_pretrained"])
@torch.no_grad()
def test_loss_equals_a_loop_over_clips(name: str, workplace: Workplace, tmp_path: Path) -> None:
    yaml = tmp_path / "two_views.yaml"
    yaml.write_text(YAML.format(base=ROOT / f"hparams/{name}.yaml"))
    tiny: Any = TINY
    if name == "ctc_pretrained":
        folder = make_folder(tmp_path / "tiny", **FRAMES)
        tiny = (*MASKED_BY_ENCODER, f"--pretrained={folder}")
    options: Any = {"recipe": None, "yaml": yaml, "tiny": tiny}
    with checked_run(workplace, tmp_path / "run", "--dropout=0", **options) as run:
        brain = cast(TwoViewsBrain, make_brain(build_again(run.copy), **CPU_OPTIONS))
        rows, collate = short_rows(run.copy), run.copy.loaders.train.collate_fn
        batch = cast(TextBatch, collate(rows))
    brain.modules.train()
    with seeded_draws(batch.ids):
        loss = training_loss(brain, batch)
    for row, id in enumerate(batch.ids):
        alone = collate([rows[row]])
        with seeded_draws([id]):
            views = brain.compute_forward(alone, Stage.TRAIN)
        losses = [
            super(TwoViewsBrain, brain).compute_objectives(view, alone, Stage.TRAIN)
            for view in views
        ]
        p, q = (view.log_probs[0, : view.frame_lengths[0]] for view in views)
        divergence = 0.5 * (q.exp() * (q - p) + p.exp() * (p - q)).sum()
        assert divergence > 0
        expected = (losses[0].sums[0] + losses[1].sums[0]) / 2 + 0.3 * divergence
        torch.testing.assert_close(loss.sums[row], expected, rtol=1e-4, atol=0)
    with seeded_draws(batch.ids):
        filled = training_loss(brain, replace(batch, weights=torch.tensor([1.0, 0.0])))
    assert filled.counts.tolist() == [loss.counts[0], 0]
    assert filled.sums.tolist() == [loss.sums[0], 0.0]
    assert isinstance(brain.compute_forward(batch, Stage.VALID), Predictions)


def test_divergence_has_no_gradient_of_targets_or_padding() -> None:
    torch.manual_seed(0)
    views = [torch.randn(2, 3, 4).log_softmax(-1).requires_grad_() for _ in range(2)]
    frames = torch.tensor([3, 1])
    first, second = (SimpleNamespace(log_probs=view, frame_lengths=frames) for view in views)
    divergence_of(cast(Predictions, first), cast(Predictions, second)).sum().backward()
    is_frame = torch.arange(3) < frames.unsqueeze(1)
    for view, other in (views, views[::-1]):
        expected = -0.5 * other.detach().exp() * is_frame.unsqueeze(2)
        torch.testing.assert_close(view.grad, expected)


@pytest.mark.slow
def test_student_is_resumed_with_its_teacher_and_exported_without(
    workplace: Workplace, plain_bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    teacher, run, ctc = tmp_path / "teacher", tmp_path / "run", ("--ctc_weight=1", "--check=True")

    def train(run: Path, *options: str, **yaml: Path) -> int:
        return workplace.train_here(run, *ctc, "--num_decoder_layers=0", *options, **yaml)

    def distill(*options: str) -> int:
        yaml = ROOT / "docs/examples/distillation/distillation.yaml"
        return train(run, f"--teacher={teacher}", *options, yaml=yaml)

    for seed, name in enumerate(("first", "other")):
        assert train(tmp_path / name, f"--seed={seed}", "--number_of_epochs=1") == 0
    shutil.copytree(tmp_path / "first/bundle", teacher)
    assert distill(f"--teacher={plain_bundle}") == BAD_INPUT
    assert "has other tokens than this run. Copy its tokenizer.model" in capfd.readouterr().err
    assert distill() == 0
    digest = read_json(run / "run_config.json")["helpers"]["teacher"]
    assert sbkit(["export", str(run), "--out", str(tmp_path / "student")]) == 0
    audio, _ = soundfile.read(next((workplace.release / "clips").iterdir()), dtype="int16")
    assert len(load_bundle(tmp_path / "student").transcribe([audio])) == 1
    shutil.rmtree(teacher)
    shutil.copytree(tmp_path / "other/bundle", teacher)
    for check in (True, False):
        assert distill("--number_of_epochs=6", f"--check={check}") == BAD_INPUT
        error = capfd.readouterr().err
        assert "teacher: other content of " in error
        assert (f"the helper `teacher`: {digest} before, " in error) == check
