"""Within a step the host never waits for the device, shown on a stand-in for one.

`test_gpu.py` shows it on a GPU.
"""

import pytest

from tests import processes


@pytest.mark.slow(60)
def test_all_that_a_stand_in_for_a_gpu_shows() -> None:
    there = "ignore:Module already imported"  # plugins are there, before pytest looks at them
    command = ["-m", "pytest", "-q", "--show-capture=no", "-W", there, "tests/on_pretended.py"]
    done = processes.run(command, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
