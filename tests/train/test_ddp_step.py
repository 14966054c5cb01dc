"""On two ranks: parts of a model that take turns."""

import json
import re

import pytest

from tests import processes
from tests.train.sharing import train

pytestmark = [pytest.mark.slow, pytest.mark.ddp]


def test_ddp_step_with_parts_taking_turns_equals_one_process() -> None:
    process = processes.run(["-m", "tests.train.sharing"], ranks=2)
    assert (process.returncode, process.stderr) == (0, "")
    shared, alone = json.loads(process.stdout), train()
    assert shared.keys() == alone.keys()
    for name, values in alone.items():
        assert shared[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name


def test_ddp_step_names_unused_parameters_in_the_same_step() -> None:
    process = processes.run(["-m", "tests.train.sharing", "used"], ranks=2)
    assert process.returncode != 0
    message = (
        "Every parameter must take part in every step .* but head[01].weight, head[01].bias, late"
    )
    assert re.search(message, process.stderr)
