"""A machine can be meant instead of this one, and torchrun's processes each take a device."""

import pytest
import torch

from sbkit.base.errors import SbkitError
from sbkit.check.check import check_planned_run
from sbkit.check.placement import check_placement
from sbkit.check.planned_run import PlannedRun
from sbkit.distributed.device import counter_of_target, resolve
from tests.runs import ROOT

YAML = ROOT / "hparams" / "ctc.yaml"


@pytest.mark.parametrize(
    ("target", "device", "placed"),
    [
        ("cuda:8", None, "cuda:0"),
        ("cuda:8", "cuda:7", "cuda:7"),
        ("cpu", None, "cpu"),
    ],
)
def test_a_machine_that_is_meant_is_asked(target: str, device: str | None, placed: str) -> None:
    assert resolve(device, "fp32", count=counter_of_target(target)).device == torch.device(placed)


@pytest.mark.parametrize("device", ["cuda:8", "mps"])
def test_what_it_has_not_is_refused(device: str) -> None:
    with pytest.raises(SbkitError, match="but the target has"):
        resolve(device, "fp32", count=counter_of_target("cuda:8"))


@pytest.mark.parametrize("target", ["cuda:0", "gpu", "8"])
def test_a_target_of_no_machine_is_refused(target: str) -> None:
    with pytest.raises(SbkitError, match="`--target` "):
        counter_of_target(target)


def test_a_number_beside_torchrun_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with PlannedRun(YAML, {"device": "cuda:1"}, target="cuda:8") as planned:
        findings = check_planned_run(planned, [check_placement])
    findings = [each for each in findings if each.check == "placement"]
    assert [each.where for each in findings] == [planned.place("device")]
    assert "torchrun starts 8 processes" in str(findings[0])
