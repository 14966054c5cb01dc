"""Words in time as subtitles, SubRip (.srt) and WebVTT."""

from collections.abc import Iterator, Sequence
from textwrap import wrap

from sbkit.text.word import Word

WIDTH = 42  # characters of a line, as broadcasters have it
LINES = 2
LONGEST = 6.0  # seconds that a subtitle stands
PAUSE = 1.0  # seconds between words, after which a new one begins


def cues(words: Sequence[Word]) -> Iterator[list[Word]]:
    """Cut words into subtitles by width, duration and pauses."""
    cue: list[Word] = []
    for word in words:
        lines = wrap(" ".join(each.text for each in (*cue, word)), WIDTH)
        if cue and (
            len(lines) > LINES
            or word.end - cue[0].start > LONGEST
            or word.start - cue[-1].end > PAUSE
        ):
            yield cue
            cue = []
        cue.append(word)
    if cue:
        yield cue


def to_srt(words: Sequence[Word]) -> str:
    """Write SubRip."""
    blocks = (
        f"{number}\n{_time(cue, ',')}\n{_lines(cue)}\n"
        for number, cue in enumerate(cues(words), start=1)
    )
    return "\n".join(blocks)


def to_vtt(words: Sequence[Word]) -> str:
    """Write WebVTT, in which three characters mean something."""
    blocks = (f"{_time(cue, '.')}\n{_escaped(_lines(cue))}\n" for cue in cues(words))
    return "\n".join(["WEBVTT\n", *blocks])


def _lines(cue: Sequence[Word]) -> str:
    return "\n".join(wrap(" ".join(word.text for word in cue), WIDTH))


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _time(cue: Sequence[Word], mark: str) -> str:
    return f"{_clock(cue[0].start, mark)} --> {_clock(cue[-1].end, mark)}"


def _clock(seconds: float, mark: str) -> str:
    whole, milliseconds = divmod(round(1000 * seconds), 1000)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02}:{minute:02}:{second:02}{mark}{milliseconds:03}"
