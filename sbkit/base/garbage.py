"""How often Python looks for garbage while modules are imported."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Look for garbage among old objects ten times less often.

    Imports make 450,000 objects that stay. To look through them, seven times until train.py had
    imported what it needs, took 0.9 of 5.8 s.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], 10 * before[2])
    try:
        yield
    finally:
        gc.set_threshold(*before)
