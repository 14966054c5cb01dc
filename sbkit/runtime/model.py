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
from itertools import product
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
    """The shapes that batches of clips may have: any shape, or only those of a closed table.

    The first batch of a shape costs time and memory: torch generates kernels for it, and oneDNN and
    cuDNN choose theirs. So a server warms up a closed table of shapes, and uses no others.

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
        """Group clips by their lengths; yield the indices of each batch, the shortest clips first.

        The clips of a batch are padded to the same length of the table; without a table, their
        lengths differ by a factor of at most 2. No silent row is added: seven clips become batches
        of four, two and one.

        min_batches: a batch of several clips has at most this fraction of the audio, so that as
            many batches can run in parallel. One long clip may still leave fewer batches.
        """
        padded = [round_up(length, self.lengths) for length in lengths]
        max_samples = min(self.max_samples, sum(padded) // min_batches)
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        while order:
            max_padded = padded[order[0]]
            if not self.lengths:
                max_padded *= 2
            count = 1
            for index in order[1:]:
                if padded[index] > max_padded or padded[index] * (count + 1) > max_samples:
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

    num_rows: B, by default the number of clips. Rows after the clips are silent, of full length.
    """
    audio = np.zeros((num_rows or len(clips), samples), np.float32)
    lengths = np.full(len(audio), samples, np.int64)
    for row, clip in enumerate(clips):
        audio[row, : len(clip)] = clip
        lengths[row] = len(clip)
    return audio, lengths


def require_effective(effective: Effective, *, device: str, precision: str) -> Effective:
    """Return ``effective``; raises DeviceError if the model does not run as requested."""
    if device != effective.device:
        raise DeviceError(
            f"`--device {device}` was requested, but the model runs on {effective.device}. `sbkit "
            "doctor` lists the devices that can be used."
        )
    accepted = [precision]
    if precision != "fp32":
        accepted.append(f"{precision} and fp32")  # some parts, such as features, may stay in fp32
    if effective.precision not in accepted:
        raise DeviceError(
            f"`--precision {precision}` was requested, but the model runs with "
            f"{effective.precision}. `sbkit doctor` lists the precisions that can be used."
        )
    return effective


class ModelThread:
    """Run a model in a thread of its own; any thread may call the methods."""

    def __init__(self, make: Callable[[], LoadedModel]) -> None:
        """Start the thread, and make the model in it; raises what ``make`` raises."""
        self._local = threading.local()  # holds the model, and frees it when the thread ends
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        try:
            self.effective = self._executor.submit(self._load_model, make).result()
        except BaseException:
            self.close()
            raise

    def _load_model(self, make: Callable[[], LoadedModel]) -> Effective:
        self._local.model = make()
        effective: Effective = self._local.model.effective
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

        on_batch: called for each batch with its number of clips and the samples of a padded clip.
        """
        lengths = [len(clip) for clip in clips]
        batches = list(shapes.batches(lengths, min_batches=self.parallel_batches))
        clips_of_batches = [[clips[index] for index in batch] for batch in batches]
        outputs = self.call(lambda model: model.encode_batches(clips_of_batches))
        for batch in batches:
            on_batch(len(batch), round_up(lengths[batch[-1]], shapes.lengths))
        output_of_clip: dict[int, Encoded] = {}
        for batch, batch_outputs in zip(batches, outputs, strict=True):
            output_of_clip.update(zip(batch, batch_outputs, strict=True))
        return [output_of_clip[index] for index in range(len(clips))]

    def decoder_log_probs(self, states: DeviceArray, tokens: Counts) -> Float64s:
        return self.call(lambda model: model.decoder_log_probs(states, tokens))

    @property
    def chunks(self) -> ChunkSizes | None:
        """The sizes of the model's chunks; None if it only takes whole clips."""

        def read_sizes(model: LoadedModel) -> ChunkSizes | None:
            return None if model.streaming is None else model.streaming.chunks

        return self.call(read_sizes)

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
    """Raise a BundleError that names the audio for any error of a model, except an SbkitError."""
    try:
        yield
    except SbkitError:
        raise
    except Exception as error:  # the user's parts of a bundle may raise anything
        raise BundleError(
            f"The model raised {type(error).__name__} for {audio}: {str(error)[:200]}. The parts "
            "of its bundle may not fit each other: export it again, or try a shorter file."
        ) from error
