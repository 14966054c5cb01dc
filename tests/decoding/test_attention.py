"""The attention decoder scores texts as it was trained, and rescores the hypotheses of CTC."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch

from sbkit.decoding.decoder import AttentionDecoder, rescore
from sbkit.decoding.prefix_beam import PrefixBeamSearch
from sbkit.models.loss import attention_loss
from tests.decoding.by_definition import SETTINGS, best_of, enumerate_paths, random_matrices
from tests.models.test_asr import make_model, sbkit_parts


class RandomDecoder(AttentionDecoder):
    """An attention decoder of random numbers; the end of a text has the blank's column."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def score(self, sequences: Sequence[tuple[int, ...]]) -> list[float]:
        return [
            sum(self._log_prob(tokens[:n], token) for n, token in enumerate((*tokens, 0)))
            for tokens in sequences
        ]

    def _log_prob(self, prefix: tuple[int, ...], token: int) -> float:
        drawn = np.random.default_rng([self._seed, len(prefix), *prefix]).normal(size=4)
        return float((drawn - np.log(np.exp(drawn).sum()))[token])


def test_rescore_of_all_hypotheses_equals_enumeration() -> None:
    for seed, log_probs in enumerate(random_matrices(30)):
        attention, ctc_scores = RandomDecoder(seed), enumerate_paths(log_probs)
        beam = PrefixBeamSearch(settings=SETTINGS).decode(log_probs)
        scores = {
            tokens: ctc + 1.5 * attention.score([tokens])[0] for tokens, ctc in ctc_scores.items()
        }
        rescored = rescore(beam, attention, 1.5)
        assert rescored[0].tokens == best_of(scores)
        ordered = sorted(scores.values(), reverse=True)
        assert [hypothesis.score for hypothesis in rescored] == pytest.approx(ordered, abs=1e-9)
        for hypothesis in rescored:
            parts = hypothesis.ctc_score + hypothesis.attention_score
            assert hypothesis.score == pytest.approx(parts, abs=1e-9)
        unweighted = rescore(beam, attention, 0.0)
        assert [each.tokens for each in unweighted] == [each.tokens for each in beam]
    assert rescore([], RandomDecoder(0), 1.0) == []


@torch.no_grad()
def test_attention_decoder_scores_texts_as_the_training_loss_does() -> None:
    torch.manual_seed(0)
    model = make_model(sbkit_parts())
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
    end = model.score_tokens(states[0], np.zeros((1, 0), np.int64))[0, 0, model.vocabulary.eos]
    assert long.score([()]) == [pytest.approx(float(end), abs=1e-5)]
