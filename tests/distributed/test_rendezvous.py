"""Processes that do not find one another say so; those that did wait as long as it takes."""

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

Come = Callable[..., Process]


@pytest.fixture
def come() -> Iterator[Come]:
    """Let a process come to the meeting; whoever is still there at the end is killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with ExitStack() as stack:

        def come(*, patience: float = 1, **place: str) -> Process:
            here = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            here["LOCAL_RANK"] = (
                "0"  # a node for each: the others of a node let its first one speak
            )
            here["SBKIT_RENDEZVOUS_SECONDS"] = str(patience)
            process = Process(["-c", JOIN], **{**here, **place})
            stack.callback(process.kill)
            return process

        yield come


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "words"),
    [
        ({"RANK": "0"}, ["Rank 0 did not meet", "at 127.0.0.1:", "1/2 clients joined"]),
        ({"RANK": "1"}, ["within 1 s", "Rank 1"]),
        ({"RANK": "1", "MASTER_ADDR": ""}, ["MASTER_ADDR expected, but not set"]),
        ({}, ["RANK expected, but not set"]),
    ],
    ids=str,
)
def test_a_rendezvous_that_never_completes_ends_in_a_sentence(
    place: dict[str, str], words: list[str], come: Come
) -> None:
    process = come(**place)
    _, error = process.communicate(timeout=240)
    assert process.returncode == BAD_INPUT, error
    assert "Traceback" not in error
    assert all(word in error.splitlines()[-1] for word in words), error


@pytest.mark.slow
@pytest.mark.ddp
def test_ranks_that_are_together_have_more_patience(come: Come) -> None:
    ranks = [come(patience=6, RANK=str(rank), LATE=str(7 * rank)) for rank in (0, 1)]
    for process in ranks:
        _, error = process.communicate(timeout=240)
        assert process.returncode == 0, error
