"""A batch that does not fit into memory is split, and its step is the one that was declared."""

import pytest
import torch

from sbkit.base.errors import SbkitError
from sbkit.train.out_of_memory import BatchSplitter, TooLarge
from tests.train.splitting import UTTERANCES, make_batches, train


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
    assert first.startswith("note: a batch of 8 utterances of 0.0 s (clip0-0, clip0-1, clip0-2, ")
    assert "begins again, and batches of this size are split in two from now on" in first
    assert second.startswith("note: a batch of 4 utterances")


def test_an_utterance_that_does_not_fit_is_named() -> None:
    with pytest.raises(SbkitError, match=r"clip0-0 \(0\.0 s\) does not\. Lower --max_seconds"):
        train(0, "forward", 1)


def test_batches_that_only_their_loader_knows_are_refused() -> None:
    with pytest.raises(SbkitError, match="or be one of sbkit's, which can be split"):
        TooLarge.of((torch.zeros(2), torch.zeros(2))).refuse()


def test_what_is_smaller_in_one_way_stays_whole() -> None:
    batch = next(make_batches())  # 8 utterances of at most 8 samples
    splitter = BatchSplitter()
    assert list(splitter.split(batch)) == [batch]
    splitter.learn([TooLarge((), (4, 9), 0), TooLarge((), (9, 4), 0)])
    assert list(splitter.split(batch)) == [batch]
    splitter.learn([TooLarge((), (4, 8), 0)])
    pieces = list(splitter.split(batch))
    assert [tuple(each.audio.shape) for each in pieces] == [(4, 4), (2, 6), (2, 8)]
    assert [name for each in pieces for name in each.ids] == batch.ids
