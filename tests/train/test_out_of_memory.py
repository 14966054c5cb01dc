"""A batch that does not fit into memory is split, and its step is the one that was declared."""

from typing import Any

import pytest
import torch
from speechbrain import Stage
from torch import nn

from sbkit.base.errors import SbkitError
from sbkit.train.evaluation import evaluate_splits
from sbkit.train.out_of_memory import BatchSplitter, TooLarge
from sbkit.train.step import DdpStep, ForwardLoss
from tests.train.splitting import UTTERANCES, make_batches, make_brain, train


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_did_not_fit_has_the_gradient_of_the_whole(
    where: str, accumulation: int, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(UTTERANCES, where, accumulation)
    assert capsys.readouterr().out == ""
    split = train(3, where, accumulation)
    assert split == pytest.approx(whole, rel=1e-5)
    first, second = capsys.readouterr().out.splitlines()  # 8 and 4 at a time; never again
    assert first.startswith("note: a batch of 8 utterances of 0.2 s (clip0-0, clip0-1, clip0-2, ")
    assert "It is split in two, as all of this size are from now on" in first
    assert second.startswith("note: a batch of 4 utterances")


def test_validation_goes_on_in_halves_too(capsys: pytest.CaptureFixture[str]) -> None:
    batches = {"valid": list(make_batches())}
    whole, split = (make_brain(most) for most in (UTTERANCES, 3))
    wanted = evaluate_splits(whole, batches, Stage.VALID, phase="valid")
    assert capsys.readouterr().out == ""
    found = evaluate_splits(split, batches, Stage.VALID, phase="valid")
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert [len(each.sums) for each in found] == [2] * 4 * len(wanted)
    sums, counts = (torch.cat([getattr(each, n) for each in found]) for n in ("sums", "counts"))
    torch.testing.assert_close(sums, torch.cat([each.sums for each in wanted]))
    assert torch.equal(counts, torch.cat([each.counts for each in wanted]))


def test_an_utterance_that_does_not_fit_is_named() -> None:
    with pytest.raises(SbkitError, match=r"clip0-0 \(0\.0 s\) does not\. Lower --max_seconds"):
        train(0, "forward", 1)


def test_normalization_over_all_ranks_cannot_begin_again() -> None:
    modules = nn.ModuleList([nn.SyncBatchNorm(2)])
    graph: Any = ForwardLoss(modules=modules, forward=print, objectives=print)
    with pytest.raises(SbkitError, match="sees the batch of all ranks, but one did not"):
        DdpStep(graph, torch.device("cpu")).require_independent_forward()


def test_batches_that_only_their_loader_knows_are_refused() -> None:
    with pytest.raises(SbkitError, match="or be one of sbkit's, which can be split"):
        TooLarge.of((torch.zeros(2), torch.zeros(2))).refuse()


def test_what_is_smaller_in_one_way_stays_whole() -> None:
    batch = next(make_batches())  # 8 utterances of at most 8 samples
    splitter = BatchSplitter()
    assert list(splitter.split(batch)) == [batch]
    splitter.learn([TooLarge(("a",), (4, 9)), TooLarge(("b",), (9, 4))], is_shared=True)
    assert list(splitter.split(batch)) == [batch]
    splitter.learn([TooLarge(("c",), (4, 8))], is_shared=True)
    pieces = list(splitter.split(batch))
    assert [tuple(each.audio.shape) for each in pieces] == [(4, 4), (2, 6), (2, 8)]
    assert [name for each in pieces for name in each.ids] == batch.ids
