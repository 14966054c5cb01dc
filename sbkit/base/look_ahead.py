"""Going through what comes one by one, with a look ahead."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def with_last(items: Iterable[Item]) -> Iterator[tuple[Item, bool]]:
    """Yield each item and whether it is the last one, for which the next one is asked for first."""
    held: list[Item] = []
    for item in items:
        if held:
            yield held.pop(), False
        held.append(item)
    if held:
        yield held.pop(), True
