"""Each part that may learn gets a gradient, whichever settings turn losses off."""

import json
from pathlib import Path
from typing import Any

import pytest

from sbkit.check import dry_run
from sbkit.check.dry_run import check_steps, check_unused
from tests.check.harness import checked_run
from tests.models.pretrained.folders import CONFIGS, FRAMES
from tests.runs import ROOT, TINY, TINY_CODEC, TINY_VOICE, Workplace

IGNORED = "ignore:Support for mismatched:UserWarning"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(IGNORED)]

SETTINGS: Any = {"ctc": TINY, "ctc_speechbrain": TINY, "codec": TINY_CODEC, "tts": TINY_VOICE}
MIDDLE = "ctc --ctc_weight=1 --num_decoder_layers=0"
DECODER = "Transformer.decoder,Transformer.embedding,Transformer.decoder_norm,seq_lin"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("ctc --ctc_weight=1.0", "`Transformer.decoder_norm` cannot learn with `ctc_weight: 1.0`"),
        (MIDDLE, None),
        (f"{MIDDLE} --inter_ctc_weight=0", "`seq_lin` cannot learn with `inter_ctc_weight: 0"),
        (f"{MIDDLE} --inter_ctc_weight=0 --freeze=[seq_lin]", None),
        (f"{MIDDLE} --freeze=[CNN]", None),
        (f"ctc --ctc_weight=1 --freeze=[{DECODER}]", None),
        ('ctc --freeze={"CNN":1000}', None),
        ("ctc_speechbrain --ctc_weight=1.0", "`Transformer.decoder`, `Transformer.custom_tgt"),
        ("codec --adversarial_weight=0.1", None),
        ("codec --mel_weight=0 --spectral_weight=0", "`decoder` cannot learn with `mel_weight: 0"),
        ("tts --align_weight=0.0", "`aligner` cannot learn with `align_weight: 0.0`"),
    ],
)
def test_part_without_a_loss_is_named_with_the_key(
    options: str, problem: str | None, workplace: Workplace, tmp_path: Path
) -> None:
    name, *words = options.split()
    declared: Any = {"yaml": ROOT / f"hparams/{name}.yaml", "tiny": SETTINGS[name], "recipe": None}
    with checked_run(workplace, tmp_path / "run", *words, **declared) as run:
        findings = [*check_steps(run), *check_unused(run)]
        learning = {id(p) for p in run.model.parameters() if p.requires_grad}
    assert len(findings) == (problem is not None)
    for finding in findings:
        assert str(problem) in finding.problem and finding.stops
    assert (learning == run.dry_run.trained - run.dry_run.zero) is (problem is None)


@pytest.mark.parametrize(("layerdrop", "max_steps"), [(0.8, dry_run.MAX_STEPS), (0.5, 2)])
def test_layer_that_steps_skip_is_not_blamed_on_another_key(
    layerdrop: float,
    max_steps: int,
    workplace: Workplace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each layer learns within the steps; if not, a step with another draw says nothing."""
    monkeypatch.setattr(dry_run, "MAX_STEPS", max_steps)
    encoder = {"model_type": "hubert", **CONFIGS["hubert"], **FRAMES, "num_hidden_layers": 12}
    tiny = ("--device=cpu", "--word_lm_order=0", "--token_lm_order=0", "--mask_channel_prob=0")
    options = (f"--layerdrop={layerdrop}", f"--encoder_config={json.dumps(encoder)}")
    declared: Any = {"yaml": ROOT / "hparams/ctc_pretrained.yaml", "tiny": tiny, "recipe": None}
    with checked_run(workplace, tmp_path / "run", *options, **declared) as run:
        findings = [*check_steps(run), *check_unused(run)]
        assert bool(run.dry_run.zero) is (max_steps == 2)
    assert not findings
