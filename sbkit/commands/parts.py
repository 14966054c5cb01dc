"""The share of a command's work that one job of an array does: `--part 3/16`."""

import re
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from sbkit.base.errors import ConfigError

Item = TypeVar("Item")


class Part(NamedTuple):
    """One of several shares of a list, which differ by at most one item.

    >>> parse_part("2/3").of("abcdefgh")
    'beh'
    """

    number: int  # from 1 to the total
    total: int

    def of(self, items: Sequence[Item]) -> Sequence[Item]:
        return items[self.number - 1 :: self.total]


WHOLE = Part(1, 1)


def parse_part(text: str) -> Part:
    """Parse K/N; raises ConfigError unless K is from 1 to N."""
    match = re.fullmatch(r"([1-9]\d{0,8})/([1-9]\d{0,8})", text)
    part = Part(*map(int, match.groups())) if match else Part(1, 0)
    if part.number > part.total:
        raise ConfigError(f"`--part` must be K/N with K from 1 to N, such as 3/16, but is {text}.")
    return part
