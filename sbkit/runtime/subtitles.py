"""Words in time as subtitles, SubRip (.srt) and WebVTT, or as a table.

Lines, width and durations are those of Netflix's Timed Text Style Guide (General Requirements):
two lines of 42 characters, from five sixths of a second to seven seconds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from math import ceil, inf
from textwrap import wrap

from sbkit.text.normalize import join_segments
from sbkit.text.word import Word

WIDTH, LINES = 42, 2
SHORTEST, LONGEST = 5 / 6, 7.0  # seconds that a subtitle stands
PAUSE = 1.0  # seconds between words, after which a new one begins


@dataclass(frozen=True)
class Subtitle:
    """Lines, and when they are shown, in seconds."""

    lines: tuple[str, ...]
    start: float
    end: float


def subtitles(words: Sequence[Word]) -> list[Subtitle]:
    """Make subtitles of words; none is shown while the next one is."""
    found = [*cues(words)]
    starts = [*(cue[0].start for cue in found), inf]
    made = []
    for cue, (start, following) in zip(found, pairwise(starts), strict=True):
        end = min(max(cue[-1].end, start + SHORTEST), start + LONGEST, following)
        made.append(Subtitle(tuple(_lines(cue)), start, end))
    return made


def cues(words: Sequence[Word]) -> Iterator[list[Word]]:
    """Cut words into subtitles by width, duration and pauses."""
    cue: list[Word] = []
    for word in chain.from_iterable(map(_fitting, words)):
        if cue and (
            len(_lines([*cue, word])) > LINES
            or word.end - cue[0].start > LONGEST
            or word.start - cue[-1].end > PAUSE
        ):
            yield cue
            cue = []
        cue.append(word)
    if cue:
        yield cue


def _fitting(word: Word) -> Iterator[Word]:
    """Cut what no subtitle can hold, by its letters: without spaces a sentence is one word."""
    seconds, letters = word.end - word.start, len(word.text)
    if letters <= WIDTH // 2:
        yield word
        return
    parts = max(ceil(letters / WIDTH), ceil(seconds / LONGEST))
    for first, end in pairwise(letters * part // parts for part in range(parts + 1)):
        begin, after = (word.start + seconds * place / letters for place in (first, end))
        yield replace(word, text=word.text[first:end], start=begin, end=after)


def to_srt(words: Sequence[Word]) -> str:
    """Write SubRip."""
    blocks = (
        f"{number}\n{_time(each, ',')}\n{_text(each)}\n"
        for number, each in enumerate(subtitles(words), start=1)
    )
    return "\n".join(blocks)


def to_vtt(words: Sequence[Word]) -> str:
    """Write WebVTT, in which three characters mean something."""
    blocks = (f"{_time(each, '.')}\n{_escaped(_text(each))}\n" for each in subtitles(words))
    return "\n".join(["WEBVTT\n", *blocks])


def to_tsv(words: Sequence[Word]) -> str:
    """Write a table with a row for each word, its times in seconds."""
    rows = (f"{each.start:.3f}\t{each.end:.3f}\t{each.text}" for each in words)
    return "\n".join(["start\tend\tword", *rows])


def _lines(cue: Sequence[Word]) -> list[str]:
    return wrap(join_segments(word.text for word in cue), WIDTH)


def _text(subtitle: Subtitle) -> str:
    return "\n".join(subtitle.lines)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _time(subtitle: Subtitle, mark: str) -> str:
    return f"{_clock(subtitle.start, mark)} --> {_clock(subtitle.end, mark)}"


def _clock(seconds: float, mark: str) -> str:
    whole, milliseconds = divmod(round(1000 * seconds), 1000)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02}:{minute:02}:{second:02}{mark}{milliseconds:03}"
