"""Timed words as subtitles, in SubRip (.srt) and WebVTT, or as a table; and texts of subtitles.

Lines, width and durations follow Netflix's Timed Text Style Guide (General Requirements): two
lines of 42 columns, shown for five sixths of a second to seven seconds.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape, unescape
from itertools import accumulate, chain, groupby, pairwise, takewhile
from math import ceil, inf

import regex
from rich.cells import cell_len

from sbkit.base.errors import DataError
from sbkit.text.normalization import join_segments
from sbkit.text.recognized_word import Word

MAX_WIDTH, MAX_LINES = 42, 2
MIN_SHOWN_SECONDS, MAX_SHOWN_SECONDS = 5 / 6, 7.0
MAX_PAUSE_SECONDS = 1.0  # between two words of a subtitle
_TIMES = re.compile(  # with a group if they begin the line, as those of a subtitle do
    r"(^[ \t\d:]*)?\d:\d+(?:[ \t]*[.,:][ \t]*\d+)?[ \t]*-->[ \t]*\d+:\d"
)
_STYLE = re.compile(  # <i>, <v Ann>, <00:01.500>, {\an8}
    r"</?[a-zA-Z][^<>]*>|<[\d:.]+>|\{\\[^{}]*\}"
)


@dataclass(frozen=True)
class Subtitle:
    """The text of a subtitle, and when it is shown, in seconds."""

    text: str  # with line breaks
    start: float
    end: float

    def timing_line(self, decimal_mark: str) -> str:
        """Return the line of a subtitle file that has the start and the end."""
        return f"{_clock(self.start, decimal_mark)} --> {_clock(self.end, decimal_mark)}"


def subtitles(words: Sequence[Word], *, spaces: bool = True) -> list[Subtitle]:
    """Make subtitles of words; each one ends by the time the next one of its channel starts.

    spaces: see `join_segments`.
    """
    groups = group_words(words, spaces=spaces)
    timed: list[Subtitle] = []
    for index, group in enumerate(groups):
        start = group[0].start
        end = max(group[-1].end, start + MIN_SHOWN_SECONDS)
        later_words = (later[0] for later in groups[index + 1 :])
        starts = (word.start for word in later_words if word.channel == group[0].channel)
        end = min(end, start + MAX_SHOWN_SECONDS, next(starts, inf))
        timed.append(Subtitle("\n".join(_lines(group, spaces)), start, end))
    return timed


def group_words(words: Iterable[Word], *, spaces: bool = True) -> list[list[Word]]:
    """Return the words of each subtitle, all of one channel, in the order of their starts."""
    channels: dict[int | None, list[Word]] = {}
    for word in words:
        channels.setdefault(word.channel, []).append(word)
    groups = [group for spoken in channels.values() for group in _group_words(spoken, spaces)]
    return sorted(groups, key=lambda group: group[0].start)


def _group_words(words: Sequence[Word], spaces: bool) -> Iterator[list[Word]]:
    """Yield the words of each subtitle; its width, its duration and pauses limit it.

    A full subtitle ends at its longest pause; of pauses equal to a tenth of a second, at the last.
    The next one begins late enough for it to be read, unless 84 letters are spoken sooner.
    """
    group: list[Word] = []
    for word in chain.from_iterable(map(_split_long, words)):
        group.append(word)
        while not _fits(group, spaces):
            pauses = [round(after.start - before.end, 1) for before, after in pairwise(group)]
            min_end = group[0].start + MIN_SHOWN_SECONDS
            sizes = [size for size in range(1, len(group)) if group[size].start >= min_end]
            sizes = sizes or [len(group) - 1]
            size = max(sizes, key=lambda size: (pauses[size - 1], size))
            yield group[:size]
            group = group[size:]
    if group:
        yield group


def _fits(group: Sequence[Word], spaces: bool) -> bool:
    """Return whether words fit into a subtitle, given that those before the last one do."""
    return len(group) == 1 or (
        len(_lines(group, spaces)) <= MAX_LINES
        and group[-1].end - group[0].start <= MAX_SHOWN_SECONDS
        and group[-1].start - group[-2].end <= MAX_PAUSE_SECONDS
    )


def _split_long(word: Word) -> Iterator[Word]:
    """Split a word that may be too long for a line, evenly in width and time.

    In text without spaces, a whole sentence is one word. Letters stay together with their marks.
    """
    clusters = regex.findall(r"\X", word.text)
    widths = [*map(cell_len, clusters)]
    width = sum(widths)
    label_width = cell_len(join_segments([channel_label(word), "1"], spaces=True)) - 1
    if width <= MAX_WIDTH // 2:
        yield word
        return
    seconds = word.end - word.start
    # A wide letter may reach beyond its part.
    usable_width = max(1, MAX_WIDTH - label_width + 1 - max(widths))
    parts = max(ceil(width / usable_width), ceil(seconds / MAX_SHOWN_SECONDS))
    edges = [*accumulate(widths, initial=0)]
    columns = zip(clusters, edges, edges[1:], strict=False)
    for _, part in groupby(columns, key=lambda cluster: cluster[1] * parts // width):
        texts, starts, ends = zip(*part, strict=True)
        start, end = (word.start + seconds * edge / width for edge in (starts[0], ends[-1]))
        yield replace(word, text="".join(texts), start=start, end=end)


def to_srt(words: Sequence[Word], *, spaces: bool = True) -> str:
    """Write SubRip.

    >>> print(to_srt([Word("hello", 0.5, 0.9), Word("there", 1.0, 1.4)]))
    1
    00:00:00,500 --> 00:00:01,400
    hello there
    <BLANKLINE>
    """
    blocks = (
        f"{number}\n{subtitle.timing_line(',')}\n{subtitle.text}\n"
        for number, subtitle in enumerate(subtitles(words, spaces=spaces), start=1)
    )
    return "\n".join(blocks)


def to_vtt(words: Sequence[Word], *, spaces: bool = True) -> str:
    """Write WebVTT, with the characters &, < and > escaped."""
    blocks = (
        f"{subtitle.timing_line('.')}\n{escape(subtitle.text, quote=False)}\n"
        for subtitle in subtitles(words, spaces=spaces)
    )
    return "\n".join(["WEBVTT\n", *blocks])


def to_tsv(words: Sequence[Word]) -> str:
    """Write a table with a row for each word, its times in seconds and, if any, its channel."""
    rows = [f"{word.start:.3f}\t{word.end:.3f}\t{word.text}" for word in words]
    header = "start\tend\tword"
    if any(word.channel is not None for word in words):
        header += "\tchannel"
        rows = [f"{row}\t{word.channel}" for row, word in zip(rows, words, strict=True)]
    return "\n".join([header, *rows])


def read_cues(content: str, name: object = "The text") -> list[str]:
    r"""Return the text of each subtitle of a SubRip or WebVTT file, without styles; [] of others.

    Raises DataError, which has the name of the file, if it has times but no subtitle can be read.

    >>> read_cues("1\n00:00:01,000 --> 00:00:02,500\n<i>hello</i>\nthere\n")
    ['hello there']
    """
    lines = re.split(r"\r*\n|\r", content)
    found = [(index, times) for index, line in enumerate(lines) if (times := _TIMES.search(line))]
    starts = [index for index, times in found if times[1] is not None]
    cues = [lines[start + 1 : end] for start, end in pairwise([*starts, len(lines)])]
    before = lines[: starts[0]] if starts else []
    if _without_number(before) != before:  # else a last line of digits is text
        cues[:-1] = map(_without_number, cues[:-1])
    if content.startswith("WEBVTT"):  # where a subtitle ends at an empty line, and notes may follow
        cues = [[*takewhile(str.strip, cue)] for cue in cues]
    texts = (unescape(_STYLE.sub("", "\n".join(cue))) for cue in cues)
    subtitles = [" ".join(text.split()) for text in texts if text.strip()]
    if found and not subtitles:
        raise DataError(f"{name} looks like subtitles, but none could be read.")
    return subtitles


def _without_number(cue: list[str]) -> list[str]:
    """Return the lines before the number of the next subtitle."""
    filled = [index for index, line in enumerate(cue) if line.strip()]
    has_number = filled and cue[filled[-1]].strip().isdigit()
    return cue[: filled[-1]] if has_number else cue


def channel_label(word: Word) -> str:
    """Return the prefix of the words of a channel: `1:`."""
    return "" if word.channel is None else f"{word.channel}:"


def _lines(group: Sequence[Word], spaces: bool) -> list[str]:
    """Wrap words at the width of a line, in columns: Chinese letters have two."""
    lines = [channel_label(group[0])]
    for word in group:
        line = join_segments([lines[-1], word.text], spaces=spaces)
        if cell_len(line) <= MAX_WIDTH:
            lines[-1] = line
        else:
            lines.append(word.text)
    return [*filter(None, lines)]


def _clock(seconds: float, decimal_mark: str) -> str:
    whole_seconds, milliseconds = divmod(round(1000 * seconds), 1000)
    minutes, second = divmod(whole_seconds, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02}:{minute:02}:{second:02}{decimal_mark}{milliseconds:03}"
