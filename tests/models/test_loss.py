"""Losses are sums over tokens, and an utterance without an alignment affects no other."""

from itertools import groupby, product

import pytest
import torch
from torch import Tensor

from sbkit.models.loss import Loss, attention_loss, ctc

BLANK, EOS = 0, 3


def scores(batch: int, frames: int, size: int) -> Tensor:
    """Draw log-probabilities: (B, U, V)."""
    torch.manual_seed(0)
    return torch.randn(batch, frames, size).log_softmax(-1).requires_grad_()


def over_all_paths(log_probs: Tensor, tokens: list[int]) -> float:
    """Sum the probability of every path that spells the tokens: (U, V) -> -log."""
    likelihood = 0.0
    for path in product(range(log_probs.shape[1]), repeat=log_probs.shape[0]):
        if [token for token, _ in groupby(path) if token != BLANK] == tokens:
            likelihood += float(sum(log_probs[n, token] for n, token in enumerate(path)).exp())
    return -float(torch.tensor(likelihood).log())


@pytest.mark.parametrize("labels", [[], [1], [1, 2], [1, 1], [2, 1, 2], [1, 1, 2]])
def test_ctc_sums_over_all_alignments(labels: list[int]) -> None:
    log_probs = scores(1, 4, 3).detach()
    tokens, counts = torch.tensor([labels]).long().reshape(1, -1), torch.tensor([len(labels)])
    loss = ctc(log_probs, torch.tensor([4]), tokens, counts, BLANK)
    assert float(loss.sums) == pytest.approx(over_all_paths(log_probs[0], labels), rel=1e-5)
    assert loss.counts.tolist() == [len(labels)]


def test_ctc_excludes_utterances_without_an_alignment() -> None:
    tokens = torch.tensor([[1, 2, 3], [1, 1, 0], [1, 1, 0], [2, 0, 0]])
    counts = torch.tensor([3, 2, 2, 1])
    frames = torch.tensor([2, 2, 3, 0])  # too few, too few for a repeat, just enough, none
    log_probs = scores(4, 5, 4)
    loss = ctc(log_probs, frames, tokens, counts, BLANK)
    assert loss.counts.tolist() == [0, 0, 2, 0]
    assert loss.sums[[0, 1, 3]].tolist() == [0.0, 0.0, 0.0]
    expected = over_all_paths(log_probs[2, :3].detach(), [1, 1])
    assert loss.sums[2].item() == pytest.approx(expected, rel=1e-5)
    loss.sums.sum().backward()
    grad = log_probs.grad
    assert grad.isfinite().all()
    assert grad.abs().sum((1, 2)).bool().tolist() == [False, False, True, False]


def by_hand(logits: Tensor, tokens: list[int], smoothing: float) -> Tensor:
    """Sum the cross entropies of the tokens and the end: (L + 1, V) -> ()."""
    loss = torch.zeros(())
    for row, token in zip(logits.log_softmax(-1), [*tokens, EOS], strict=False):
        loss = loss - (1 - smoothing) * row[token] - smoothing * row.mean()
    return loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_attention_loss_is_the_cross_entropy_of_tokens_and_end(smoothing: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 5, 7, requires_grad=True)
    tokens = torch.tensor([[4, 5, 6, 4], [5, 0, 0, 0], [0, 0, 0, 0]])
    counts = torch.tensor([4, 1, 0])
    loss = attention_loss(logits, tokens, counts, EOS, smoothing)
    for n, row in enumerate([[4, 5, 6, 4], [5], []]):
        torch.testing.assert_close(loss.sums[n], by_hand(logits[n], row, smoothing))
    assert loss.counts is counts
    loss.sums.sum().backward()
    assert logits.grad.abs().sum(-1).bool().tolist() == [
        [True] * 5,
        [True, True, False, False, False],
        [True, False, False, False, False],
    ]


def test_interpolate_excludes_what_the_first_loss_excludes() -> None:
    impossible = Loss(torch.tensor([0.0, 4.0]), torch.tensor([0, 3]))
    decoder = Loss(torch.tensor([10.0, 20.0], requires_grad=True), torch.tensor([5, 3]))
    mixture = impossible.interpolate(decoder, own_weight=0.5)
    assert mixture.sums.tolist() == [0.0, 12.0]
    assert mixture.counts.tolist() == [0, 3]
