"""A thread may trace and end: who traces next is not hurt."""

from tests import processes

TRACED_BY_A_THREAD_THAT_ENDS = """
import threading
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from sbkit.inference.compiled import keep_device_guard

def trace():
    keep_device_guard()
    with FakeTensorMode():
        torch.empty(3)

thread = threading.Thread(target=trace)
thread.start()
thread.join()
filled = [torch.empty(1) for _ in range(10_000)]  # memory that was freed is used again
trace()
print("survived")
"""


def test_a_thread_that_traced_may_end() -> None:
    """Without the keeper this ended in a segmentation fault, three times out of three."""
    done = processes.run(["-c", TRACED_BY_A_THREAD_THAT_ENDS])
    assert (done.returncode, done.stdout) == (0, "survived\n"), done.stderr
