"""Numbers of things and their names, as a sentence has them."""

from collections.abc import Iterable

SHOWN = 3  # names, unless a sentence has room for more


def plural(count: int, word: str, words: str = "") -> str:
    """Write a number of things: "1 row", "2 rows"; words: the plural, if it is irregular."""
    return f"{count:,} {word if count == 1 else words or f'{word}s'}"


def listed(names: Iterable[object], *, most: int = SHOWN, by: str = ", ") -> str:
    """Write the first names of several, and how many there are besides: "a, b, c and 2 more"."""
    every = list(map(str, names))
    more = f" and {len(every) - most:,} more" if len(every) > most else ""
    return by.join(every[:most]) + more
