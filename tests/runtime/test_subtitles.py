"""Subtitles are cut by width, duration and pauses, and lose no word."""

from itertools import pairwise
from math import inf

import pytest

from sbkit.runtime.subtitles import cues, subtitles, to_srt, to_tsv, to_vtt
from sbkit.text.word import Word


def spoken(*words: tuple[str, float, float]) -> list[Word]:
    return [Word(*each) for each in words]


def evenly(count: int, each: float, text: str = "word") -> list[Word]:
    return [Word(f"{text}{n}", n * each, (n + 0.8) * each) for n in range(count)]


@pytest.mark.parametrize(("count", "each"), [(1, 0.3), (60, 0.02), (60, 0.2), (60, 0.7), (5, 8.0)])
def test_no_word_is_lost_and_no_cue_too_large(count: int, each: float) -> None:
    words = evenly(count, each, "transcription")
    found = list(cues(words))
    assert [word for cue in found for word in cue] == words
    for cue in found:
        assert len(cue) == 1 or cue[-1].end - cue[0].start <= 6.0
    shown = subtitles(words)
    for cue, (subtitle, following) in zip(found, pairwise([*shown, None]), strict=True):
        limit = inf if following is None else following.start
        earliest_end = min(cue[0].start + 5 / 6, limit)
        assert earliest_end <= subtitle.end <= min(subtitle.start + 7.0, limit)
    for block in to_srt(words).strip().split("\n\n"):
        _, _, *lines = block.splitlines()
        assert 1 <= len(lines) <= 2
        assert all(len(line) <= 42 for line in lines)


def test_a_pause_begins_a_cue() -> None:
    words = spoken(("one", 0.0, 0.5), ("two", 0.9, 1.2), ("three", 2.5, 3.0))
    assert [[word.text for word in cue] for cue in cues(words)] == [["one", "two"], ["three"]]


def test_a_sentence_without_spaces_is_shown_as_it_is_said() -> None:
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 120)))
    found = [*subtitles([Word(text, 1.0, 25.0)])]
    assert "".join(line for each in found for line in each.lines) == text
    assert len(found) == 4
    assert (found[0].start, found[-1].end) == (1.0, 25.0)
    assert all(each.end - each.start <= 7.0 and len(each.lines) <= 2 for each in found)


def test_subrip_webvtt_and_tables() -> None:
    words = spoken(("a<b", 3661.5, 3662.0), ("c&d", 3662.0004, 3662.9996))
    assert to_srt(words) == "1\n01:01:01,500 --> 01:01:03,000\na<b c&d\n"
    assert to_vtt(words) == ("WEBVTT\n\n01:01:01.500 --> 01:01:03.000\na&lt;b c&amp;d\n")
    assert to_tsv(words) == "start\tend\tword\n3661.500\t3662.000\ta<b\n3662.000\t3663.000\tc&d"
    assert to_srt([]) == ""
    assert to_vtt([]) == "WEBVTT\n"
    assert to_srt(evenly(1, 1.0, "w")) == "1\n00:00:00,000 --> 00:00:00,833\nw0\n"
