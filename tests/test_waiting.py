"""Within a step the host never waits for the device, shown on a pretended accelerator.

`test_gpu.py` shows it on a GPU.
"""

import pytest

from tests import processes


@pytest.mark.slow(60)
def test_runs_on_a_pretended_accelerator() -> None:
    ignored = "ignore:Module already imported"  # plugins, which the fork server imported
    command = ["-m", "pytest", "-q", "--show-capture=no", "-W", ignored, "tests/on_pretended.py"]
    process = processes.run(command, timeout=500)
    assert process.returncode == 0, process.stdout + process.stderr
