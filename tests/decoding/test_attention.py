"""The attention decoder decodes as it was trained, alone or together with CTC."""

from collections.abc import Sequence
from functools import partial
from math import inf

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sbkit.base.errors import SbkitError
from sbkit.decoding import attention as attention_decoding
from sbkit.decoding.attention import AttentionDecoder, JointBeamSearch, rescore
from sbkit.decoding.decoder import BeamDecoder
from sbkit.decoding.prefix_beam import PrefixBeamSearch
from sbkit.decoding.scorer import NOTHING, Scorer, TokenScorer
from sbkit.models.loss import attention_loss
from tests.decoding.by_definition import (
    BEAM_OF_16,
    CHARACTERS,
    SETTINGS,
    best_of,
    enumerate_paths,
    random_matrices,
    random_model,
    sentence_log_prob,
)
from tests.models.test_asr import asr_model, ours


class RandomDecoder(AttentionDecoder):
    """An attention decoder of random numbers; what ends a text has the blank's column."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def next_log_probs(self, prefixes: Sequence[tuple[int, ...]]) -> npt.NDArray[np.float64]:
        return np.stack([self._after(each) for each in prefixes])

    def score(self, sequences: Sequence[tuple[int, ...]]) -> list[float]:
        return [
            sum(float(self._after(each[:place])[token]) for place, token in enumerate((*each, 0)))
            for each in sequences
        ]

    def _after(self, prefix: tuple[int, ...]) -> npt.NDArray[np.float64]:
        drawn = np.random.default_rng([self._seed, len(prefix), *prefix]).normal(size=4)
        return np.asarray(drawn - np.log(np.exp(drawn).sum()))


@pytest.mark.parametrize("has_lm", [False, True])
def test_a_joint_beam_without_bounds_is_enumeration_and_with_16_nearly(
    has_lm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_decoding, "HOPELESS", inf)
    model = random_model(CHARACTERS[1:], seed=1)
    scorer: Scorer = NOTHING
    if has_lm:
        scorer = TokenScorer(lm=model, pieces=CHARACTERS, lm_weight=0.7, token_bonus=0.4)
    exact, bounded = (
        JointBeamSearch(settings=each, weight=0.6, eos=0, scorer=scorer)
        for each in (SETTINGS, BEAM_OF_16)
    )
    matrices, found = random_matrices(60), 0
    for seed, log_probs in enumerate(matrices):
        attention, heard = RandomDecoder(seed), enumerate_paths(log_probs)
        scores = {}
        for tokens, ctc in heard.items():
            spoken = [CHARACTERS[token] for token in tokens]
            lm = 0.7 * sentence_log_prob(model, spoken) + 0.4 * len(spoken) if has_lm else 0.0
            scores[tokens] = ctc + lm + 0.6 * attention.score([tokens])[0]
        answer = exact.decode(log_probs, attention)
        assert [each.score for each in answer] == pytest.approx(
            sorted(scores.values(), reverse=True), abs=1e-9
        )
        for each in answer:
            assert each.score == pytest.approx(scores[each.tokens], abs=1e-9)
            assert each.ctc_score == pytest.approx(heard[each.tokens], abs=1e-9)
            parts = each.ctc_score + each.lm_score + each.attention_score
            assert each.score == pytest.approx(parts, abs=1e-9)
        found += bounded.decode(log_probs, attention)[0].tokens == best_of(scores)
    assert found >= 0.9 * len(matrices)


def test_rescoring_all_hypotheses_finds_the_best_of_all() -> None:
    for seed, log_probs in enumerate(random_matrices(30)):
        attention, heard = RandomDecoder(seed), enumerate_paths(log_probs)
        beam = PrefixBeamSearch(settings=SETTINGS).decode(log_probs)
        scores = {tokens: ctc + 1.5 * attention.score([tokens])[0] for tokens, ctc in heard.items()}
        answer = rescore(beam, attention, 1.5)
        assert answer[0].tokens == best_of(scores)
        ordered = sorted(scores.values(), reverse=True)
        assert [each.score for each in answer] == pytest.approx(ordered, abs=1e-9)
        assert [each.tokens for each in rescore(beam, attention, 0.0)] == [
            each.tokens for each in beam
        ]
    assert rescore([], RandomDecoder(0), 1.0) == []


@torch.no_grad()
def test_a_text_is_scored_as_in_training_and_as_token_by_token() -> None:
    torch.manual_seed(0)
    model = asr_model(ours())
    states, lengths = torch.randn(2, 7, 16), torch.tensor([7, 4])
    tokens, counts = torch.tensor([[4, 5, 6], [8, 0, 0]]), torch.tensor([3, 1])
    logits = model.decoder_log_probs(tokens, states, lengths)
    losses = attention_loss(logits, tokens, counts, model.vocabulary.eos, 0.0).sums
    long, short = (
        AttentionDecoder(
            log_probs=partial(model.score_tokens, row[:count]), eos=model.vocabulary.eos
        )
        for row, count in zip(states, lengths.tolist(), strict=True)
    )
    assert long.score([(4, 5, 6), (8,)])[0] == pytest.approx(-float(losses[0]), abs=1e-5)
    assert short.score([(8,)]) == [pytest.approx(-float(losses[1]), abs=1e-5)]
    steps = [long.next_log_probs([(4, 5, 6)[:place]])[0] for place in range(4)]
    wanted = (4, 5, 6, model.vocabulary.eos)
    by_token = sum(float(row[token]) for row, token in zip(steps, wanted, strict=True))
    assert long.score([(4, 5, 6)]) == [pytest.approx(by_token, abs=1e-5)]
    assert long.score([()]) == [pytest.approx(float(steps[0][model.vocabulary.eos]), abs=1e-5)]


def test_another_way_to_take_part_is_refused_and_so_is_a_missing_decoder() -> None:
    with pytest.raises(SbkitError, match="none, rescore, joint, but is beam with aloud"):
        BeamDecoder(tokenizer=None, language_models="x", attention="aloud")  # type: ignore[arg-type]
    decoder = BeamDecoder(tokenizer=None, language_models="x", attention="joint")  # type: ignore[arg-type]
    with pytest.raises(SbkitError, match="must be given the attention decoder"):
        decoder.nbest(np.zeros((1, 4)))


def test_what_is_given_up_as_hopeless_would_not_have_been_the_best() -> None:
    """A prefix far below the best that ended is given up: sooner, and for the same answer."""
    search = JointBeamSearch(settings=SETTINGS, weight=0.3, eos=0)
    for seed, log_probs in enumerate(random_matrices(30, seed=3)):
        attention = RandomDecoder(seed)
        beam = search.decode(log_probs, attention)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention_decoding, "HOPELESS", inf)
            every = search.decode(log_probs, attention)
        assert beam[0] == every[0]
