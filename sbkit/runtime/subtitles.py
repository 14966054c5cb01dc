"""Timed words as subtitles, in SubRip (.srt) and WebVTT, or as a table.

Lines, width and durations follow Netflix's Timed Text Style Guide (General Requirements): two
lines of 42 characters, shown for five sixths of a second to seven seconds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import chain, pairwise
from math import ceil, inf
from textwrap import wrap

from sbkit.text.normalization import join_segments
from sbkit.text.word import Word

MAX_WIDTH, MAX_LINES = 42, 2
MIN_SECONDS, MAX_SECONDS = 5 / 6, 7.0  # how long a subtitle is shown
MAX_PAUSE_SECONDS = 1.0  # between two words of a subtitle


@dataclass(frozen=True)
class Subtitle:
    """The text of a subtitle, and when it is shown, in seconds."""

    text: str  # with line breaks
    start: float
    end: float

    def times(self, mark: str) -> str:
        """Return the line with its start and end; ``mark`` is the decimal point."""
        return f"{_clock(self.start, mark)} --> {_clock(self.end, mark)}"


def subtitles(words: Sequence[Word]) -> list[Subtitle]:
    """Make subtitles of words; each one ends before the next one starts."""
    groups = [*cues(words)]
    starts = [*(cue[0].start for cue in groups), inf]
    timed: list[Subtitle] = []
    for cue, (start, next_start) in zip(groups, pairwise(starts), strict=True):
        end = min(max(cue[-1].end, start + MIN_SECONDS), start + MAX_SECONDS, next_start)
        timed.append(Subtitle("\n".join(_lines(cue)), start, end))
    return timed


def cues(words: Sequence[Word]) -> Iterator[list[Word]]:
    """Group words into subtitles by width, duration and pauses."""
    cue: list[Word] = []
    for word in chain.from_iterable(map(_split_long, words)):
        if cue and (
            len(_lines([*cue, word])) > MAX_LINES
            or word.end - cue[0].start > MAX_SECONDS
            or word.start - cue[-1].end > MAX_PAUSE_SECONDS
        ):
            yield cue
            cue = []
        cue.append(word)
    if cue:
        yield cue


def _split_long(word: Word) -> Iterator[Word]:
    """Split a word too long for a subtitle: in text without spaces a sentence is one word."""
    seconds = word.end - word.start
    letters = len(word.text)
    if letters <= MAX_WIDTH // 2:
        yield word
        return
    parts = max(ceil(letters / MAX_WIDTH), ceil(seconds / MAX_SECONDS))
    for first, end in pairwise(letters * part // parts for part in range(parts + 1)):
        start_time, end_time = (word.start + seconds * n / letters for n in (first, end))
        yield replace(word, text=word.text[first:end], start=start_time, end=end_time)


def to_srt(words: Sequence[Word]) -> str:
    """Write SubRip.

    >>> print(to_srt([Word("hello", 0.5, 0.9), Word("there", 1.0, 1.4)]))
    1
    00:00:00,500 --> 00:00:01,400
    hello there
    <BLANKLINE>
    """
    blocks = (
        f"{number}\n{subtitle.times(',')}\n{subtitle.text}\n"
        for number, subtitle in enumerate(subtitles(words), start=1)
    )
    return "\n".join(blocks)


def to_vtt(words: Sequence[Word]) -> str:
    """Write WebVTT, with the characters &, < and > escaped."""
    blocks = (
        f"{subtitle.times('.')}\n{escape(subtitle.text, quote=False)}\n"
        for subtitle in subtitles(words)
    )
    return "\n".join(["WEBVTT\n", *blocks])


def to_tsv(words: Sequence[Word]) -> str:
    """Write a table with a row for each word, its times in seconds."""
    rows = (f"{word.start:.3f}\t{word.end:.3f}\t{word.text}" for word in words)
    return "\n".join(["start\tend\tword", *rows])


def _lines(cue: Sequence[Word]) -> list[str]:
    return wrap(join_segments(word.text for word in cue), MAX_WIDTH)


def _clock(seconds: float, mark: str) -> str:
    whole_seconds, milliseconds = divmod(round(1000 * seconds), 1000)
    minutes, second = divmod(whole_seconds, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02}:{minute:02}:{second:02}{mark}{milliseconds:03}"
