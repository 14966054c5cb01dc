"""The share of a command's work that one job of an array does: `--part 3/16`."""

import re
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from sbkit.base.errors import ConfigError

Item = TypeVar("Item")


class Part(NamedTuple):
    """One of several shares of a list, which differ by at most one item.

    >>> Part(2, 3).of("abcdefgh")
    'beh'
    """

    number: int  # from 1 to the total
    total: int

    def of(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return the items of this part: the one with its number, and every total-th after it."""
        return items[self.number - 1 :: self.total]


WHOLE = Part(1, 1)


def parse_part(text: str) -> Part:
    """Parse K/N; raises ConfigError unless K is from 1 to N.

    >>> parse_part("3/16")
    Part(number=3, total=16)
    """
    match = re.fullmatch(r"0*([1-9]\d{0,8})/0*([1-9]\d{0,8})", text)
    part = Part(*map(int, match.groups())) if match else Part(1, 0)
    if part.number > part.total:
        raise ConfigError(
            f"`--part` must be K/N with K from 1 to N, such as 3/16, but is {text}. Give each of N "
            "jobs its own K."
        )
    return part
