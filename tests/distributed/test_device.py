"""Devices and precisions: parsing, checks and defaults."""

from typing import Any

import pytest
import torch

from sbkit.base import machine
from sbkit.base.errors import SbkitError
from sbkit.distributed.device import (
    Placement,
    check_precision,
    device_counter_for,
    parse_device,
    resolve_placement,
)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that torch sees two CUDA devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that torch sees no accelerator."""
    for backend in (torch.cuda, torch.mps, torch.xpu):
        monkeypatch.setattr(backend, "is_available", lambda: False)
    monkeypatch.setattr(machine, "read_driver", lambda: None)


def test_parse_device_accepts_every_form() -> None:
    for text in ("cpu", "cuda", "cuda:0", "cuda:13", "mps", "xpu", "xpu:1"):
        assert parse_device(text) == torch.device(text)


@pytest.mark.parametrize(
    "nonsense",
    ["gpu", "CPU", "", "cuda:01", "cuda:²", "cuda\n", None, torch.device("meta")],
    ids=repr,
)
def test_parse_device_refuses_other_forms(nonsense: Any) -> None:
    with pytest.raises(SbkitError, match="must be cpu, cuda, cuda:N, mps, xpu or xpu:N") as caught:
        parse_device(nonsense)
    assert f"is {nonsense!r}." in str(caught.value)


def test_unsupported_precision_is_refused() -> None:
    messages: dict[Any, str] = {
        "fp16": "on cpu must be one of fp32, bf16, but is fp16",
        "fp8": "one of fp32, bf16, fp16, but is 'fp8'",
        None: "but is None",
    }
    for precision, message in messages.items():
        with pytest.raises(SbkitError, match=message):
            check_precision("cpu", precision)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("text", ["cuda", "cuda:3", "mps", "xpu"])
def test_resolve_refuses_a_missing_device(text: str) -> None:
    reason = ", because .*NVIDIA.*" if "cuda" in text else ""
    message = rf"is {text}.* but torch finds no device of that type{reason}\.$"
    with pytest.raises(SbkitError, match=message):
        resolve_placement(text, "fp32")
    with pytest.raises(SbkitError, match=r"the target has no device of that type\.$"):
        resolve_placement(text, "fp32", count=device_counter_for("cpu"))


@pytest.mark.usefixtures("no_gpu")
def test_resolve_without_a_device_takes_the_cpu_if_there_is_no_gpu() -> None:
    assert resolve_placement(None, "bf16") == Placement(torch.device("cpu"), "bf16")
    assert resolve_placement(torch.device("cpu:0"), "fp32").device == torch.device("cpu")


@pytest.mark.usefixtures("two_gpus")
def test_resolve_cuda_is_the_device_of_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_placement(None, "fp32").device == torch.device("cuda:0")
    assert resolve_placement("cuda:1", "fp16").device == torch.device("cuda:1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    device = resolve_placement("cuda", "bf16").device
    assert device == torch.device("cuda:1")
    assert resolve_placement(device, "bf16").device == device  # a resolved device stays the same


@pytest.mark.usefixtures("two_gpus")
def test_resolve_refuses_one_gpu_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SbkitError, match="is cuda:0, but torchrun starts 2"):
        resolve_placement("cuda:0", "fp32")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(SbkitError, match="is cuda:2, but torch finds 2 devices"):
        resolve_placement("cuda", "fp32")


def test_placement_autocast_applies_the_precision() -> None:
    placement = resolve_placement("cpu", "bf16")
    with placement.autocast():
        assert torch.nn.Linear(2, 2)(torch.zeros(1, 2)).dtype == torch.bfloat16
    assert not placement.grad_scaler().is_enabled()
