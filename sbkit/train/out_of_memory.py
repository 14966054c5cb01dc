"""A batch that does not fit into memory: what is too large, and how a batch is split by it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch

from sbkit.base.errors import SbkitError
from sbkit.data.batches.batch import Batch
from sbkit.distributed.ranks import rank, world_size
from sbkit.logs.log import say
from sbkit.train.nonfinite import ids_of

SHOWN = 3  # utterances that are named
Made = TypeVar("Made")


@dataclass(frozen=True)
class TooLarge:
    """A batch that did not fit, or a piece of one.

    size: utterances, and samples of the longest; None where it is not one of sbkit's batches;
    seconds: of the longest; rank: where it did not fit.
    """

    ids: tuple[str, ...]
    size: tuple[int, int] | None = None
    seconds: float = 0.0
    rank: int = 0

    @classmethod
    def of(cls, batch: Any) -> "TooLarge":
        """Describe a batch of this rank."""
        ids = tuple(ids_of(batch)[:SHOWN])
        if not isinstance(batch, Batch):
            return cls(ids, rank=rank())
        samples = batch.audio.shape[1]
        counted = int((batch.audio_lengths * batch.weights.cpu()).sum())
        return cls(ids, (len(batch), samples), samples * batch.seconds / max(1, counted), rank())

    @property
    def is_splittable(self) -> bool:
        """Return whether it is a batch of several utterances that sbkit made."""
        return self.size is not None and self.size[0] > 1

    def refuse(self) -> NoReturn:
        """Raise SbkitError for what cannot be split."""
        if self.size is None:
            raise SbkitError(
                "A batch must fit into memory or be one of sbkit's, which can be split, but one of "
                f"{', '.join(self.ids) or 'a loader of its own'} is neither. Let the loader make "
                "smaller ones."
            )
        raise SbkitError(
            f"Each utterance must fit into memory by itself, but {self.ids[0]} ({self.seconds:.1f} "
            "s) does not. Lower --max_seconds, take a smaller model, or set --precision=bf16 where "
            "the device has it."
        )

    def __str__(self) -> str:
        utterances = self.size[0] if self.size else 0
        where = f" of rank {self.rank}" if world_size() > 1 else ""
        return (
            f"note: a batch of {utterances} utterances of {self.seconds:.1f} s "
            f"({', '.join(self.ids)}, ...) did not fit into the memory{where}. It is split in two, "
            "as all of this size are from now on: the same sums in more time."
        )


def halves(batch: Batch) -> tuple[Batch, Batch]:
    """Split a batch of at least two utterances."""
    middle = len(batch) // 2
    return batch.take(slice(middle)), batch.take(slice(middle, None))


class BatchSplitter:
    """Split batches until they are smaller than all that did not fit.

    A batch is smaller if it has fewer utterances, or if its longest is shorter: memory grows with
    both and, because of attention, faster than their product.
    """

    def __init__(self) -> None:
        self._too_large = set[tuple[int, int]]()

    def learn(self, failures: Sequence[TooLarge], *, is_shared: bool) -> None:
        """Remember what did not fit, and say it; is_shared: the other ranks do the same.

        Raises SbkitError for what cannot be split.
        """
        for each in failures:
            if not each.is_splittable:
                each.refuse()
        self._too_large |= {each.size for each in failures if each.size is not None}
        for each in failures:
            if is_shared or rank() == 0:
                say(str(each))
            else:  # no other rank knows
                print(each, flush=True)

    def split(self, batch: Any) -> Iterator[Any]:
        """Yield the batch, or its pieces."""
        if self._is_too_large(batch):
            for half in halves(batch):
                yield from self.split(half)
        else:
            yield batch

    def compute(self, batch: Any, make: Callable[[Any], Made]) -> Iterator[Made]:
        """Yield what is made of a batch, or of each of its pieces where it does not fit.

        Raises SbkitError for an utterance that does not fit by itself.
        """
        for piece in self.split(batch):
            failure = None
            try:
                made = make(piece)
            except torch.OutOfMemoryError:
                failure = TooLarge.of(piece)
            if failure is None:
                yield made
                continue
            self.learn([failure], is_shared=False)
            yield from self.compute(piece, make)

    def _is_too_large(self, batch: Any) -> bool:
        if not self._too_large or not isinstance(batch, Batch) or len(batch) == 1:
            return False
        return any(
            len(batch) >= utterances and batch.audio.shape[1] >= samples
            for utterances, samples in self._too_large
        )
