"""Batches are run at once, each by one thread, and one that fails is its own error."""

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from sbkit.audio.io import Samples
from sbkit.inference.bundle.bundle import load_bundle
from sbkit.inference.runtime.model import Encoded, run_batches
from tests.inference.bundles import make_bundle


def clips(*seconds: float) -> list[Samples]:
    random = np.random.default_rng(0)
    return [random.integers(-9000, 9000, int(16_000 * each)).astype(np.int16) for each in seconds]


def test_two_batches_are_run_at_once_and_come_back_in_order() -> None:
    both = threading.Barrier(2, timeout=60)

    def encode(batch: Sequence[Samples]) -> list[Encoded]:
        both.wait()
        if len(batch) == 2:
            raise RuntimeError("too many")
        return [Encoded(each[:, None]) for each in batch]

    one, two = run_batches(encode, [clips(0.1), clips(0.1, 0.1)], threads=2)
    assert isinstance(one, list) and len(one) == 1
    assert isinstance(two, RuntimeError)


def test_threads_encode_as_one_does_and_leave_torch_its_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_bundle(make_bundle(tmp_path)).model
    batches = [clips(1.0, 0.7), clips(0.3), clips(0.2, 0.5)]
    alone, used = [model.encode(each) for each in batches], set()
    score = model._score
    monkeypatch.setattr(
        model, "_score", lambda *batch: (used.add(torch.get_num_threads()), score(*batch))[1]
    )
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = model.encode_batches(batches)
        assert used == {1} and torch.get_num_threads() == 3
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [3]
    finally:
        torch.set_num_threads(before)
    for expected, found in zip(alone, together, strict=True):
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_allclose(other.log_probs, one.log_probs, rtol=0, atol=1e-5)
