"""On two ranks: parts of a model that take turns, and loaders that are SpeechBrain's."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.train.sharing import train

pytestmark = [pytest.mark.slow, pytest.mark.ddp]


def tell(module: str, *arguments: str) -> tuple[list[str], Any]:
    """Run a module on two ranks, and give the lines that it said and what it tells."""
    done = processes.run(["-m", module, *arguments], ranks=2, timeout=120)
    assert done.returncode == 0, done.stderr
    *said, answer = done.stdout.splitlines()
    return said, json.loads(answer)


def test_what_some_ranks_leave_out_is_zero_there_and_what_joins_late_may_be_declared() -> None:
    (said,), answers = tell("tests.train.sharing")
    assert "2 of the model's parameters (late.bias, late.weight) get no gradient" in said
    assert "find_unused_parameters" in said
    for joins, shared in zip((False, True), answers, strict=True):
        alone = train(joins=joins)
        assert shared.keys() == alone.keys()
        for name, values in alone.items():
            assert shared[name] == pytest.approx(values, rel=1e-5, abs=1e-6), (joins, name)


def test_a_run_with_speechbrains_loaders_goes_on_within_an_epoch(tmp_path: Path) -> None:
    _, ranks = tell("tests.train.resuming", str(tmp_path))
    for within, at_its_end in ranks:
        assert within["stopped"] == within["whole"]
        assert at_its_end["stopped"] == at_its_end["whole"]
