"""Segments of many callers share batches, and none waits long."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sbkit.audio.io import Samples
from sbkit.bundle.protocols import EffectiveRuntime, Encoded
from sbkit.runtime.batch_shapes import BatchShapes
from sbkit.runtime.model_thread import ModelThread, run_batches
from sbkit.serve.recognition import Batcher
from tests.serve.server import wait_for

SECOND = 100  # samples
SHAPES = BatchShapes.table(SECOND, batch_seconds=8.0, clips=(1, 2, 4), seconds=(1.0, 2.0, 4.0, 8.0))


class Echo:
    """Return the first sample of each clip, and record the batches; a clip of -1 is a fault."""

    samples_per_frame = 1
    padded_lengths: Sequence[int] = ()

    def __init__(self) -> None:
        self.effective = EffectiveRuntime(runtime="echo", device="cuda:0", precision="fp32")
        self.batches: list[list[int]] = []
        self.may_run = threading.Event()
        self.may_run.set()
        self.has_batch = threading.Event()

    def encode(self, clips: Sequence[Samples]) -> list[Encoded]:
        self.has_batch.set()
        self.may_run.wait()
        self.batches.append([int(clip[0]) for clip in clips])
        if any(clip[0] < 0 for clip in clips):
            raise ZeroDivisionError
        return [Encoded(clip[:1].astype(np.float64)) for clip in clips]

    def encode_batches(self, batches: Sequence[Sequence[Samples]]) -> list[list[Encoded]]:
        return run_batches(self.encode, batches)


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def batcher(echo: Echo) -> Iterator[Batcher]:
    thread = ModelThread(lambda: echo)
    batcher = Batcher(thread, shapes=SHAPES, wait_seconds=0.01, on_batch=lambda _: None)
    yield batcher
    echo.may_run.set()
    batcher.close()


def clip(number: int, seconds: float = 1.0) -> Samples:
    return np.full(round(seconds * SECOND), number, np.int16)


def ask(batcher: Batcher, *clips: Samples) -> list[int]:
    return [int(output.log_probs[0]) for output in batcher.encode(clips)]


def test_batcher_lets_a_short_request_pass_a_long_one(echo: Echo, batcher: Batcher) -> None:
    with ThreadPoolExecutor(2) as callers:
        echo.may_run.clear()
        long = callers.submit(ask, batcher, *(clip(n, 8.0) for n in range(6)))
        echo.has_batch.wait()
        short = callers.submit(ask, batcher, clip(50, 8.0))
        wait_for(lambda: len(batcher) == 6)
        echo.may_run.set()
        assert (long.result(), short.result()) == ([*range(6)], [50])
    assert echo.batches == [[0], [1], [50], [2], [3], [4], [5]]


@pytest.mark.timeout(60)
def test_batcher_does_not_wait_once_a_round_is_full(batcher: Batcher) -> None:
    batcher.wait_seconds = 3600.0
    assert ask(batcher, clip(1, 8.0)) == [1]


def test_batcher_raises_a_fault_only_to_its_caller(echo: Echo, batcher: Batcher) -> None:
    with ThreadPoolExecutor(3) as callers:
        echo.may_run.clear()
        callers.submit(ask, batcher, clip(1))
        echo.has_batch.wait()
        results = [callers.submit(ask, batcher, clip(n)) for n in (-1, 3)]
        wait_for(lambda: len(batcher) == 2)
        echo.may_run.set()
        with pytest.raises(ZeroDivisionError):
            results[0].result()
        assert results[1].result() == [3]
