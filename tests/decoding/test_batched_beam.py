"""A batch is decoded as its utterances are one by one."""

from math import inf

import numpy as np
import pytest
import torch

from sbkit.base.errors import SbkitError
from sbkit.decoding.batched_beam import BatchedBeamSearch
from sbkit.decoding.frames import BeamSettings
from sbkit.decoding.hotwords import HotwordScorer
from sbkit.decoding.prefix_beam import PrefixBeamSearch
from sbkit.decoding.scorer import NOTHING, Scorer, SumOfScorers, TokenScorer
from sbkit.decoding.scorer_table import tabulate
from tests.decoding.by_definition import CHARACTERS, random_model, spelling

V = 4


def token_model() -> Scorer:
    model = random_model(CHARACTERS[1:], seed=1)
    return TokenScorer(lm=model, pieces=CHARACTERS, lm_weight=0.7, token_bonus=0.4, special=(0,))


def with_hotwords() -> Scorer:
    hotwords = HotwordScorer(rewards={"ab": 1.5, "b a": 2.25}, spelling=spelling(CHARACTERS))
    return SumOfScorers(scorers=[token_model(), hotwords])


def batch(seed: int, utterances: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Make log-probabilities of 0 to 14 frames; the padding is no number at all."""
    drawn = np.random.default_rng(seed)
    lengths = drawn.integers(0, 15, utterances)
    log_probs = torch.tensor(drawn.normal(scale=1.5, size=(utterances, 15, V))).log_softmax(-1)
    log_probs[torch.tensor(drawn.random(log_probs.shape) < 0.05)] = -torch.inf
    log_probs[..., 0].clamp_(min=-9)
    for row, length in zip(log_probs, lengths, strict=True):
        row[length:] = torch.nan
    return log_probs, torch.tensor(lengths)


@pytest.mark.parametrize("make", [lambda: NOTHING, token_model, with_hotwords])
@pytest.mark.parametrize("size", [1, 3, 16, 100])
@pytest.mark.parametrize("threshold", [-inf, -2.0])
def test_it_is_the_plain_search(make: type[Scorer], size: int, threshold: float) -> None:
    settings = BeamSettings(
        vocab_size=V, beam_size=size, token_threshold=threshold, excluded=(2,) if size == 3 else ()
    )
    plain = PrefixBeamSearch(settings=settings, scorer=make())
    batched = BatchedBeamSearch(settings=settings, table=tabulate(make(), settings))
    for seed in range(3):
        log_probs, lengths = batch(seed)
        answers = batched.decode(log_probs, lengths)
        for row, length, answer in zip(log_probs, lengths.tolist(), answers, strict=True):
            expected = plain.decode(row[:length].numpy())
            assert [each.tokens for each in answer] == [each.tokens for each in expected]
            for one, other in zip(answer, expected, strict=True):
                assert one.score == pytest.approx(other.score, abs=1e-9)
                assert one.ctc_score == pytest.approx(other.ctc_score, abs=1e-9)
                assert one.lm_score == pytest.approx(other.lm_score, abs=1e-9)


def test_half_precision_is_added_up_in_full() -> None:
    settings = BeamSettings(vocab_size=V)
    log_probs, lengths = batch(7)
    answers = BatchedBeamSearch(settings=settings).decode(log_probs.bfloat16(), lengths)
    plain = PrefixBeamSearch(settings=settings)
    for row, length, answer in zip(log_probs.bfloat16(), lengths.tolist(), answers, strict=True):
        assert answer[0].tokens == plain.decode(row[:length].double().numpy())[0].tokens


def test_a_batch_of_nothing_has_an_empty_text_each() -> None:
    search = BatchedBeamSearch(settings=BeamSettings(vocab_size=V))
    answers = search.decode(torch.zeros(2, 0, V), torch.tensor([0, 0]))
    assert [[each.tokens for each in answer] for answer in answers] == [[()], [()]]


def test_a_scorer_with_too_many_states_is_refused() -> None:
    settings = BeamSettings(vocab_size=V)
    assert len(tabulate(token_model(), settings).ends) == 13  # `<s>`, and 3 + 9 histories
    with pytest.raises(SbkitError, match="must have at most 5 states, but has more"):
        tabulate(token_model(), settings, largest=5)


def test_what_cannot_be_decoded_is_refused_with_its_place() -> None:
    settings = BeamSettings(vocab_size=V)
    search = BatchedBeamSearch(settings=settings)
    log_probs, lengths = torch.zeros(2, 3, V), torch.tensor([3, 2])
    log_probs[1, 1, 2] = torch.nan
    with pytest.raises(SbkitError, match="that of frame 1 is nan"):
        search.decode(log_probs, lengths)
    with pytest.raises(SbkitError, match=r"has tokens \(4\), but have 5"):
        search.decode(torch.zeros(2, 3, 5), lengths)
