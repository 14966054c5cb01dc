"""The private parts of torch still do what sbkit uses them for."""

import re

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils._device import _device_constructors

from sbkit.base import torch_internals


def test_private_parts_were_tested_with_this_torch() -> None:
    version = torch.__version__.partition("+")[0]
    assert re.search(rf"torch {re.escape(version)}\b", torch_internals.__doc__ or "")


def test_batch_norms_of_any_kind_are_found() -> None:
    modules = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1), nn.SyncBatchNorm(1))
    assert [*torch_internals.batch_norms(modules)] == [modules[0], modules[2]]


def test_scaler_skips_step_if_found_inf_is_set() -> None:
    layer = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler = GradScaler("cpu")
    before = layer.weight.item()
    for is_inf in (1.0, 0.0):
        layer.weight.grad = torch.ones(1, 1)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        for flag in torch_internals.found_inf_tensors(scaler, optimizer):
            flag.fill_(is_inf)
        scaler.step(optimizer)
        scaler.update()
        assert (layer.weight.item() == before) is bool(is_inf)


def test_meta_device_rules_functions_that_were_replaced_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _device_constructors.cache_clear()
    with monkeypatch.context() as patch, torch.device("meta"):
        patch.setattr(torch, "linspace", lambda *_: None)  # as transformers while it loads a model
        torch.empty(1)
    with torch_internals.meta_device():
        assert torch.linspace(0, 1, 2).is_meta
