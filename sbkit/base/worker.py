"""What worker processes have in common: they leave signals to their parent, and end with it."""

import os
import signal
import threading
import time

POLL_SECONDS = 1.0


def begin_work(parent: int) -> None:
    """Prepare a worker process; ``parent`` is the process id of the one that started it.

    A signal may reach all processes of a job, and the parent decides what follows. If the parent is
    killed, a worker would wait for it forever.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=[parent], daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(0)
