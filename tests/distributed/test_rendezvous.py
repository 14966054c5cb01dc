"""What torchrun says of a process is believed only if it makes sense; nobody waits for ever."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from sbkit.base.errors import BAD_INPUT, SbkitError
from sbkit.distributed.rendezvous import is_single_process, read_place
from tests.processes import Process

HERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **HERE}
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


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"WORLD_SIZE": "two"}, ["WORLD_SIZE", "'two'"]),
        ({"MASTER_ADDR": ""}, ["MASTER_ADDR", "not set"]),
        ({"MASTER_PORT": ""}, ["MASTER_PORT must be a whole number"]),
    ],
    ids=str,
)
def test_a_place_that_makes_no_sense_is_refused(wrong: dict[str, str], words: list[str]) -> None:
    with pytest.raises(SbkitError) as refused:
        read_place(RANK_1 | wrong)
    assert all(word in str(refused.value) for word in [*words, "torchrun"])


@pytest.mark.parametrize(
    ("environment", "single"),
    [
        ({}, True),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, True),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, False),
        ({"LOCAL_RANK": "1"}, False),
        ({"WORLD_SIZE": ""}, False),
        ({"RANK": "0", "WORLD_SIZE": "1"}, False),
    ],
    ids=str,
)
def test_one_of_several_is_not_taken_for_a_single_process(
    environment: dict[str, str], single: bool
) -> None:
    assert is_single_process(environment) is single


# -- real meetings -------------------------------------------------------------------------------


@pytest.fixture
def port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


Come = Callable[..., Process]


@pytest.fixture
def come(port: str) -> Iterator[Come]:
    """Let a process come to the meeting; whoever is still there at the end is killed."""
    with ExitStack() as stack:

        def come(*, patience: float = 1, **place: str) -> Process:
            own = {"MASTER_PORT": port, "SBKIT_RENDEZVOUS_SECONDS": str(patience)}
            own["LOCAL_RANK"] = "0"  # a node for each: the others of a node let its first one speak
            process = Process(["-c", JOIN], **{**RANK_1, **own, **place})
            stack.callback(process.kill)
            return process

        yield come


def sentence_of(process: Process) -> str:
    """Wait for a process that is refused, and give what it says."""
    _, error = process.communicate(timeout=60)
    assert process.returncode == BAD_INPUT, error
    assert "Traceback" not in error
    return error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "words"),
    [
        ({"RANK": "0"}, ["All 2 processes must meet at 127.0.0.1:", "within 1 s", "rank 0"]),
        ({"RANK": "1"}, ["within 1 s", "rank 1", "refused"]),
    ],
    ids=str,
)
def test_a_rendezvous_that_never_completes_ends_in_a_sentence(
    place: dict[str, str], words: list[str], come: Come
) -> None:
    sentence = sentence_of(come(**place))
    assert all(word in sentence for word in words)
    assert len(sentence.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.ddp
def test_ranks_that_count_themselves_differently_are_refused(come: Come) -> None:
    ranks = [come(patience=30, RANK=str(rank), WORLD_SIZE=str(2 + rank)) for rank in (0, 1)]
    for rank, process in enumerate(ranks):
        said = f"{3 - rank} for rank {1 - rank} and {2 + rank} for rank {rank}"
        sentence = sentence_of(process)
        assert f"WORLD_SIZE must be the same for all processes, but is {said}" in sentence


@pytest.mark.slow
@pytest.mark.ddp
def test_ranks_that_are_together_have_more_patience(come: Come) -> None:
    ranks = [come(patience=2, RANK=str(rank), LATE=str(3 * rank)) for rank in (0, 1)]
    for process in ranks:
        _, error = process.communicate(timeout=60)
        assert process.returncode == 0, error
