"""The one thread that makes a model, keeps it, and runs every call of it.

On the CPU others help it with batches, and it waits for them. Compiled code with CUDA graphs keeps
its state in the thread that made it, and fails in any other (pytorch #123177). Here no thread has
the model but by this one: it is an attribute of `threading.local`.

Legend: B clips, U frames, V tokens or labels.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from sbkit.audio.io import Samples
from sbkit.base.errors import SbkitError
from sbkit.decoding.attention import Counts, Floats
from sbkit.decoding.frames import LogProbs
from sbkit.inference.batch_threads import Batch
from sbkit.inference.effective import Effective
from sbkit.inference.heard import Heard

Result = TypeVar("Result")


class Model(Protocol):
    """What a runtime makes of a bundle."""

    @property
    def effective(self) -> Effective:
        """What it runs on."""

    @property
    def samples_per_frame(self) -> int:
        """How many samples go by from one frame of CTC to the next."""

    @property
    def fallbacks(self) -> int:
        """How many batches a compiled model ran uncompiled."""

    def hear(self, clips: Sequence[Samples]) -> list[Heard]:
        """Run the encoder on clips in one batch: (S,) of int16 each."""

    def hear_each(self, batches: Sequence[Batch]) -> list[list[Heard] | Exception]:
        """Run the encoder on several batches, and return what it gives or raises."""

    def decoder_log_probs(self, states: Any, tokens: Counts) -> Floats:
        """Ask the attention decoder about tokens: (U, D), (N, L) -> (N, L + 1, V)."""

    def probabilities(self, clips: Sequence[Samples]) -> npt.NDArray[np.float32]:
        """Compute the probability of each label: (S,) of int16 each -> (B, V)."""


class ModelThread:
    """A `Model` that may be called from any thread: its own thread makes it and runs it.

    effective: what the model runs on.
    """

    def __init__(self, make: Callable[[], Model]) -> None:
        """Start the thread, and make the model in it.

        Raises:
            SbkitError: the model cannot be made.
        """
        self._own = threading.local()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        try:
            self.effective = self._thread.submit(self._keep, make).result()
        except BaseException:
            self.close()
            raise

    @property
    def model(self) -> Model:
        """The model, in its own thread alone.

        Raises:
            SbkitError: another thread asks for it.
        """
        if not hasattr(self._own, "model"):
            raise SbkitError(
                "A model must be called in the thread that made it, but another one reached for "
                "it. Call the methods of its ModelThread, which any thread may."
            )
        model: Model = self._own.model
        return model

    def call(self, use: Callable[[Model], Result]) -> Result:
        """Run a function of the model in its thread, after those that wait, and return its result.

        Raises:
            SbkitError: the thread was closed.
        """
        try:
            waiting = self._thread.submit(lambda: use(self.model))
        except RuntimeError as error:
            raise SbkitError(
                "A model must be open to be called, but this one was closed. Load it again."
            ) from error
        return waiting.result()

    @cached_property
    def samples_per_frame(self) -> int:
        """How many samples go by from one frame of CTC to the next."""
        return self.call(lambda model: model.samples_per_frame)

    def hear(self, clips: Sequence[Samples]) -> list[Heard]:
        """Run the encoder on clips in one batch: (S,) of int16 each."""
        return self.call(lambda model: model.hear(clips))

    def hear_each(self, batches: Sequence[Batch]) -> list[list[Heard] | Exception]:
        """Run the encoder on several batches, at once where the model can be run by many threads.

        Return what it gives or raises.
        """
        return self.call(lambda model: model.hear_each(batches))

    def log_probs(self, clips: Sequence[Samples]) -> list[LogProbs]:
        """Score the tokens at each frame, in one batch: (S,) of int16 each -> (U, V) each."""
        return [each.log_probs for each in self.hear(clips)]

    def decoder_log_probs(self, states: Any, tokens: Counts) -> Floats:
        """Ask the attention decoder about tokens: (U, D), (N, L) -> (N, L + 1, V)."""
        return self.call(lambda model: model.decoder_log_probs(states, tokens))

    def probabilities(self, clips: Sequence[Samples]) -> npt.NDArray[np.float32]:
        """Compute the probability of each label: (S,) of int16 each -> (B, V)."""
        return self.call(lambda model: model.probabilities(clips))

    def close(self) -> None:
        """End the thread, and with it the model."""
        self._thread.shutdown(cancel_futures=True)

    def _keep(self, make: Callable[[], Model]) -> Effective:
        self._own.model = make()
        return self.model.effective
