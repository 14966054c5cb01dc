"""Weights are chosen on a sample of the validation sets; confidences are calibrated or absent."""

from dataclasses import astuple
from typing import Any

import numpy as np
import pytest

from sbkit.decoding.beam import TOKEN_THRESHOLD, BeamDecoder
from sbkit.decoding.decoder import DecoderWeights
from sbkit.decoding.fit import (
    FittedWeights,
    ValidationUtterance,
    count_all_errors,
    fit_confidence,
    fit_decoder,
    fit_weights,
    sample_utterances,
)
from sbkit.decoding.word_times import WordFeatures
from sbkit.evaluate.calibration import measure_calibration
from sbkit.evaluate.wer import TextErrors
from sbkit.lm.language_models import LanguageModels
from sbkit.logs.progress import reporting
from sbkit.text.tokenizer import Tokenizer
from tests.decoding.spoken import char_tokenizer, make_aligner, misheard, spoken, train_models

Fitting = tuple[BeamDecoder, list[ValidationUtterance], FittedWeights]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return char_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def fitting(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Fitting:
    file = tmp_path_factory.mktemp("models") / "lm.safetensors"
    train_models(file, tokenizer)
    decoder = BeamDecoder(tokenizer=tokenizer, language_models=file)
    utterances = misheard(tokenizer)
    return decoder, utterances, fit_weights(decoder, utterances)


def test_searched_weights_make_fewer_errors_than_none(fitting: Fitting) -> None:
    decoder, utterances, fitted = fitting

    def errors_with(weights: DecoderWeights) -> TextErrors:
        return count_all_errors([decoder.with_weights(weights)], utterances, decoder.tokenizer)[0]

    without_models = errors_with(DecoderWeights(word=0, token=0, unknown_word=0))
    assert fitted.errors.wer < 0.5 * without_models.wer
    assert fitted.errors == errors_with(fitted.weights)
    assert fitted.plain()["utterances"] == 6


def test_fit_decoder_pings_at_each_utterance(fitting: Fitting) -> None:
    """All trials of the weights may take longer than the watchdog waits."""
    decoder, utterances, _ = fitting
    phases: list[str] = []
    aligner = make_aligner(decoder.tokenizer)
    with reporting(lambda phase, _: bool(phases.append(phase))):
        fitted = fit_decoder(decoder, aligner, utterances, splits=["dev"], by_words=True)
    assert phases.count("tuning") >= 64 * 6
    assert phases.count("confidence") == 6
    again = fit_decoder(fitted.decoder, aligner, [], splits=[], by_words=True)
    assert again.weights is None  # it has weights


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_sample_of_a_large_set_is_the_same_on_any_number_of_ranks(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    utterance = misheard(tokenizer)[0]
    tokens = int((utterance.log_probs > TOKEN_THRESHOLD).sum())
    utterances = [utterance._replace(id=str(number)) for number in range(100)]
    shares = [utterances[rank::num_ranks] for rank in range(num_ranks)]
    counts = [[(utterance.order, tokens) for utterance in share] for share in shares]
    monkeypatch.setattr("sbkit.decoding.fit.gather_over_ranks", lambda own: counts)
    in_order = sorted(utterances, key=lambda utterance: utterance.order)
    silent = tokenizer.silent_ids
    for limit, size in ((8, 8), (8.5, 8), (100, 100)):
        samples = [sample_utterances(share, silent, int(limit * tokens)) for share in shares]
        ids = {utterance.id for share in samples for utterance in share}
        assert ids == {utterance.id for utterance in in_order[:size]}


def test_decoder_with_a_higher_cer_than_greedy_decoding_says_so(fitting: Fitting) -> None:
    """The model is right, but the words are new to the language model."""
    decoder, _, _ = fitting
    texts = ["so fat cats sat on mats", "fast rafts"]
    utterances = [ValidationUtterance(spoken(decoder.tokenizer, text, {}), text) for text in texts]
    stubborn = decoder.with_weights(DecoderWeights(word=3.0, token=3.0))
    aligner = make_aligner(decoder.tokenizer)
    notes = [
        fit_decoder(one, aligner, utterances, splits=["dev"], by_words=True).note
        for one in (stubborn, decoder.with_weights(DecoderWeights()))
    ]
    assert notes[1] == ""
    assert "of the beam decoder" in notes[0] and "of greedy decoding, 0.0 % (dev)" in notes[0]


def test_without_word_boundaries_the_model_of_words_is_not_used(fitting: Fitting) -> None:
    decoder, utterances, _ = fitting
    fitted = fit_weights(decoder, utterances[:2], by_words=False)
    assert "WER" not in fitted.plain()
    assert fitted.weights.word == 0
    assert set(decoder.with_weights(fitted.weights).used_weights) == {"token", "token_bonus"}
    models = LanguageModels(words=decoder.language_models.words, tokens=None)
    has_no_other = decoder.copy_with(language_models=models)
    assert fit_weights(has_no_other, utterances[:1], by_words=False).weights.word > 0


def test_ranks_that_share_a_set_choose_the_weights_of_the_whole_set(
    fitting: Fitting, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, utterances, whole = fitting
    trials_of_other: list[TextErrors] = []

    def gather(own: Any) -> list[Any]:
        """Store the trials of the first rank, and return them to the second."""
        if isinstance(own, int) or len(own) == 1:  # utterances, or errors with the chosen weights
            return [own]
        if trials_of_other:
            return [trials_of_other, own]
        trials_of_other.extend(own)
        return [own]

    monkeypatch.setattr("sbkit.decoding.fit.gather_over_ranks", gather)
    fit_weights(decoder, utterances[1::2])
    assert fit_weights(decoder, utterances[::2]).weights == whole.weights


# -- confidences


def drawn_words(count: int) -> list[tuple[WordFeatures, bool]]:
    """Draw words whose log odds are 1 + 2 * posterior + 0.5 * lm."""
    random = np.random.default_rng(1)
    posteriors, log_probs = random.standard_normal(count), random.uniform(-9, 0, count)
    odds = 1 + 2 * posteriors + 0.5 * log_probs
    are_right = random.random(count) < 1 / (1 + np.exp(-odds))
    triples = zip(posteriors.tolist(), log_probs.tolist(), are_right.tolist(), strict=True)
    return [(WordFeatures(posterior, 0.0, lm), right) for posterior, lm, right in triples]


def test_fitted_confidence_is_calibrated_on_other_words() -> None:
    words = drawn_words(4000)
    confidence = fit_confidence(words[::2])
    assert fit_confidence(words[::4] + words[2::4]) == confidence  # in any order
    assert confidence is not None
    assert astuple(confidence) == pytest.approx((1, 2, 0, 0.5), abs=0.3)
    features, are_right = zip(*words[1::2], strict=True)
    calibration = measure_calibration([*map(confidence, features)], are_right)
    assert calibration is not None
    assert calibration.ECE < 0.04


def test_words_that_a_feature_separates_have_finite_weights() -> None:
    clear, unclear = WordFeatures(2.0, 0.0, 0.0), WordFeatures(0.4, 0.0, 0.0)
    confidence = fit_confidence([(clear, True), (unclear, False)] * 30)
    assert confidence is not None
    assert confidence(clear) > 0.95 and confidence(unclear) < 0.05
    confidence = fit_confidence([(clear, True), (clear, False)] * 30)
    assert confidence is not None
    assert confidence(clear) == 0.5


def test_too_few_words_give_no_confidence() -> None:
    sure = (WordFeatures(6.0, 0.0, 0.0), True)
    for words in (drawn_words(30), [sure] * 99, []):
        assert fit_confidence(words) is None
