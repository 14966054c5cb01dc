"""On two ranks: parts of a model that take turns, and loaders that are SpeechBrain's."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.train.sharing import train

pytestmark = [pytest.mark.slow, pytest.mark.ddp]


def on_two_ranks(module: str, *arguments: str) -> Any:
    done = processes.run(["-m", module, *arguments], ranks=2, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout.splitlines()[-1])


def test_parts_that_take_turns_learn_as_on_one_process() -> None:
    shared, alone = on_two_ranks("tests.train.sharing"), train()
    assert shared.keys() == alone.keys()
    for name, values in alone.items():
        assert shared[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name


def test_a_run_with_speechbrains_loaders_goes_on_within_an_epoch(tmp_path: Path) -> None:
    ranks = on_two_ranks("tests.train.resuming", str(tmp_path))
    for within, at_its_end in ranks:
        assert within["stopped"] == within["whole"]
        assert at_its_end["stopped"] == at_its_end["whole"]
