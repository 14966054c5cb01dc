"""Subtitles are cut by width, duration and pauses, and lose no word."""

import re
from itertools import pairwise
from math import inf

import pytest
from rich.cells import cell_len

from sbkit.tasks.asr.subtitles import group_words, subtitles, to_srt, to_tsv, to_vtt
from sbkit.text.recognized_word import Word


def evenly(count: int, word_seconds: float, text: str = "word") -> list[Word]:
    return [Word(f"{text}{n}", n * word_seconds, (n + 0.8) * word_seconds) for n in range(count)]


@pytest.mark.parametrize(("count", "seconds"), [(1, 0.3), (60, 0.02), (60, 0.2), (60, 0.7), (5, 8)])
def test_subtitles_lose_no_word_and_keep_their_limits(count: int, seconds: float) -> None:
    words = evenly(count, seconds, "transcription")
    groups = list(group_words(words))
    assert [word for group in groups for word in group] == words
    for group in groups:
        assert len(group) == 1 or group[-1].end - group[0].start <= 6.0
    pairs = pairwise([*subtitles(words), None])
    for group, (subtitle, following) in zip(groups, pairs, strict=True):
        assert subtitle is not None
        limit = inf if following is None else following.start
        earliest_end = min(group[0].start + 5 / 6, limit)
        assert earliest_end <= subtitle.end <= min(subtitle.start + 7.0, limit)
    for block in to_srt(words).strip().split("\n\n"):
        _, _, *lines = block.splitlines()
        assert 1 <= len(lines) <= 2
        assert all(len(line) <= 42 for line in lines)


def test_subtitles_begin_after_a_pause() -> None:
    words = [Word("one", 0.0, 0.5), Word("two", 0.9, 1.2), Word("three", 2.5, 3.0)]
    assert [*group_words(words)] == [words[:2], words[2:]]


@pytest.mark.parametrize("length", [0.3, 0.6])  # of a word: the width or the duration is reached
def test_full_subtitle_ends_at_its_longest_pause(length: float) -> None:
    starts = [n * length + 0.4 * (n > 2) + 0.6 * (n > 6) + 0.3 * (n > 9) for n in range(14)]
    words = [Word("another", start, start + length - n % 3 / 25) for n, start in enumerate(starts)]
    assert [len(group) for group in group_words(words)] == [7, 7]


def test_subtitle_of_one_word_is_shown_long_enough() -> None:
    """The longest pause is behind its first word."""
    words = [Word("so", 0.0, 0.2), *(word.later(0.5) for word in evenly(25, 0.25))]
    first, *_ = parts = subtitles(words)
    assert first.text.startswith("so word0") and len(parts) > 1
    assert all(part.end - part.start > 0.83 for part in parts)
    words[1:] = [word.later(5 / 6 - 0.5) for word in words[1:]]
    assert subtitles(words)[0].text == "so"


@pytest.mark.parametrize(
    "letters",
    [
        *(["不"], ["น้ำ", "ที่"], ["स्त्री", "क्षि", "के"]),  # Chinese, Thai, Hindi
        *(["が", "A"], ["\u1112\u1161\u11ab"], ["👩🏽\u200d💻", "🇩🇪"]),  # mixed, Korean, emoji
    ],
)
def test_subtitles_split_a_sentence_without_spaces_in_time(letters: list[str]) -> None:
    text = "".join(letters * 60)
    parts = subtitles([Word(text, 1.0, 11.0)])
    assert "".join(part.text for part in parts).replace("\n", "") == text
    assert (parts[0].start, parts[-1].end) == (1.0, 11.0)
    for part in parts:
        assert part.end - part.start <= 7.0
        lines = part.text.split("\n")
        assert len(lines) <= 2
        for line in lines:
            assert cell_len(line) <= 42
            assert re.fullmatch(f"({'|'.join(letters)})+", line)


def test_subtitles_of_a_slow_word_are_never_empty() -> None:
    parts = subtitles([Word("a" * 22, 0.0, 300.0)])
    assert [part.text for part in parts] == ["a"] * 22
    assert all(part.end > part.start for part in parts)


def test_srt_vtt_and_tsv_are_written() -> None:
    words = [Word("a<b", 3661.5, 3662.0), Word("c&d", 3662.0004, 3662.9996)]
    assert to_srt(words) == "1\n01:01:01,500 --> 01:01:03,000\na<b c&d\n"
    assert to_vtt(words) == ("WEBVTT\n\n01:01:01.500 --> 01:01:03.000\na&lt;b c&amp;d\n")
    assert to_tsv(words) == "start\tend\tword\n3661.500\t3662.000\ta<b\n3662.000\t3663.000\tc&d"
    assert to_srt([]) == ""
    assert to_vtt([]) == "WEBVTT\n"
    assert to_srt(evenly(1, 1.0, "w")) == "1\n00:00:00,000 --> 00:00:00,833\nw0\n"
