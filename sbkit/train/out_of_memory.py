"""A batch that does not fit into memory: what is too large, and how a batch is split by it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from sbkit.base.errors import SbkitError
from sbkit.base.units import SAMPLE_RATE, samples_to_seconds
from sbkit.data.batch import Batch
from sbkit.distributed.ranks import rank, world_size
from sbkit.train.nonfinite import ids_of

SHOWN = 3  # utterances that are named


@dataclass(frozen=True)
class TooLarge:
    """A batch that did not fit, or a piece of one.

    utterances, samples: its size, the longest one's for all; None where it is not one of sbkit's
    batches; rank: where it did not fit.
    """

    ids: tuple[str, ...]
    size: tuple[int, int] | None
    rank: int

    @classmethod
    def of(cls, batch: Any) -> "TooLarge":
        """Describe a batch of this rank."""
        size = (len(batch), batch.audio.shape[1]) if isinstance(batch, Batch) else None
        return cls(tuple(ids_of(batch)[:SHOWN]), size, rank())

    @property
    def is_splittable(self) -> bool:
        """Return whether it is a batch of several utterances that sbkit made."""
        return self.size is not None and self.size[0] > 1

    def refuse(self, sample_rate: int = SAMPLE_RATE) -> NoReturn:
        """Raise SbkitError for what cannot be split."""
        if self.size is None:
            raise SbkitError(
                "A batch must fit into memory or be one of sbkit's, which can be split, but one of "
                f"{', '.join(self.ids) or 'a loader of its own'} is neither. Let the loader make "
                "smaller ones."
            )
        seconds = samples_to_seconds(self.size[1], sample_rate)
        raise SbkitError(
            f"Each utterance must fit into memory by itself, but {self.ids[0]} ({seconds:.1f} s) "
            "does not. Lower --max_seconds, take a smaller model, or set --precision=bf16 where "
            "the device has it."
        )

    def describe(self, sample_rate: int) -> str:
        """Say what did not fit, and what becomes of it."""
        assert self.size is not None
        utterances, samples = self.size
        seconds = samples_to_seconds(samples, sample_rate)
        where = f" of rank {self.rank}" if world_size() > 1 else ""
        return (
            f"note: a batch of {utterances} utterances of {seconds:.1f} s ({', '.join(self.ids)}, "
            f"...) did not fit into the memory{where}. Its step begins again, and batches of this "
            "size are split in two from now on: the same gradient in more time."
        )


def halves(batch: Batch) -> tuple[Batch, Batch]:
    """Split a batch of at least two utterances."""
    middle = len(batch) // 2
    return batch.take(slice(middle)), batch.take(slice(middle, None))


class BatchSplitter:
    """Split batches until they are smaller than all that did not fit.

    Smaller is what has fewer utterances or shorter ones: memory grows with both, and with attention
    more than with their product.
    """

    def __init__(self) -> None:
        self._too_large = set[tuple[int, int]]()

    def learn(self, failures: Iterable[TooLarge]) -> None:
        """Remember sizes that did not fit."""
        self._too_large |= {each.size for each in failures if each.size is not None}

    def split(self, batch: Any) -> Iterator[Any]:
        """Yield the batch, or its pieces."""
        if self._is_too_large(batch):
            for half in halves(batch):
                yield from self.split(half)
        else:
            yield batch

    def _is_too_large(self, batch: Any) -> bool:
        if not self._too_large or not isinstance(batch, Batch) or len(batch) == 1:
            return False
        return any(
            len(batch) >= utterances and batch.audio.shape[1] >= samples
            for utterances, samples in self._too_large
        )
