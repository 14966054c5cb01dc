"""A process that hangs is reported with its stacks; for several processes, see test_ranks.py."""

from pathlib import Path

from sbkit.train.watchdog import Watchdog
from tests import processes

# The first stall holds Python's lock, as a function in C may; then the process goes on.
STALLS = """
import ctypes, sys, time
from pathlib import Path
from sbkit.base.process import run_main
from sbkit.train.watchdog import Watchdog

def hang_in_c():
    ctypes.PyDLL(None).sleep(2)

def hang_in_python():
    time.sleep(2)

def main():
    with Watchdog(Path(sys.argv[1]), seconds=0.5) as watchdog:
        file = Path(sys.argv[1]) / "heartbeat-0"
        for step, hang in enumerate((hang_in_c, hang_in_python)):
            watchdog.ping("step", step, ["a", "b", "c", "d", "e"])
            hang()
            print(file.read_text())
        watchdog.ping("data", 2)
        print(file.read_text())

run_main(main)
"""


def test_single_process_that_hangs_is_reported_and_goes_on(tmp_path: Path) -> None:
    """A debugger or a slow disk holds it up, and nobody waits for it."""
    process = processes.run(["-c", STALLS, tmp_path])
    assert process.returncode == 0, process.stderr
    files = process.stdout.split("since ")[1:]  # each begins with a time
    for step, name in enumerate(("hang_in_c", "hang_in_python")):
        position, title, stacks = files[step].split("\n", maxsplit=2)
        assert position.endswith(f" in step after step {step} on a, b, c and 2 more")
        assert title == "Timeout (0:00:00.500000)!" and f"in {name}\n" in stacks
        assert process.stderr.count(f"in {name}\n") == 1
    assert files[2].endswith(" in data after step 2\n\n")  # no stack once it goes on
    assert not any(tmp_path.iterdir())


def test_program_that_is_no_command_is_not_watched(tmp_path: Path) -> None:
    with Watchdog(tmp_path, seconds=0.5) as watchdog:
        watchdog.ping("step", 1)
        assert not any(tmp_path.iterdir())
