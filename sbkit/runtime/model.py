"""The thread that runs a bundle's model, and batches of clips of similar length.

Compiled code with CUDA graphs keeps its state in the thread that made it, and fails in any other
(pytorch #123177). So one thread makes the model and runs it. On the CPU this thread hands batches
to other threads, which run in parallel, and waits for them.

Legend: B clips, S samples, U frames of 40 ms, V tokens or labels, D model width.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from typing import Any, Literal, Self, TypeVar

import numpy as np

from sbkit.audio.io import Samples
from sbkit.base.arrays import Counts, Float32s, Float64s, LogProbs
from sbkit.base.errors import BundleError, DeviceError, SbkitError
from sbkit.base.machine import usable_cores
from sbkit.base.units import seconds_to_samples
from sbkit.bundle.protocols import ChunkSizes, DeviceArray, Effective, Encoded, ModelState

LoadedModel = Any  # implements the protocols of sbkit/bundle/protocols.py that its callers need
StreamingUse = Literal["no", "also", "only"]  # whether a model runs chunk by chunk
Result = TypeVar("Result")

BATCH_CLIPS = (1, 2, 4, 8, 16, 32, 64)
CLIP_SECONDS = (0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30)


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The shapes that batches of clips may have: those of a closed table, or by default any.

    A new shape costs time and memory: torch generates kernels for it, and oneDNN and cuDNN choose
    theirs. A server warms up a closed table of shapes and uses no other.

    >>> shapes = Shapes(max_samples=600, clips=(1, 2, 4), lengths=(100, 200))
    >>> list(shapes.batches([90, 150, 80, 70, 160]))
    [[3, 2], [0], [1, 4]]
    """

    max_samples: int  # of padded audio in a batch of several clips
    clips: tuple[int, ...] = ()  # the numbers of clips that a batch may have, ascending from 1
    lengths: tuple[int, ...] = ()  # the samples that clips are padded to, ascending

    @classmethod
    def table(
        cls,
        sample_rate: int,
        *,
        batch_seconds: float,
        clips: Sequence[int] = BATCH_CLIPS,
        seconds: Sequence[float] = CLIP_SECONDS,
    ) -> Self:
        """Make a closed table for a sample rate."""
        max_samples = seconds_to_samples(batch_seconds, sample_rate)
        lengths = tuple(seconds_to_samples(length, sample_rate) for length in sorted(seconds))
        return cls(max_samples=max_samples, clips=tuple(sorted(clips)), lengths=lengths)

    def pairs(self) -> list[tuple[int, int]]:
        """List all shapes (B, S) of a closed table."""
        return [
            (clips, samples)
            for samples, clips in product(self.lengths, self.clips)
            if clips == 1 or clips * samples <= self.max_samples
        ]

    def batches(self, lengths: Sequence[int], *, min_batches: int = 1) -> Iterator[list[int]]:
        """Yield the indices of clips of these lengths in batches, the shortest clips first.

        The clips of a batch are padded to the same length of the table; without a table, their
        lengths differ by a factor of at most 2. No silent row is added: seven clips become batches
        of four, two and one. There are at least ``min_batches`` batches if there are as many clips.
        """
        padded = [round_up(length, self.lengths) for length in lengths]
        max_samples = min(self.max_samples, sum(padded) // min_batches)
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        while order:
            longest = padded[order[0]] * (1 if self.lengths else 2)
            count = 1
            for index in order[1:]:
                if padded[index] > longest or padded[index] * (count + 1) > max_samples:
                    break
                count += 1
            if self.clips:
                count = max(clips for clips in self.clips if clips <= count)
            yield order[:count]
            order = order[count:]


def round_up(size: int, sizes: Sequence[int]) -> int:
    """Return the first of ascending sizes that is at least ``size``; ``size`` if there is none."""
    return next((candidate for candidate in sizes if candidate >= size), size)


def pad_clips(
    clips: Sequence[Samples], samples: int, num_rows: int | None = None
) -> tuple[Float32s, Counts]:
    """Pad clips (S,) with zeros to a batch in the scale of int16: -> (B, samples), (B,).

    num_rows: B, if it is larger than the number of clips: silent rows of full length are added.
    """
    audio = np.zeros((num_rows or len(clips), samples), np.float32)
    lengths = np.full(len(audio), samples, np.int64)
    for row, clip in enumerate(clips):
        audio[row, : len(clip)] = clip
        lengths[row] = len(clip)
    return audio, lengths


def require_effective(effective: Effective, *, device: str, precision: str) -> Effective:
    """Return ``effective``; raises DeviceError if the model does not run as requested."""
    precisions = [effective.precision]
    if precision != "fp32":  # features may stay in fp32
        precisions = effective.precision.split(" and ")
    for option, requested, actual, accepted in (
        ("device", device, effective.device, [effective.device]),
        ("precision", precision, effective.precision, precisions),
    ):
        if requested not in accepted:
            raise DeviceError(
                f"`--{option} {requested}` was requested, but the model runs with {actual}. To see "
                "what can be used: sbkit doctor"
            )
    return effective


class ModelThread:
    """A model in a thread of its own, which any thread may call."""

    def __init__(self, make: Callable[[], LoadedModel]) -> None:
        """Start the thread, and make the model in it; raises as ``make`` does."""
        self._local = threading.local()  # so that the model ends with its thread
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        try:
            self.effective = self._executor.submit(self._keep, make).result()
        except BaseException:
            self.close()
            raise

    def _keep(self, make: Callable[[], LoadedModel]) -> Effective:
        self._local.model = model = make()
        effective: Effective = model.effective
        return effective

    def call(self, use: Callable[[LoadedModel], Result]) -> Result:
        """Call a function with the model, in the model's thread, and return its result."""
        return self._executor.submit(lambda: use(self._local.model)).result()

    @cached_property
    def samples_per_frame(self) -> int:
        return self.call(lambda model: int(model.samples_per_frame))

    @property
    def parallel_batches(self) -> int:
        """The number of batches that can run in parallel."""
        return usable_cores() if self.effective.device == "cpu" else 1

    def encode(self, clips: Sequence[Samples]) -> list[Encoded]:
        """Run the encoder on clips (S,) in one batch."""
        return self.call(lambda model: model.encode(clips))

    def encode_by_length(
        self,
        clips: Sequence[Samples],
        shapes: Shapes,
        *,
        on_batch: Callable[[int, int], object] = lambda clips, samples: None,
    ) -> list[Encoded]:
        """Run the encoder on clips in batches of similar length; return outputs in their order.

        The batches run in parallel if the device allows it.

        on_batch: called with the number of clips of each batch, and the samples of a padded clip.
        """
        lengths = [len(clip) for clip in clips]
        batches = list(shapes.batches(lengths, min_batches=self.parallel_batches))
        clips_of_batches = [[clips[index] for index in batch] for batch in batches]
        outputs = self.call(lambda model: model.encode_batches(clips_of_batches))
        for batch in batches:
            on_batch(len(batch), round_up(lengths[batch[-1]], shapes.lengths))
        encoded = dict(zip(chain(*batches), chain(*outputs), strict=True))
        return [encoded[index] for index in range(len(clips))]

    def decoder_log_probs(self, states: DeviceArray, tokens: Counts) -> Float64s:
        return self.call(lambda model: model.decoder_log_probs(states, tokens))

    @property
    def chunks(self) -> ChunkSizes | None:
        """The sizes of the model's chunks; None if it only takes whole clips."""
        sizes: ChunkSizes | None = self.call(lambda m: m.streaming and m.streaming.chunks)
        return sizes

    def start(self) -> ModelState:
        return self.call(lambda model: model.streaming.start())

    def advance(
        self, chunks: Sequence[Samples], states: Sequence[ModelState]
    ) -> list[tuple[LogProbs, ModelState]]:
        return self.call(lambda model: model.streaming.advance(chunks, states))

    def warm_up(self, shapes: Shapes) -> None:
        """Run every shape of a closed table; later clips are padded to its lengths."""

        def run(model: LoadedModel) -> None:
            model.padded_lengths = shapes.lengths
            for clips, samples in shapes.pairs():
                model.encode([np.zeros(samples, np.int16)] * clips)

        self.call(run)

    def close(self) -> None:
        """End the thread, and with it the model."""
        self._executor.shutdown(cancel_futures=True)


def run_batches(
    encode: Callable[[Sequence[Samples]], list[Encoded]],
    batches: Sequence[Sequence[Samples]],
    *,
    threads: int = 1,
    prepare: Callable[[], object] | None = None,
) -> list[list[Encoded]]:
    """Call ``encode`` on each batch, and return the results in their order.

    Each batch has a thread of its own. If threads shared each operation of one batch, they would
    wait for each other hundreds of times. A single batch runs in the calling thread.

    prepare: called first in each new thread.
    """
    threads = min(threads, len(batches))
    if threads < 2:
        return [encode(batch) for batch in batches]
    with ThreadPoolExecutor(threads, initializer=prepare) as pool:
        return list(pool.map(encode, batches))


@contextmanager
def naming_audio(audio: object) -> Iterator[None]:
    """Turn any error of a model but an SbkitError into a BundleError that names the audio."""
    try:
        yield
    except SbkitError:
        raise
    except Exception as error:  # the user's parts of a bundle may raise anything
        raise BundleError(
            f"The model raised {type(error).__name__} with {audio}: {str(error)[:200]}. The parts "
            "of its bundle may not fit each other: export it again, or try a shorter file."
        ) from error
