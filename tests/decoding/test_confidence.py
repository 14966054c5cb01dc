"""A confidence is fitted to right and wrong words, and is calibrated or absent."""

from collections.abc import Sequence

import numpy as np
import pytest

from sbkit.base.arrays import Float64s
from sbkit.decoding.fit import LabeledWords, fit_confidence, label_words
from sbkit.decoding.greedy import Hypothesis
from sbkit.decoding.words import (
    Confidence,
    TimedToken,
    TimedWord,
    WordAligner,
    WordOffsets,
    agreement,
    features_of_audio,
    features_of_language,
)
from sbkit.lm.kneser_ney import train
from sbkit.text.tokenizer import Tokenizer
from tests.decoding.spoken import char_tokenizer, spoken


def word(text: str, *tokens: tuple[int, int, int]) -> TimedWord:
    return TimedWord(text, tuple(TimedToken(*token) for token in tokens))


def frames(*rows: Sequence[float]) -> Float64s:
    return np.log(np.array(rows) / np.sum(rows, axis=1, keepdims=True))


# -- features ------------------------------------------------------------------------------------


def test_entropy_is_0_for_a_certain_word_and_1_for_a_guess() -> None:
    sure, guess = [1e-9, 1, 1e-9, 1e-9], [1, 1, 1, 1]
    words = [word("a", (1, 0, 2)), word("b", (2, 2, 3))]
    features = features_of_audio(frames(sure, sure, guess), words)
    assert features["entropy"].tolist() == pytest.approx([0, 1], abs=0.01)
    assert features["posterior"][0] == pytest.approx(np.log(1 / 0.001), abs=0.01)
    assert features["posterior"][1] == pytest.approx(np.log(0.25 / 0.75), abs=0.01)


def test_posterior_is_that_of_the_weakest_token_at_its_best_frame() -> None:
    log_probs = frames([1, 8, 1, 1], [6, 2, 1, 1], [1, 3, 6, 2])
    (posterior,) = features_of_audio(log_probs, [word("ab", (1, 0, 2), (2, 2, 3))])["posterior"]
    assert posterior == pytest.approx(np.log(0.5 / 0.5), abs=0.01)
    longer = features_of_audio(log_probs, [word("abc", (1, 0, 2))])
    assert longer["length"].tolist() == [np.log(3)]


def test_agreement_is_the_share_of_the_beam_that_has_the_word() -> None:
    best = ["the", "north", "office"]
    others = [best, ["the", "nor", "office"], ["a", "the", "north"], ["the", "nor", "office"]]
    shares = agreement(best, others, np.log([4, 2, 1, 1]).tolist())
    assert shares.tolist() == pytest.approx([1, 5 / 8, 7 / 8])
    of_long_clip = agreement(best, others, (np.log([4, 2, 1, 1]) - 2000).tolist())
    assert of_long_clip.tolist() == pytest.approx([1, 5 / 8, 7 / 8])
    assert agreement(best, [best], [-900.0]).tolist() == [1, 1, 1]
    assert agreement(best, [], []).tolist() == [1, 1, 1]  # of a decoder without a beam


def test_features_of_language_depend_on_the_history() -> None:
    lm = train([["call", "the", "office"]] * 3 + [["call", "me"]], order=2).model
    features = features_of_language(lm, ["call", "zebra", "the"])
    assert features["known"].tolist() == [1, 0, 1]
    assert features["lm"][0] == lm.score(lm.start, lm.id_of("call"))[0]
    after = features_of_language(lm, ["call", "the"])["lm"][1]
    assert after > features["lm"][2]  # what stands before counts


# -- fitting -------------------------------------------------------------------------------------


def utterances(count: int, *, informed: bool = True, words: int = 4) -> list[LabeledWords]:
    """Draw words whose log odds are twice their posterior, or whose features tell nothing."""
    random = np.random.default_rng(1)
    labeled = []
    for place in range(count):
        posterior = random.standard_normal(words)
        odds = 2 * posterior if informed else 0 * posterior
        right = random.random(words) < 1 / (1 + np.exp(-odds))
        features = {
            "entropy": random.uniform(0, 1, words),
            "posterior": posterior,
            "length": np.zeros(words),
            "agreement": np.ones(words),
        }
        labeled.append(LabeledWords(f"utterance {place}", features, right.tolist()))
    return labeled


