"""The model that a runtime makes of a bundle, its output, and the one thread that runs it.

Compiled code with CUDA graphs keeps its state in the thread that made it, and fails in any other
(pytorch #123177). So one thread makes the model and runs it; on the CPU it shares batches with
other threads while it waits.

Legend: B clips, S samples, U frames of 40 ms, V tokens or labels, D model width.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from sbkit.audio.io import Samples
from sbkit.base.errors import SbkitError
from sbkit.bundle.protocols import Effective, Encoded
from sbkit.decoding.attention import Counts, Floats
from sbkit.runtime.shapes import Shapes

Batch = Sequence[Samples]
Result = TypeVar("Result")


def require_effective(found: Effective, *, device: str, precision: str) -> Effective:
    """Return what was found, where it is what was asked for.

    Raises:
        SbkitError: the model runs elsewhere, or in another precision.
    """
    found_precisions = found.precision.split(" and ") if precision != "fp32" else [found.precision]
    for name, asked, came, fits in (
        ("device", device, found.device, device == found.device),
        ("precision", precision, found.precision, precision in found_precisions),
    ):
        if not fits:
            raise SbkitError(
                f"`--{name}` must be what the model runs with, but {asked} was asked for and it "
                f"runs with {came}. List what can be used: sbkit doctor"
            )
    return found


class ModelThread:
    """A model that may be called from any thread: its own thread makes it and runs it.

    effective: what the model runs on.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        """Start the thread, and make a model in it: a `TorchModel`, an `OnnxModel`.

        Raises:
            SbkitError: the model cannot be made.
        """
        self._local = threading.local()  # the model ends with its thread
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        try:
            self.effective = self._executor.submit(self._keep, make).result()
        except BaseException:
            self.close()
            raise

    def call(self, use: Callable[[Any], Result]) -> Result:
        """Run a function of the model in its thread, after earlier calls, and return its result."""
        return self._executor.submit(lambda: use(self._local.model)).result()

    @cached_property
    def samples_per_frame(self) -> int:
        """How many samples go by from one frame of CTC to the next."""
        return self.call(lambda model: int(model.samples_per_frame))

    def encode(self, clips: Sequence[Samples]) -> list[Encoded]:
        """Run the encoder on clips in one batch: (S,) of int16 each."""
        return self.call(lambda model: model.encode(clips))

    def encode_batches(self, batches: Sequence[Batch]) -> list[list[Encoded]]:
        """Run the encoder on several batches, at once where many threads can run the model."""
        return self.call(lambda model: model.encode_batches(batches))

    def decoder_log_probs(self, states: Any, tokens: Counts) -> Floats:
        """Ask the attention decoder about tokens: (U, D), (N, L) -> (N, L + 1, V)."""
        return self.call(lambda model: model.decoder_log_probs(states, tokens))

    def warm_up(self, shapes: Shapes) -> None:
        """Run each shape of a table, to the lengths of which clips are padded from then on."""

        def run(model: Any) -> None:
            model.lengths = shapes.lengths
            for clips, samples in shapes.pairs():
                model.encode([np.zeros(samples, np.int16)] * clips)

        self.call(run)

    def close(self) -> None:
        """End the thread, and with it the model."""
        self._executor.shutdown(cancel_futures=True)

    def _keep(self, make: Callable[[], Any]) -> Effective:
        self._local.model = make()
        effective: Effective = self._local.model.effective
        return effective


def run_batches(
    encode: Callable[[Batch], list[Encoded]],
    batches: Sequence[Batch],
    *,
    threads: int = 1,
    prepare: Callable[[], object] | None = None,
) -> list[list[Encoded]]:
    """Run ``encode`` on each batch, and return its results in their order.

    Each thread has a core of its own: threads that share the work of every operation wait for each
    other hundreds of times in a batch. prepare: called first in each thread; a single batch is run
    in the calling thread.
    """
    threads = min(threads, len(batches))
    if threads < 2:
        return [encode(batch) for batch in batches]
    with ThreadPoolExecutor(threads, initializer=prepare) as pool:
        return list(pool.map(encode, batches))


@contextmanager
def naming_audio(audio: object) -> Iterator[None]:
    """Raise SbkitError, which names the audio, in place of any error of the model."""
    try:
        yield
    except SbkitError:
        raise
    except Exception as error:  # parts may be the user's
        raise SbkitError(
            f"A bundle's parts must fit each other, but with {audio} the model raised "
            f"{type(error).__name__} ({str(error)[:200]}). Export it again, or try a shorter file."
        ) from error
