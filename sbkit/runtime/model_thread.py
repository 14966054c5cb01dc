"""The thread that runs a bundle's model.

Compiled code with CUDA graphs keeps its state in the thread that compiled it, and fails in any
other (pytorch #123177). So one thread loads the model and runs it. On the CPU, this thread hands
batches to other threads, which run in parallel, and waits for them.

Legend: S samples.
"""

import operator
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Literal, Self, TypeVar

import numpy as np

from sbkit.audio.io import Samples
from sbkit.base.arrays import Float64s, Int64s, LogProbs
from sbkit.base.errors import BundleError, DeviceError, SbkitError, translate
from sbkit.base.libraries import place_of
from sbkit.base.machine import usable_cores
from sbkit.base.workers import ThreadPool, start_anew_in_forks
from sbkit.bundle.protocols import ChunkSizes, DeviceArray, EffectiveRuntime, Encoded, ModelState
from sbkit.bundle.side_inputs import SideInputs
from sbkit.runtime.batch_shapes import BatchShapes

LoadedModel = Any  # implements the protocols of sbkit/bundle/protocols.py that its callers need
StreamingUse = Literal["no", "also", "only"]  # whether a model runs chunk by chunk
ClipsAndSides = tuple[Sequence[Samples], Sequence[SideInputs]]  # of a batch
Result = TypeVar("Result")
CLOSED_MESSAGE = "This model is closed. Load it again."


def require_as_requested(
    runs_on: EffectiveRuntime, *, device: str, precision: str
) -> EffectiveRuntime:
    """Return ``runs_on``; raises DeviceError if the model does not run as requested."""
    if device != runs_on.device:
        raise DeviceError(
            f"The device {device} was requested, but the model runs on {runs_on.device}. "
            "`sbkit doctor` lists usable devices."
        )
    # Some parts, such as features, may stay in fp32.
    if runs_on.precision not in (precision, f"{precision} and fp32"):
        raise DeviceError(
            f"{precision} was requested, but the model runs with {runs_on.precision}."
        )
    return runs_on


