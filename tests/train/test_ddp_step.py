"""On two ranks: parts of a model that take turns."""

import json

import pytest

from tests import processes
from tests.train.sharing import train

pytestmark = [pytest.mark.slow, pytest.mark.ddp]


def test_parts_that_take_turns_learn_as_on_one_process() -> None:
    done = processes.run(["-m", "tests.train.sharing"], ranks=2)
    assert (done.returncode, done.stderr) == (0, "")
    shared, alone = json.loads(done.stdout), train()
    assert shared.keys() == alone.keys()
    for name, values in alone.items():
        assert shared[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name