def test_fitted_confidence_is_calibrated_on_other_words() -> None:
    fitted = fit_confidence(utterances(500))
    assert fitted.confidence is not None
    assert fitted.calibration is not None
    assert fitted.calibration.ECE < 0.04
    assert fitted.calibration.NCE is not None
    assert fitted.calibration.NCE > 0.25
    assert set(fitted.confidence.weights) == {"entropy", "posterior"}  # the others never change
    assert fitted.confidence.weights["posterior"] == pytest.approx(2, abs=0.2)
    assert fitted.plain()["weights"] == fitted.confidence.plain()
    assert Confidence.of(fitted.plain()["weights"]) == fitted.confidence


def test_fitted_confidence_does_not_depend_on_the_order() -> None:
    labeled = utterances(60)
    assert fit_confidence(labeled[1::2] + labeled[::2]).plain() == fit_confidence(labeled).plain()


def test_too_few_words_give_no_confidence() -> None:
    fitted = fit_confidence(utterances(8))
    assert fitted.confidence is None
    assert fitted.plain()["weights"] is None
    assert "at least 20 right and 20 wrong words" in str(fitted)
    assert fit_confidence([]).confidence is None
    (one,) = utterances(1, words=100)
    assert "fitting needs two utterances" in str(fit_confidence([one]))


def test_uninformative_features_give_no_confidence() -> None:
    fitted = fit_confidence(utterances(40, informed=False))
    assert fitted.confidence is None
    assert fitted.calibration is not None
    assert fitted.calibration.NCE is not None
    assert fitted.calibration.NCE <= 0
    assert str(fitted).startswith("none, because it predicts words it was not fitted to too badly")


# -- words ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    texts = ["call the office", "cold norm"]
    return char_tokenizer(tmp_path_factory.mktemp("tokenizer"), texts)


def test_aligner_gives_an_unclear_word_a_lower_confidence(tokenizer: Tokenizer) -> None:
    log_probs = spoken(tokenizer, "call the office", {5: "c"})
    tokens = tokenizer.encode("call the office")
    aligner = WordAligner(
        tokenizer=tokenizer,
        samples_per_frame=640,
        sample_rate=16_000,
        offsets=WordOffsets(0.0, 0.0),
        confidence=Confidence(0.0, {"posterior": 1.0}),
        unjudged=frozenset({"office"}),
    )
    call, the, office = aligner.align(log_probs, tokens, samples=640 * len(log_probs))
    assert [call.text, the.text, office.text] == ["call", "the", "office"]
    assert (call.start, call.end) == (0.0, pytest.approx(7 * 0.04))
    assert call.confidence is not None
    assert the.confidence is not None
    assert the.confidence < 0.5 < 0.99 < call.confidence <= 0.999
    assert office.confidence is None
    assert "confidence" not in office.plain()
    assert aligner.align(log_probs[:0], [], samples=0) == ()


def test_label_words_compares_features_with_the_reference(tokenizer: Tokenizer) -> None:
    tokens = tuple(tokenizer.encode("call the norm"))
    other = tuple(tokenizer.encode("cold the norm"))
    beam = [Hypothesis(tokens=ids, score=0, ctc_score=0, lm_score=0) for ids in (tokens, other)]
    aligner = WordAligner(tokenizer=tokenizer, samples_per_frame=640, sample_rate=16_000)
    words = aligner.extract_features(spoken(tokenizer, "call the norm", {}), tokens, beam)
    labeled = label_words(words, "call norm")
    assert labeled.right == [True, False, True]
    assert labeled.features["agreement"].tolist() == [0.5, 1.0, 1.0]
    assert "known" not in labeled.features  # there is no language model
