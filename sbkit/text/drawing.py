"""Draw sentences of a text that is too long to train on."""

from collections.abc import Iterable
from heapq import heappop, heappush
from operator import itemgetter
from random import Random


def draw_sentences(sentences: Iterable[str], max_bytes: int) -> tuple[list[str], int]:
    """Return all sentences, or drawn ones of ``max_bytes`` of UTF-8; and how many there were.

    They stay in order, and are the same each time. No others are kept in memory.

    >>> draw_sentences(["press one", "press two", "hold"], 15)
    (['press two', 'hold'], 3)
    """
    draw_number = Random(0).random
    drawn: list[tuple[float, int, str]] = []  # a heap with the highest random number first
    num_bytes = count = 0
    for sentence in sentences:
        heappush(drawn, (-draw_number(), count, sentence))
        num_bytes += len(sentence.encode())
        while num_bytes > max_bytes and len(drawn) > 1:
            num_bytes -= len(heappop(drawn)[2].encode())
        count += 1
    return [sentence for _, _, sentence in sorted(drawn, key=itemgetter(1))], count
