"""Hotwords help if they are spoken, and change nothing if they are not."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from sbkit.base.errors import SbkitError
from sbkit.decoding.hotwords import LETTER_REWARD, HotwordScorer, read_hotwords, reward_phrases
from sbkit.decoding.prefix_beam import PrefixBeamSearch
from tests.decoding.by_definition import BEAM_OF_16, CHARACTERS, LettersTokenizer, steps_of

SPELLING = LettersTokenizer(CHARACTERS)
IDS = {letter: number for number, letter in enumerate(CHARACTERS)}


def by_length(phrases: Sequence[str], reward: float) -> dict[str, float]:
    """Reward phrases of four characters or more, and shorter ones by their share of four."""
    return {phrase: reward * min(1.0, len(phrase) / 4) for phrase in phrases}


def credits(phrases: Sequence[str], text: str) -> list[float]:
    """Return the sum of rewards and credit after each character, and after the end."""
    scorer = HotwordScorer(rewards=by_length(phrases, 10.0), tokenizer=SPELLING)
    letters = [IDS[letter] for letter in text.replace(" ", "▁")]
    return [*itertools.accumulate(steps_of(scorer, letters))]


def test_scorer_gives_credit_for_a_prefix_and_takes_it_back() -> None:
    assert credits(["abab"], "abaa") == pytest.approx([2.5, 5.0, 7.5, 0.0, 0.0])
    assert credits(["abab"], "aba a") == pytest.approx([2.5, 5.0, 7.5, 0.0, 2.5, 0.0])
    assert credits(["b abbbbbbb", "abab"], "b ab")[3] == pytest.approx(5.0)  # of the second
    assert credits(["ab"], "aa") == pytest.approx([2.5, 0.0, 0.0])
    assert credits(["abab"], "abab a") == pytest.approx([2.5, 5.0, 7.5, 10.0, 10.0, 12.5, 10.0])


def test_reward_grows_with_the_phrase_and_shrinks_with_the_list() -> None:
    """Up to ten letters count."""
    six, eight, many = (
        reward_phrases([phrase], SPELLING)[phrase] for phrase in ("ab" * 3, "ab" * 4, "ab" * 9)
    )
    assert (eight - six, many - six) == pytest.approx((2 * LETTER_REWARD, 4 * LETTER_REWARD))
    others = [*map("".join, itertools.product("ab", repeat=3))]
    six_of_nine = reward_phrases([*others, "ab" * 3], SPELLING)["ab" * 3]
    assert six - six_of_nine == pytest.approx(np.log(9))


def decode(phrases: Sequence[str], reward: float, log_probs: np.ndarray) -> list[str]:
    scorer = HotwordScorer(rewards=by_length(phrases, reward), tokenizer=SPELLING)
    search = PrefixBeamSearch(settings=BEAM_OF_16, scorers=[scorer])
    return SPELLING.words(search.decode(log_probs)[0].tokens)


def heard(*frames: str) -> np.ndarray:
    """Make a frame for each text: its first letter is likeliest, then its second."""
    log_probs = np.full((len(frames), 4), np.log(0.002))
    for index, frame in enumerate(frames):
        for share, letter in zip((0.6, 0.394), frame, strict=False):
            log_probs[index, IDS[letter.replace(" ", "▁")]] = np.log(share)
    return log_probs


def test_phrases_that_are_not_spoken_change_nothing() -> None:
    log_probs = heard("ab", "b", " ", "ba", "b")
    assert decode(["bbbbb"], 0.0, log_probs) == ["ab", "b"]
    assert decode(["aaaaa", "ba ba"], 6.0, log_probs) == ["ab", "b"]
    assert decode(["ab ab"], 6.0, log_probs) == ["ab", "ab"]


def test_read_hotwords_reads_a_file_or_a_list(tmp_path: Path) -> None:
    for name in ("my, words", "words.txt"):
        file = tmp_path / name
        file.write_text("new york\n\nsan francisco bay\n", encoding="utf-8")
        assert read_hotwords(str(file)) == ["new york", "", "san francisco bay"]
    phrases = [f"word {number}" for number in range(100)]
    assert read_hotwords(",".join(phrases)) == phrases
    assert read_hotwords("\n".join(phrases)) == phrases
    for phrase in ("node.js", "AC/DC", " ".join(phrases)):  # no file has a name as long
        assert read_hotwords(phrase) == [phrase]
    for missing in ("gone.txt", "my,gone.JSON", "./gone", "/gone/words", f"{tmp_path}/gone"):
        with pytest.raises(SbkitError, match="`hotwords` must be readable"):
            read_hotwords(missing)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(SbkitError, match=r"`hotwords` \(.*\) must be UTF-8"):
        read_hotwords(str(file))
