"""Where an epoch stands: its micro-batches, and how much of it is done."""

from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import Any


def mark_last(
    batches: Iterable[Any], *, count: int | None, done: int
) -> Iterator[tuple[Any, bool]]:
    """Yield each batch and whether it is the last of an epoch of which ``done`` were already seen.

    Where the number is not known, one batch is read ahead. That would do everywhere, but a loader
    that saves its place would be one too far.
    """
    if count is not None:
        yield from ((batch, number == count) for number, batch in enumerate(batches, done + 1))
        return
    for batch, following in pairwise(chain(batches, [None])):
        yield batch, following is None


def length_of(batches: Any) -> int | None:
    """Count the batches of a loader, None where it does not know."""
    try:
        return len(batches)
    except TypeError:
        return None


def share_of_steps(done: int, count: int | None, accumulation: int) -> float:
    """Return how much of an epoch lies before the step of the next micro-batch.

    In steps: a schedule that counted micro-batches would depend on the accumulation.
    """
    return (done // accumulation) / -(-count // accumulation) if count else 0.0
