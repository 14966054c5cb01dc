"""Items of many clients run in batches, in the order of their arrival."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextvars import copy_context

import pytest

from sbkit.runtime.clients import Batcher, request_cancelled


class Echo:
    """Return each number, and record the batches; a negative number is a fault."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.may_run = threading.Event()
        self.has_batch = threading.Event()

    def run(self, numbers: Sequence[int]) -> Sequence[int | Exception]:
        self.has_batch.set()
        assert self.may_run.wait(20)
        self.batches.append([*numbers])
        if min(numbers) < 0:
            raise ZeroDivisionError
        return numbers


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def batcher(echo: Echo) -> Iterator[Batcher[int, int]]:
    batcher = Batcher(echo.run, size=abs, max_size=8)
    assert batcher.submit(0)
    assert echo.has_batch.wait(20)  # what follows waits
    yield batcher
    echo.may_run.set()
    batcher.close()


def test_items_run_in_order_in_batches_up_to_a_size(echo: Echo, batcher: Batcher[int, int]) -> None:
    outputs = [batcher.submit(number) for number in (4, 3, 2, 8, 1, 1)]
    assert len(batcher) == 6
    echo.may_run.set()
    assert [output.result() for output in outputs] == [4, 3, 2, 8, 1, 1]
    assert echo.batches == [[0], [4, 3, 2], [8], [1, 1]]


def test_fault_and_lost_request_spare_the_others(echo: Echo, batcher: Batcher[int, int]) -> None:
    lost = threading.Event()
    failed, good = batcher.submit(-1), batcher.submit(3)
    context = copy_context()
    context.run(request_cancelled.set, lost)
    cancelled = context.run(batcher.submit, 2)
    lost.set()
    echo.may_run.set()
    assert isinstance(failed.exception(), ZeroDivisionError)
    assert good.result() == 3
    with pytest.raises(CancelledError):
        cancelled.result()
    assert echo.batches == [[0], [-1, 3], [-1], [3]]


@pytest.mark.timeout(60)
def test_batch_waits_for_others_until_it_is_full() -> None:
    batcher = Batcher[int, int](lambda numbers: [len(numbers)] * 2, max_size=2, size=abs)
    batcher.wait_seconds = 3600.0
    outputs = [batcher.submit(1) for _ in range(2)]
    assert [output.result() for output in outputs] == [2, 2]
    batcher.close()
