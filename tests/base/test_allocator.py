"""Memory that was freed is used again without asking the system."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from sbkit.base.allocator import describe_allocator, keep_freed_memory
keep_freed_memory()
print(describe_allocator())
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in (5, 20, 11, 30):
        kept = [b"x" * (size << 20) for _ in range(3)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


def answers(**variables: str) -> list[str]:
    """Run that in a process of its own."""
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_pages_are_mapped_once() -> None:
    told, faults = answers()
    assert told == "freed memory is kept"
    assert int(faults) < 1000  # of 50,000 pages
    told, faults = answers(MALLOC_MMAP_THRESHOLD_="100000")
    assert told == "memory is allocated as MALLOC_MMAP_THRESHOLD_ has it"
    assert int(faults) > 10_000
