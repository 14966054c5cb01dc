"""Timed words as subtitles, in SubRip (.srt) and WebVTT, or as a table.

Lines, width and durations follow Netflix's Timed Text Style Guide (General Requirements): two
lines of 42 characters, shown for five sixths of a second to seven seconds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import chain, pairwise
from math import ceil
from textwrap import wrap

from sbkit.text.normalization import join_segments
from sbkit.text.word import Word

MAX_WIDTH, MAX_LINES = 42, 2
MIN_SHOWN_SECONDS, MAX_SHOWN_SECONDS = 5 / 6, 7.0
MAX_PAUSE_SECONDS = 1.0  # between two words of a subtitle


@dataclass(frozen=True)
class Subtitle:
    """The text of a subtitle, and when it is shown, in seconds."""

    text: str  # with line breaks
    start: float
    end: float

    def timing_line(self, decimal_mark: str) -> str:
        """Return the line of a subtitle file that has the start and the end."""
        return f"{_clock(self.start, decimal_mark)} --> {_clock(self.end, decimal_mark)}"


def subtitles(words: Sequence[Word]) -> list[Subtitle]:
    """Make subtitles of words; each one ends before the next one starts."""
    groups = list(group_words(words))
    timed: list[Subtitle] = []
    for index, group in enumerate(groups):
        start = group[0].start
        end = max(group[-1].end, start + MIN_SHOWN_SECONDS)
        end = min(end, start + MAX_SHOWN_SECONDS)
        if index + 1 < len(groups):
            end = min(end, groups[index + 1][0].start)
        timed.append(Subtitle("\n".join(_lines(group)), start, end))
    return timed


def group_words(words: Sequence[Word]) -> Iterator[list[Word]]:
    """Yield the words of each subtitle; its width, its duration and pauses limit it."""
    group: list[Word] = []
    for word in chain.from_iterable(map(_split_long, words)):
        if group and (
            len(_lines([*group, word])) > MAX_LINES
            or word.end - group[0].start > MAX_SHOWN_SECONDS
            or word.start - group[-1].end > MAX_PAUSE_SECONDS
        ):
            yield group
            group = []
        group.append(word)
    if group:
        yield group


def _split_long(word: Word) -> Iterator[Word]:
    """Split a word that may be too long for a subtitle, evenly in letters and time.

    In text without spaces, a whole sentence is one word.
    """
    seconds = word.end - word.start
    letters = len(word.text)
    if letters <= MAX_WIDTH // 2:
        yield word
        return
    parts = max(ceil(letters / MAX_WIDTH), ceil(seconds / MAX_SHOWN_SECONDS))
    parts = min(parts, letters)  # at least a letter in each part
    bounds = [letters * index // parts for index in range(parts + 1)]
    for first_letter, end_letter in pairwise(bounds):
        yield replace(
            word,
            text=word.text[first_letter:end_letter],
            start=word.start + seconds * first_letter / letters,
            end=word.start + seconds * end_letter / letters,
        )


def to_srt(words: Sequence[Word]) -> str:
    """Write SubRip.

    >>> print(to_srt([Word("hello", 0.5, 0.9), Word("there", 1.0, 1.4)]))
    1
    00:00:00,500 --> 00:00:01,400
    hello there
    <BLANKLINE>
    """
    blocks = (
        f"{number}\n{subtitle.timing_line(',')}\n{subtitle.text}\n"
        for number, subtitle in enumerate(subtitles(words), start=1)
    )
    return "\n".join(blocks)


def to_vtt(words: Sequence[Word]) -> str:
    """Write WebVTT, with the characters &, < and > escaped."""
    blocks = (
        f"{subtitle.timing_line('.')}\n{escape(subtitle.text, quote=False)}\n"
        for subtitle in subtitles(words)
    )
    return "\n".join(["WEBVTT\n", *blocks])


def to_tsv(words: Sequence[Word]) -> str:
    """Write a table with a row for each word, its times in seconds."""
    rows = (f"{word.start:.3f}\t{word.end:.3f}\t{word.text}" for word in words)
    return "\n".join(["start\tend\tword", *rows])


def _lines(group: Sequence[Word]) -> list[str]:
    return wrap(join_segments(word.text for word in group), MAX_WIDTH)


def _clock(seconds: float, decimal_mark: str) -> str:
    whole_seconds, milliseconds = divmod(round(1000 * seconds), 1000)
    minutes, second = divmod(whole_seconds, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02}:{minute:02}:{second:02}{decimal_mark}{milliseconds:03}"
