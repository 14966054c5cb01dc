"""An iterator that looks one item ahead."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def with_last(items: Iterable[Item]) -> Iterator[tuple[Item, bool]]:
    """Yield each item, and whether it is the last one; the next one is asked for before."""
    held: list[Item] = []
    for item in items:
        if held:
            yield held.pop(), False
        held.append(item)
    if held:
        yield held.pop(), True