class ReopenedWhenUnpickled:
    """An object that pickles as the call that made it, because its model cannot be pickled.

    As a context manager, it is closed at the end of the block.
    """

    constructor_call: "partial[Self]"

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        instance = super().__new__(cls)
        instance.constructor_call = partial(cls, *arguments, **options)
        return instance

    def __reduce__(self) -> tuple[Callable[..., Self], tuple["partial[Self]"]]:
        return operator.call, (self.constructor_call,)  # a deep copy copies the bundle in the call

    def __repr__(self) -> str:
        call = self.constructor_call
        options = [f"{name}={value!r}" for name, value in call.keywords.items()]
        return f"{type(self).__name__}({', '.join([*map(repr, call.args), *options])})"

    def close(self) -> None:
        """End the thread of the model, if it has one."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ModelThread:
    """Run a model in its own thread; any thread may call the methods.

    A forked process, which has no thread of its parent, makes the model again when it calls it.
    """

    def __init__(self, make: Callable[[], LoadedModel]) -> None:
        """Start the thread, and make the model in it; errors of ``make`` are raised here."""
        self._make = make
        self._local = threading.local()  # holds the model, and frees it when the thread ends
        self._executor = _make_thread()
        self._is_closed = self._is_forked = False
        try:
            self.runs_on: EffectiveRuntime = self.call(lambda model: model.runs_on)
        except BaseException:
            self.close()
            raise
        start_anew_in_forks(self)

    def start_anew(self) -> None:
        self._is_forked = True
        if not self._is_closed:
            self._executor = _make_thread()

    def _model(self) -> LoadedModel:
        if not hasattr(self._local, "model"):
            if self._is_forked and self.runs_on.device != "cpu":
                raise DeviceError(
                    f"A forked process cannot use a model on {self.runs_on.device} that its parent "
                    "has loaded. Load it in that process."
                )
            self._local.model = self._make()
        return self._local.model

    def call(self, use: Callable[[LoadedModel], Result]) -> Result:
        """Call a function with the model, in the model's thread, and return its result."""
        with translate(RuntimeError, SbkitError, self._explain):
            future = self._executor.submit(lambda: use(self._model()))
        # Another thread may close the model meanwhile.
        with translate(CancelledError, SbkitError, CLOSED_MESSAGE):
            return future.result()

    def _explain(self, error: RuntimeError) -> str | None:
        return CLOSED_MESSAGE if self._is_closed else None  # otherwise, no thread can be started

    def __repr__(self) -> str:
        return f"ModelThread({self.runs_on})"

    @cached_property
    def samples_per_frame(self) -> int:
        return self.call(lambda model: int(model.samples_per_frame))

    @property
    def parallel_batches(self) -> int:
        """The number of batches that can run in parallel."""
        return usable_cores() if self.runs_on.device == "cpu" else 1

    def encode(self, clips: Sequence[Samples], sides: Sequence[SideInputs] = ()) -> list[Encoded]:
        return self.call(lambda model: model.encode(clips, sides))

    def predict(self, clips: Sequence[Samples], sides: Sequence[SideInputs] = ()) -> Any:
        return self.call(lambda model: model.predict(clips, sides))

    def encode_by_length(
        self,
        clips: Sequence[Samples],
        sides: Sequence[SideInputs] = (),
        *,
        shapes: BatchShapes,
    ) -> list[Encoded]:
        """Run the encoder on clips in batches of similar length; keep the order of the clips.

        The batches run in parallel if the device allows it.
        """
        lengths = [len(clip) for clip in clips]
        batches = list(shapes.batches(lengths, min_batches=self.parallel_batches))
        inputs = [
            ([clips[index] for index in batch], [sides[index] for index in batch] if sides else ())
            for batch in batches
        ]
        outputs = self.call(lambda model: model.encode_batches(inputs))
        output_of_clip: dict[int, Encoded] = {}
        for batch, batch_outputs in zip(batches, outputs, strict=True):
            output_of_clip.update(zip(batch, batch_outputs, strict=True))
        return [output_of_clip[index] for index in range(len(clips))]

    def score_texts(self, states: DeviceArray, texts: Int64s) -> Float64s:
        return self.call(lambda model: model.score_texts(states, texts))

    def generate(self, states: DeviceArray) -> list[int]:
        return self.call(lambda model: model.generate(states))

    @property
    def chunks(self) -> ChunkSizes | None:
        def read_sizes(model: LoadedModel) -> ChunkSizes | None:
            return None if model.streaming is None else model.streaming.chunks

        return self.call(read_sizes)

    def start(self) -> ModelState:
        return self.call(lambda model: model.streaming.start())

    def advance(
        self, chunks: Sequence[Samples], states: Sequence[ModelState]
    ) -> list[tuple[LogProbs, ModelState]]:
        return self.call(lambda model: model.streaming.advance(chunks, states))

    def warm_up(self, shapes: BatchShapes, side: SideInputs = MappingProxyType({})) -> None:
        """Run every shape of a closed grid; from then on, clips are padded to its lengths.

        side: an example of the side inputs, if the model has some.
        """

        def run(model: LoadedModel) -> None:
            model.padded_lengths = shapes.padded_lengths
            for clips, samples in shapes.all_shapes():
                model.encode([np.zeros(samples, np.int16)] * clips, [side] * clips if side else ())

        self.call(run)

    def close(self) -> None:
        """End the thread, and with it the model."""
        self._is_closed = True
        self._executor.shutdown(cancel_futures=True)


def _make_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")


def run_batches(
    encode: Callable[[Sequence[Samples], Sequence[SideInputs]], list[Encoded]],
    batches: Sequence[ClipsAndSides],
    *,
    threads: int = 1,
    prepare: Callable[[], object] | None = None,
) -> list[list[Encoded]]:
    """Call ``encode`` on each batch, and return the results in order.

    Each batch runs in its own thread. If threads shared each operation of one batch, they would
    wait for each other hundreds of times. A single batch runs in the calling thread.

    prepare: called first in each new thread.
    """
    threads = min(threads, len(batches))
    if threads < 2:
        return [encode(*batch) for batch in batches]
    with ThreadPool(threads, initializer=prepare) as pool:
        return list(pool.map(encode, *zip(*batches, strict=True)))


def model_errors(audio: object) -> AbstractContextManager[None]:
    """Raise a BundleError that names the audio for any error of a model, except an SbkitError."""
    return translate(
        Exception,  # the user's parts of a bundle may raise anything
        BundleError,
        lambda error: (
            f"The model raised {type(error).__name__} for {audio}: {str(error)[:200]}"
            f"{place_of(error)}."
        ),
    )
