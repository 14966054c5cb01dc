"""Freed memory is kept, unless the user decides otherwise."""

import subprocess
import sys

import pytest

from tests.runs import ROOT

FAULTS = """
import resource, sys
from sbkit.base.allocator import keep_freed_memory
keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in (5, 20, 11, 30):
        buffers = [b"x" * (size << 20) for _ in range(3)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
@pytest.mark.parametrize(
    ("variables", "is_kept"), [({}, True), ({"MALLOC_MMAP_THRESHOLD_": "100000"}, False)]
)
def test_freed_memory_maps_its_pages_once(variables: dict[str, str], is_kept: bool) -> None:
    command = [sys.executable, "-c", FAULTS]
    faults = int(subprocess.check_output(command, cwd=ROOT, env=variables))
    assert (faults < 1000) is is_kept  # of 50,000 pages
