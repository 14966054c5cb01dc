"""What torchrun says of a process is believed only if it makes sense; nobody waits for ever."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sbkit.tensors.rendezvous import Place, read_place
from sbkit.values.errors import BAD_INPUT, SbkitError

HERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **HERE}
JOIN = """
import torch
from sbkit.tensors.distributed import process_group
from sbkit.values.errors import exit_with_sentence

def main():
    with process_group(torch.device("cpu")):
        pass

exit_with_sentence(main)
"""


def test_a_place_is_read() -> None:
    assert read_place(RANK_1) == Place(rank=1, world_size=2, local_rank=1)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"RANK": "2"}, ["RANK must be below WORLD_SIZE (2)", "is 2"]),
        ({"RANK": "-1"}, ["RANK must be a whole number", "'-1'"]),
        ({"WORLD_SIZE": ""}, ["WORLD_SIZE", "''"]),
        ({"WORLD_SIZE": "two"}, ["WORLD_SIZE", "'two'"]),
        ({"LOCAL_RANK": "1.0"}, ["LOCAL_RANK", "'1.0'"]),
        ({"MASTER_ADDR": ""}, ["MASTER_ADDR", "not set"]),
        ({"MASTER_PORT": ""}, ["MASTER_PORT", "not set"]),
    ],
    ids=str,
)
def test_a_place_that_makes_no_sense_is_refused(wrong: dict[str, str], words: list[str]) -> None:
    with pytest.raises(SbkitError) as refused:
        read_place(RANK_1 | wrong)
    assert all(word in str(refused.value) for word in [*words, "torchrun"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "words"),
    [
        ({"RANK": "0"}, ["All 2 processes must meet at 127.0.0.1:", "within 2 s", "rank 0"]),
        ({"RANK": "1"}, ["within 2 s", "rank 1", "refused"]),
        ({"RANK": "1", "MASTER_ADDR": "nowhere.invalid"}, ["nowhere.invalid", "rank 1"]),
        ({"RANK": "1", "SBKIT_RENDEZVOUS_SECONDS": "soon"}, ["SBKIT_RENDEZVOUS_SECONDS", "'soon'"]),
    ],
    ids=str,
)
def test_a_rendezvous_that_never_completes_ends_in_a_sentence(
    place: dict[str, str], words: list[str]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = {"MASTER_PORT": str(free.getsockname()[1])}
    done = subprocess.run(
        [sys.executable, "-c", JOIN],
        env={
            **os.environ,
            **RANK_1,
            **port,
            "SBKIT_RENDEZVOUS_SECONDS": "2",
            "PYTHONPATH": str(Path.cwd()),
            **place,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == BAD_INPUT
    assert all(word in done.stderr for word in words)
    assert "Traceback" not in done.stderr
