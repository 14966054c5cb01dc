"""The gradient of a step, from its micro-batches, and from pieces of them where they do not fit.

Losses are sums and counts, so pieces have the gradient of the whole batch. Where memory ends, what
the step has added up is dropped, and it begins again, on all ranks if it was shared already; until
then nothing is kept for it, and no step pays for it but with one number that the hosts exchange.

Each micro-batch draws again from the random state that it began with, its pieces one after the
other: masks and dropout of a split batch are others than those of the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.rng import TorchState, restore_torch_state, torch_state
from sbkit.distributed.ranks import any_rank, gather_over_ranks
from sbkit.models.loss import Loss
from sbkit.train.out_of_memory import BatchSplitter, TooLarge
from sbkit.train.step import as_loss


@dataclass(frozen=True)
class PlacedBatch:
    """A batch on its device, the random state that it begins with, and its number in the epoch."""

    batch: Any
    random: TorchState
    number: int


@dataclass(frozen=True)
class Computed:
    """What the recipe predicts of a micro-batch, or of its last piece, and what it loses."""

    outputs: Any
    objective: Any


class Accumulation:
    """Forward and backward of the micro-batches of a Brain's step."""

    def __init__(self, brain: Any) -> None:
        self._brain = brain
        self._splitter = BatchSplitter()
        self._of_step: list[PlacedBatch] = []
        self._piece: Any = None  # in hand

    def begin(self) -> None:
        """Begin a step."""
        self._of_step.clear()

    def add(self, batch: Any) -> Computed:
        """Add the gradient of a micro-batch, which the last of a step shares among the ranks.

        Raises SbkitError, on all ranks that share it, where an utterance does not fit by itself.
        """
        brain = self._brain
        self._of_step.append(PlacedBatch(batch, torch_state(brain.device), brain.step))
        computed = self._attempt(self._of_step[-1:])
        while computed is None:
            brain.modules.zero_grad(set_to_none=True)
            brain._global_step.begin_again()
            computed = self._attempt(self._of_step, again=True)
        return computed

    def _attempt(
        self, micro_batches: Sequence[PlacedBatch], *, again: bool = False
    ) -> Computed | None:
        """Return what came of the last; None where memory ended, here or where it is shared."""
        ddp_step = self._brain.ddp_step
        is_shared = ddp_step.is_wrapped and self._brain.should_step
        computed, failure = None, None
        try:
            for each in micro_batches:
                if again:
                    restore_torch_state(each.random, self._brain.device)
                computed = self._compute(each, is_last=each is micro_batches[-1])
        except torch.OutOfMemoryError:
            computed, failure = None, TooLarge.of(self._piece)
        # Not where it is caught: the exception holds all that fills the memory.
        if failure is not None and ddp_step.is_wrapped:
            ddp_step.require_independent_forward()
        if not is_shared:
            if failure is not None:
                self._splitter.learn([failure], is_shared=False)
            return computed
        if failure is not None:
            ddp_step.send_zeros()
        if any_rank(failure is not None):
            everyone = gather_over_ranks(failure)
            self._splitter.learn([each for each in everyone if each], is_shared=True)
            ddp_step.renew()
            return None
        return computed

    def _compute(self, micro_batch: PlacedBatch, *, is_last: bool) -> Computed:
        """Add the gradient of one, piece by piece; only the last piece is shared."""
        brain = self._brain
        pieces = list(self._splitter.split(micro_batch.batch))
        losses, totals, outputs, objective = [], [], None, None
        for piece in pieces:
            self._piece = piece
            with brain.no_sync(not (brain.should_step and is_last and piece is pieces[-1])):
                with brain.training_ctx:
                    outputs, objective = brain.ddp_step(piece)
                loss = as_loss(objective)
                totals.append(brain._global_step.backward(loss, brain.scaler))
                losses.append(loss.detach())
        if len(pieces) > 1:
            objective = _join(objective, losses)
        brain._global_step.nonfinite.record(
            micro_batch.batch, micro_batch.random, reduce(torch.add, totals), micro_batch.number
        )
        return Computed(outputs, objective)


def _join(objective: Any, losses: Sequence[Loss]) -> Loss:
    """Return the loss of a batch from those of its pieces."""
    if not isinstance(objective, Loss):
        raise SbkitError(
            "`compute_objectives` must return a Loss of sums and counts for a batch that is split "
            f"because it does not fit into memory, but returned a {type(objective).__name__}. "
            "Return one, or make batches smaller."
        )
    sums, counts = ([getattr(each, name) for each in losses] for name in ("sums", "counts"))
    return Loss(torch.cat(sums), torch.cat(counts))
