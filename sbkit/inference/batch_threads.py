"""Batches of clips in several threads at once, each of which has a core of its own.

Two threads that share the work of every operation wait for each other hundreds of times in a batch.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from sbkit.audio.io import Samples
from sbkit.inference.heard import Heard

Batch = Sequence[Samples]


def run_batches(
    hear: Callable[[Batch], list[Heard]],
    batches: Sequence[Batch],
    *,
    threads: int = 1,
    prepare: Callable[[], object] | None = None,
) -> list[list[Heard] | Exception]:
    """Run ``hear`` on each batch, and return what it gives or raises, in their order.

    prepare: called first in each thread; there is none where one would do.
    """

    def attempt(batch: Batch) -> list[Heard] | Exception:
        try:
            return hear(batch)
        except Exception as error:  # of whatever parts a model has
            return error

    threads = min(threads, len(batches))
    if threads < 2:
        return [attempt(batch) for batch in batches]
    with ThreadPoolExecutor(threads, initializer=prepare) as pool:
        return list(pool.map(attempt, batches))
