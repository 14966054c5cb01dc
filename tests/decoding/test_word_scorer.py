"""Words are priced as they are spelled: a promise at once, the rest when the word is known."""

from collections.abc import Sequence

import pytest

from sbkit.base.errors import SbkitError
from sbkit.decoding.scorer import TokenScorer
from sbkit.decoding.word_scorer import Entry, LexiconNode, WordScorer, extend_lexicon, make_lexicon
from tests.decoding.by_definition import CHARACTERS, PIECES, RandomModel, random_model, spelling

MODEL = random_model(("aa", "ab", "bb"), seed=5)
SPACE, A, B = 1, 2, 3  # of CHARACTERS


def scorer_of(pieces: tuple[str, ...] = CHARACTERS, words: Sequence[str] = ()) -> WordScorer:
    return WordScorer(
        lm=MODEL,
        lexicon=make_lexicon(MODEL, spelling(pieces)),
        spelling=spelling(pieces),
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


def test_a_spelling_pays_for_the_unknown_word_when_it_leaves_the_lexicon() -> None:
    added = scores(scorer_of(), [B, A, A, SPACE])  # no word begins with "ba"
    assert added[0] + added[1] == pytest.approx(log_prob("<unk>") + 0.25 - 7)
    assert added[2:4] == [0, 0]


def test_a_word_that_ends_too_early_is_unknown() -> None:
    assert sum(scores(scorer_of(), [A, SPACE])[:2]) == pytest.approx(log_prob("<unk>") + 0.25 - 7)


def test_begin_end_and_repeated_spaces_make_no_word() -> None:
    total = sum(scores(scorer_of(), [A, B, SPACE, B, B]))
    for spaced in ([SPACE, A, B, SPACE, B, B, SPACE], [SPACE, SPACE, A, B, SPACE, SPACE, B, B]):
        assert sum(scores(scorer_of(), spaced)) == pytest.approx(total)
    assert sum(scores(scorer_of(), [])) == pytest.approx(MODEL.score(MODEL.start, 2)[0])
    assert sum(scores(scorer_of(), [SPACE])) == pytest.approx(MODEL.score(MODEL.start, 2)[0])


def test_a_word_costs_the_same_however_it_is_cut_into_pieces() -> None:
    of_pieces = scorer_of(("<blank>", "▁", "a", "b", "▁a", "ab", "▁ab"))
    cuts = ([6, 1, 3, 3], [4, 3, 1, 3, 3], [1, 5, 1, 3, 3], [1, 2, 3, 1, 3, 3])  # "ab bb"
    totals = [sum(scores(of_pieces, cut)) for cut in cuts]
    assert totals == pytest.approx([sum(scores(scorer_of(), [A, B, SPACE, B, B]))] * 4)


def test_added_words_are_known_to_the_scorer_they_were_added_to_alone() -> None:
    plain, added = scorer_of(), scorer_of(words=["abba", "ab"])
    abba = [A, B, B, A]
    lm = log_prob("<unk>") + MODEL.score(MODEL.score(MODEL.start, 0)[1], 2)[0]
    assert sum(scores(added, abba)) == pytest.approx(lm + 0.25)
    assert sum(scores(plain, abba)) == pytest.approx(lm + 0.25 - 7)
    assert sum(scores(added, [A, B])) == pytest.approx(sum(scores(plain, [A, B])))


def test_a_larger_lexicon_shares_what_it_does_not_change() -> None:
    lexicon = extend_lexicon(LexiconNode(), [Entry("ab", 3, -2.0), Entry("ba", 4, -3.0)])
    larger = extend_lexicon(lexicon, [Entry("abc", 0, -1.0), Entry("ba", 0, -9.0)])
    assert larger.children["b"] is lexicon.children["b"]
    assert larger.best == -1.0 and lexicon.best == -2.0
    assert larger.children["a"].children["b"].children["c"].word == 0
    assert not lexicon.children["a"].children["b"].children
    assert larger.children["b"].children["a"].word == 4


def test_a_model_without_a_word_that_can_be_spelled_is_refused() -> None:
    with pytest.raises(SbkitError, match="must have words that the tokenizer can spell, but has"):
        make_lexicon(random_model(("xyz", "aé"), seed=0), spelling(CHARACTERS))


def test_a_model_of_other_tokens_is_refused() -> None:
    with pytest.raises(SbkitError, match="must be of the tokenizer's pieces, but knows 1 of 3"):
        TokenScorer(lm=random_model(("a", "the"), seed=0), pieces=CHARACTERS, special=(0,))


def test_a_model_of_pieces_scores_their_ids() -> None:
    model: RandomModel = random_model(("b", "▁", "▁a"), seed=3)  # in another order than the ids
    scorer = TokenScorer(lm=model, pieces=PIECES, lm_weight=2.0, token_bonus=0.5, special=(0,))
    score, state = scorer.step(scorer.start(), 1)
    assert score == pytest.approx(2 * model.score(model.start, model.id_of("▁a"))[0] + 0.5)
    assert scorer.end(state) == pytest.approx(2 * model.score(state, 2)[0])
