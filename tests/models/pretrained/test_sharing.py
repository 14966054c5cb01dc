"""On two ranks: an encoder whose ranks leave out other layers and hide other frames."""

import json

import pytest

from tests import processes
from tests.models.pretrained.sharing import train

pytestmark = [pytest.mark.slow, pytest.mark.ddp]


@pytest.mark.parametrize("model_type", ["wav2vec2", "wavlm"])
def test_layerdrop_masks_checkpointing_and_freezing_are_those_of_one_process(
    model_type: str,
) -> None:
    """And DDP looks for no unused parameters."""
    done = processes.run(["-m", "tests.models.pretrained.sharing", model_type], ranks=2)
    assert (done.returncode, done.stderr) == (0, "")
    shared, alone = json.loads(done.stdout), train(model_type)
    assert shared.keys() == alone.keys()
    for name, values in alone.items():
        assert shared[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name
