"""An incomplete rendezvous ends with an error; after a complete one, ranks wait without limit."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from sbkit.base.errors import BAD_INPUT
from tests.processes import Process

JOIN = """
import os, time
import torch
from sbkit.distributed.ranks import gather_over_ranks, process_group
from sbkit.base.process import run_main

def main():
    with process_group(torch.device("cpu")):
        time.sleep(float(os.environ.get("LATE", "0")))
        gather_over_ranks(None)

run_main(main)
"""

Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that joins the rendezvous; kill it at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with ExitStack() as stack:

        def start(*, seconds: float = 1, **variables: str) -> Process:
            common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            # One node each: only the first process of a node prints errors.
            common |= {"LOCAL_RANK": "0", "SBKIT_RENDEZVOUS_SECONDS": str(seconds)}
            process = Process(["-c", JOIN], **{**common, **variables})
            stack.callback(process.kill)
            return process

        yield start


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "phrases"),
    [
        ({"RANK": "0"}, ["Rank 0 did not meet", "at 127.0.0.1:", "1/2 clients joined"]),
        ({"RANK": "1"}, ["within 1 s", "Rank 1"]),
        ({"RANK": "1", "MASTER_ADDR": ""}, ["MASTER_ADDR expected, but not set"]),
        ({}, ["RANK expected, but not set"]),
    ],
    ids=str,
)
def test_incomplete_rendezvous_is_one_sentence(
    variables: dict[str, str], phrases: list[str], start: Start
) -> None:
    process = start(**variables)
    _, error = process.communicate(timeout=240)
    assert process.returncode == BAD_INPUT, error
    assert "Traceback" not in error
    assert all(phrase in error.splitlines()[-1] for phrase in phrases), error


@pytest.mark.slow
@pytest.mark.ddp
def test_ranks_wait_longer_after_the_rendezvous(start: Start) -> None:
    ranks = [start(seconds=6, RANK=str(rank), LATE=str(7 * rank)) for rank in (0, 1)]
    for process in ranks:
        _, error = process.communicate(timeout=240)
        assert process.returncode == 0, error
