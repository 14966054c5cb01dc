"""Who owns what in a YAML of SpeechBrain's, whose script is not there."""

from pathlib import Path

import pytest

from sbkit.check.check import check_planned_run
from sbkit.check.model.ownership import check_groups, check_ownership
from sbkit.check.model.shapes import check_shapes
from sbkit.check.model.unused import check_unused
from sbkit.check.planned_run import PlannedRun
from tests.speechbrain_recipe import HPARAMS

LINEAR = "speechbrain.nnet.linear.Linear"


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ("", "", []),
        ("lr: 0.002", f"lr: 0.002\nlm: !new:{LINEAR} {{n_neurons: 3, input_size: 3}}", ["`lm`"]),
        ("    ctc_lin: !ref <ctc_lin>\nmodel", "model", []),  # it is still in `model`
        ("    encoder: !ref <encoder>\n", "", []),
        (
            "lr: 0.002",
            "lr: 0.002\nsearchers:\n    - !name:torch.nn.functional.linear\n"
            f"        weight: !new:{LINEAR} {{n_neurons: 3, input_size: 3}}",
            ["`searchers.0.weight`"],
        ),
        ("        model: !ref <model>\n", "", ["in no checkpoint: it saves `normalizer`"]),
    ],
)
def test_a_foreign_yaml_is_read_without_its_script(
    before: str, after: str, found: list[str], tmp_path: Path
) -> None:
    assert before in HPARAMS
    yaml = tmp_path / "train.yaml"
    yaml.write_text(HPARAMS.replace(before, after, 1) if before else HPARAMS, encoding="utf-8")
    with PlannedRun(yaml, {"output_folder": str(tmp_path / "run")}) as planned:
        findings = check_planned_run(
            planned, [check_ownership, check_groups, check_shapes, check_unused]
        )
    assert len(findings) == len(found), findings
    for finding, words in zip(findings, found, strict=True):
        assert finding.check == "ownership"
        assert words in finding.effect
