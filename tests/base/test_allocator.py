"""Freed memory is kept, unless the user decides otherwise."""

import subprocess
import sys

import pytest

from tests.runs import ROOT

FAULTS = """
import resource, sys
from sbkit.base.allocator import describe_allocator, keep_freed_memory
keep_freed_memory()
print(describe_allocator())
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in (5, 20, 11, 30):
        buffers = [b"x" * (size << 20) for _ in range(3)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_keep_freed_memory_maps_pages_once() -> None:
    description, faults = _run()
    assert description == "freed memory is kept"
    assert int(faults) < 1000  # of 50,000 pages
    description, faults = _run(MALLOC_MMAP_THRESHOLD_="100000")
    assert description == "memory is allocated by MALLOC_MMAP_THRESHOLD_"
    assert int(faults) > 10_000


def _run(**variables: str) -> list[str]:
    command = [sys.executable, "-c", FAULTS]
    return subprocess.check_output(command, cwd=ROOT, env=variables, text=True).splitlines()
