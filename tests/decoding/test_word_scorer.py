"""Words are priced as they are spelled: a promise at once, the rest when the word is known."""

from collections.abc import Sequence

import pytest

from sbkit.decoding.word_scorer import WordScorer, make_lexicon
from tests.decoding.by_definition import CHARACTERS, LettersTokenizer, random_model

MODEL = random_model(("aa", "ab", "bb"), seed=5)
SPACE, A, B = 1, 2, 3  # of CHARACTERS


def scorer_of(pieces: tuple[str, ...] = CHARACTERS, words: Sequence[str] = ()) -> WordScorer:
    return WordScorer(
        lm=MODEL,
        lexicon=make_lexicon(MODEL, LettersTokenizer(pieces)),
        tokenizer=LettersTokenizer(pieces),
        lm_weight=1.0,
        word_bonus=0.25,
        unknown_word_score=-7.0,
        added_words=words,
    )


def scores(scorer: WordScorer, tokens: Sequence[int]) -> list[float]:
    """List what each token adds, and last what the end adds."""
    state, added = scorer.start(), list[float]()
    for token in tokens:
        score, state = scorer.step(state, token)
        added.append(score)
    return [*added, scorer.end(state)]


def log_prob(word: str, history: tuple[int, ...] = (1,)) -> float:
    return MODEL.score(history, MODEL.id_of(word))[0]


def test_a_word_begun_pays_its_best_unigram_at_once_and_the_rest_at_its_end() -> None:
    unigrams = {word: log_prob(word, ()) for word in ("aa", "ab")}
    added = scores(scorer_of(), [A, B, SPACE])
    assert added[0] == pytest.approx(max(unigrams.values()) + 0.25)
    assert added[1] == pytest.approx(unigrams["ab"] - max(unigrams.values()))
    assert added[2] == pytest.approx(log_prob("ab") - unigrams["ab"])
    assert sum(added[:3]) == pytest.approx(log_prob("ab") + 0.25)
