"""Transcription: audio of any length to text, by a model in a thread of its own.

    sources -> segments -> batches of similar length, across sources -> log-probabilities
        -> joined at overlaps -> decoded -> a transcript for each source, in their order

Audio is cut in pauses: where it is quiet, or between the speech that a voice detector finds. It
arrives in blocks, and at most a segment and a block are held in memory. A cut depends only on the
30 s before it, so the size of the blocks changes nothing.

If there is no pause, two segments overlap. Their log-probabilities are joined at one frame, in the
longest gap between two tokens of the first segment, so that no word is lost or repeated. CTC has a
frame for each moment, so this works with every decoder.

Any number of threads may call one Transcriber.

Legend: S samples, W windows of 20 ms, U frames, V vocabulary.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from io import IOBase
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np

from sbkit.audio.io import Samples, convert_array, stream_audio
from sbkit.audio.levels import SHORT_PAUSE_SECONDS, WINDOWS_PER_SECOND, find_pauses
from sbkit.base.allocator import return_freed_memory
from sbkit.base.arrays import Array, LogProbs
from sbkit.base.errors import ConfigError, DataError, SbkitError
from sbkit.base.messages import listed, printable
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.bundle.protocols import Effective, Encoded
from sbkit.decoding.decoder import DecoderInput, Recognized
from sbkit.runtime.batch_shapes import BatchShapes
from sbkit.runtime.model_thread import model_errors_as_bundle_errors
from sbkit.runtime.runtimes import OpenBundle, open_model
from sbkit.runtime.voice_detector import SpeechEvent, VoiceDetector
from sbkit.text.normalization import join_segments
from sbkit.text.word import Word

GPU_BATCH_SECONDS = 60.0  # of padded audio
CPU_BATCH_SECONDS = 10.0  # fits the caches of a core; with 32 s ONNX takes 1.15 times as long
POOL_SECONDS = 480.0  # of audio that is read ahead and sorted by length; 15 MB
MAX_SEGMENT_SECONDS = 30.0  # attention grows with the square of the length
MIN_SEGMENT_SECONDS = 1.0  # before a long pause ends a segment
LONG_PAUSE_SECONDS = 0.5
MARGIN_SECONDS = 0.5  # of a pause, kept before the next speech
OVERLAP_SECONDS = 4.0  # of two segments without a pause between them

Audio = Path | str | IOBase | Array


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """The text of a source."""

    file: str | None  # the name of the source; None for an array or an open file
    text: str
    seconds: float  # of audio
    effective: Effective  # where and how the model ran
    words: tuple[Word, ...] = ()  # if their times were requested

    def __str__(self) -> str:
        return self.text

    def plain(self) -> dict[str, object]:
        """Return plain data, for JSON."""
        return {
            "file": self.file,
            "text": self.text,
            "seconds": round(self.seconds, 3),
            "words": [word.plain() for word in self.words],
            "effective": asdict(self.effective),
        }


class BatchError(DataError):
    """Some sources of a batch cannot be read; ``results`` has each source's transcript or error."""

    def __init__(self, results: Sequence[Transcript | SbkitError]) -> None:
        errors = [result for result in results if isinstance(result, SbkitError)]
        super().__init__(
            f"{len(errors)} of {len(results)} files or arrays cannot be read; `results` has the "
            f"transcripts of the others. The first error: {errors[0]}"
        )
        self.results = tuple(results)


@dataclass(frozen=True)
class Segment:
    """Audio that a model takes at once, and its position in the source."""

    samples: Samples  # a copy, so that the blocks can be freed
    start: int  # the index of its first sample in the source
    overlap: int = 0  # samples that it shares with the next segment; 0 if it ends in a pause

    @property
    def next_start(self) -> int:
        """The index of the first sample of the next segment."""
        return self.start + len(self.samples) - self.overlap


@dataclass(frozen=True)
class Segmenter:
    """Cut a stream of samples into segments.

    >>> tone = (9000 * np.sin(np.arange(16_000))).astype(np.int16)
    >>> blocks = [tone, np.zeros(16_000, np.int16), tone]
    >>> [len(segment.samples) for segment in Segmenter(16_000).split(blocks)]
    [24000, 24000]
    """

    sample_rate: int
    multiple: int = 1  # samples; the starts of overlapping segments are multiples of it apart
    min_seconds: float = MIN_SEGMENT_SECONDS  # before a long pause ends a segment
    detector: VoiceDetector | None = None  # finds the pauses; by default they are quiet audio

    def split(self, blocks: Iterable[Samples]) -> Iterator[Segment]:
        """Yield the segments of blocks (S,); the last one may be empty.

        A segment ends in the first long pause after ``min_seconds``. If there is none before
        MAX_SEGMENT_SECONDS, it ends in its longest pause. If it has no pause at all, it ends at
        MAX_SEGMENT_SECONDS, and the next segment repeats its last OVERLAP_SECONDS.
        """
        pending = np.empty(0, np.int16)
        segment, pauses = Segment(pending, 0), Pauses(self.detector, self.sample_rate)
        for block in blocks:
            pauses.add(block)
            pending = np.concatenate([pending, block])
            while len(pending) > self._max_samples:
                segment = self._first(pending, pauses, after=segment)
                yield segment
                pending = pending[len(segment.samples) - segment.overlap :]
        while True:
            segment = self._first(pending, pauses, after=segment)
            yield segment
            pending = pending[len(segment.samples) :]
            if not len(pending):
                return

    @property
    def _max_samples(self) -> int:
        return seconds_to_samples(MAX_SEGMENT_SECONDS, self.sample_rate)

    def _first(self, pending: Samples, pauses: "Pauses", *, after: Segment) -> Segment:
        """Return the segment of the pending samples (S,) that follows ``after``."""
        start = after.next_start
        ahead, is_longer = pending[: self._max_samples], len(pending) > self._max_samples
        window = self.sample_rate // WINDOWS_PER_SECOND
        count = len(ahead) // window
        min_windows = max(self.min_seconds * WINDOWS_PER_SECOND, after.overlap / window)
        margin = round(MARGIN_SECONDS * WINDOWS_PER_SECOND)
        cuts: list[tuple[int, int]] = []  # the length of a pause, and where to cut it, in windows
        for first, end in pauses.within(ahead, start):
            length = end - first
            cut = end - min(length // 2, margin)
            is_leading = first == 0 and length < count
            may_continue = end == count and not is_longer
            if cut >= min_windows and not is_leading and not may_continue:
                cuts.append((length, cut))
        for length, cut in cuts:
            if length >= LONG_PAUSE_SECONDS * WINDOWS_PER_SECOND:
                return Segment(pending[: cut * window].copy(), start)
        if not is_longer:
            return Segment(pending, start)
        length, cut = max(cuts, default=(0, 0))
        if length >= SHORT_PAUSE_SECONDS * WINDOWS_PER_SECOND:
            return Segment(pending[: cut * window].copy(), start)
        step = self._max_samples - seconds_to_samples(OVERLAP_SECONDS, self.sample_rate)
        return Segment(ahead, start, self._max_samples - step // self.multiple * self.multiple)


class Pauses:
    """The pauses of one source, whose samples arrive block by block."""

    def __init__(self, detector: VoiceDetector | None, sample_rate: int) -> None:
        self._detector, self._rate = detector, sample_rate
        self._state = None if detector is None else detector.start()
        self._events: list[SpeechEvent] = []

    def add(self, block: Samples) -> None:
        if self._detector is not None and self._state is not None:
            events, self._state = self._detector.push(block, self._state)
            self._events += events

    def within(self, samples: Samples, start: int) -> list[list[int]]:
        """Return the first and end window of each pause in samples (S,), as `find_pauses` does.

        start: the index of the first sample in the source.
        """
        window, rate = self._rate // WINDOWS_PER_SECOND, self._rate
        if self._detector is None:
            return find_pauses(samples, window)
        end = samples_to_seconds(start + len(samples), rate)
        times = [0.0, *(event.seconds for event in self._events if event.detected <= end), end]
        edges = np.rint((np.array(times[: len(times) // 2 * 2]) * rate - start) / window)
        pauses = edges.clip(0, len(samples) // window).astype(int).reshape(-1, 2).tolist()
        return [[first, end] for first, end in pauses if end > first]


def find_gap(log_probs: LogProbs, overlap: int, silent: Collection[int]) -> int:
    """Return the frame to cut (U, V) at: the middle of the longest gap between two tokens.

    Only the middle half of the last ``overlap`` frames is searched. If all its frames have tokens,
    the first of them is returned.

    silent: the tokens without speech, blank and space.
    """
    first, last = len(log_probs) - 3 * overlap // 4, len(log_probs) - overlap // 4
    spoken = np.flatnonzero(~np.isin(log_probs[first:last].argmax(1), list(silent)))
    edges = np.concatenate([[-1], spoken, [last - first]])
    longest = int(np.argmax(np.diff(edges)))
    return first + int(edges[longest] + edges[longest + 1] + 1) // 2


@dataclass(frozen=True)
class _SourceSegment:
    """A segment of a source, or the error that ends the source."""

    name: str | None  # of the file; None for an array or an open file
    segment: Segment | SbkitError
    is_last: bool


class Transcriber(AbstractContextManager["Transcriber"]):
    """Transcribe files and arrays; made by `Transcriber.load`.

    >>> with Transcriber.load("my-model", device="cpu") as transcriber:  # doctest: +SKIP
    ...     print(transcriber.transcribe("talk.mp3").text)
    hello there
    """

    def __init__(
        self,
        *,
        bundle: OpenBundle,
        times: bool = True,
        pool_seconds: float = POOL_SECONDS,
        detector: VoiceDetector | None = None,
        encode: Callable[[Sequence[Samples]], list[Encoded]] | None = None,
    ) -> None:
        """Take a bundle whose model has a thread of its own.

        times: whether words are timed.
        pool_seconds: how much audio is read ahead.
        detector: finds the pauses where long audio is cut.
        encode: runs the model on segments, by default in batches of similar length.
        """
        self._bundle, self._pool, self._times = bundle, bundle.decoder_pool, times
        self._thread, self._rate = bundle.model, bundle.config.sample_rate
        self._pool_seconds, self.effective = pool_seconds, bundle.model.effective
        self._segmenter = Segmenter(self._rate, self._thread.samples_per_frame, detector=detector)
        if detector is not None:
            detector.require_rate(self._rate)
        max_samples = seconds_to_samples(default_batch_seconds(self.effective), self._rate)
        self._encode = encode or partial(
            self._thread.encode_by_length, shapes=BatchShapes(max_samples=max_samples)
        )

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        device: str = "auto",
        runtime: str = "torch",
        precision: str = "fp32",
        compile: str | None = None,
        decoder: str | None = None,
        hotwords: str | None = None,
        times: bool = True,
        detector: VoiceDetector | None = None,
        user_modules: frozenset[str] = frozenset(),
    ) -> Self:
        """Load a bundle; a model that cannot run as requested is an error.

        device: cpu, cuda, cuda:N or auto.
        runtime: torch or onnx.
        precision: fp32, bf16 or fp16 with torch, fp32 or int8 with onnx.
        compile: default or reduce-overhead; None to compile nothing.
        decoder: greedy, beam or graph; None for the bundle's own.
        hotwords: phrases separated by commas, or a file of them.
        times: whether words are timed.
        detector: finds the pauses where long audio is cut.
        user_modules: the user's modules that the bundle may import.

        Raises:
            SbkitError: the bundle is damaged, or the device, runtime or precision is unavailable.
        """
        bundle = open_recognizer(
            Path(folder),
            decoder=decoder,
            hotwords=hotwords,
            device=device,
            runtime=runtime,
            precision=precision,
            compile=compile,
            user_modules=user_modules,
        )
        return cls(bundle=bundle, times=times, detector=detector)

    def transcribe(self, audio: Audio, sample_rate: int | None = None) -> Transcript:
        """Transcribe a file, or an array at ``sample_rate``, which `to_samples` converts.

        Raises:
            DataError: the file is not audio, or the array has no finite samples.
        """
        (transcript,) = self.stream([audio], sample_rate)
        if isinstance(transcript, SbkitError):
            raise transcript
        return transcript

    def transcribe_batch(
        self, audios: Sequence[Audio], sample_rate: int | None = None
    ) -> list[Transcript]:
        """Transcribe sources as `transcribe` does, in batches of similar length.

        Raises:
            BatchError: some cannot be read.
        """
        results = list(self.stream(audios, sample_rate))
        transcripts = [result for result in results if isinstance(result, Transcript)]
        if len(transcripts) < len(results):
            raise BatchError(results)
        return transcripts

    def stream(
        self,
        audios: Iterable[Audio],
        sample_rate: int | None = None,
        *,
        on_seconds: Callable[[float], object] = float,
        on_text: Callable[[str], object] | None = None,
        phrases: Sequence[str] = (),
        times: bool | None = None,
    ) -> Iterator[Transcript | SbkitError]:
        """Yield the transcript of each source, or its error, in their order.

        on_seconds: called with the seconds of audio that were decoded since its last call.
        on_text: called with the text that each segment adds to its source, as soon as it is final.
        phrases: hotwords, for a decoder that takes them.
        times: whether words are timed; None for the setting of the Transcriber.
        """
        recognized: list[Recognized] = []
        cut = 0  # frames of the next segment that belong to the previous one
        hotwords = self._bundle.split_phrases(phrases)[0] if phrases else ()
        times = self._times if times is None else times
        segments = self._read(audios, sample_rate)
        for pool in _pools(segments, self._rate, self._pool_seconds):
            inputs, cut = self._decoder_inputs(pool, cut, hotwords)
            decoded = iter(self._pool.decode(inputs, times=times))
            for item in pool:
                if isinstance(item.segment, SbkitError):
                    yield item.segment
                    recognized = []
                    continue
                recognized.append(next(decoded))
                if on_text is not None:
                    texts = [part.text for part in recognized]
                    before = join_segments(texts[:-1])
                    on_text(printable(join_segments(texts).removeprefix(before)))
                on_seconds(self._seconds(item.segment.next_start - item.segment.start))
                if item.is_last:
                    yield self._join(recognized, item.name, item.segment)
                    recognized = []

    def close(self) -> None:
        self._pool.close()
        self._thread.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, audios: Iterable[Audio], sample_rate: int | None) -> Iterator[_SourceSegment]:
        """Read and cut one source after the other; an error ends its source."""
        for audio in audios:
            name = str(audio) if isinstance(audio, Path | str) else None
            if isinstance(audio, Path | str | IOBase):
                blocks = stream_audio(audio, self._rate)
            else:
                blocks = convert_array(audio, sample_rate, self._rate)
            try:
                for segment, following in pairwise(chain(self._segmenter.split(blocks), [None])):
                    assert segment is not None
                    yield _SourceSegment(name, segment, is_last=following is None)
            except SbkitError as error:
                yield _SourceSegment(name, error, is_last=True)

    def _decoder_inputs(
        self, pool: Sequence[_SourceSegment], cut: int, hotwords: tuple[str, ...]
    ) -> tuple[list[DecoderInput], int]:
        """Run the model on a pool; return the decoder's inputs, and ``cut`` for the next pool.

        cut: frames of the first segment that belong to the previous one.
        """
        segments = [item.segment for item in pool if isinstance(item.segment, Segment)]
        with model_errors_as_bundle_errors(
            listed(dict.fromkeys(item.name or "an array" for item in pool))
        ):
            encoded = iter(self._encode([segment.samples for segment in segments]))
        inputs: list[DecoderInput] = []
        for item in pool:
            if isinstance(item.segment, SbkitError):
                cut = 0
            else:
                trimmed, cut = self._trim(item.segment, next(encoded), cut)
                inputs.append(replace(trimmed, phrases=hotwords))
        return inputs, cut

    def _trim(self, segment: Segment, encoded: Encoded, first: int) -> tuple[DecoderInput, int]:
        """Omit the first frames of a segment, and those at its end that the next one provides.

        Return also how many frames the next segment must omit.
        """
        step, end, cut = self._thread.samples_per_frame, len(encoded.log_probs), 0
        if segment.overlap:
            next_first = (segment.next_start - segment.start) // step
            end = find_gap(encoded.log_probs, end - next_first, self._bundle.tokenizer.silent)
            cut = end - next_first
        is_whole = end == len(encoded.log_probs)
        samples = len(segment.samples) - first * step if is_whole else (end - first) * step
        start = self._seconds(segment.start + first * step)
        part = encoded.part(first, end)
        return self._bundle.decoder_input(part, samples=samples, start=start), cut

    def _join(
        self, recognized: Sequence[Recognized], name: str | None, last: Segment
    ) -> Transcript:
        words = chain.from_iterable(part.words for part in recognized)
        return Transcript(
            file=name,
            text=printable(join_segments(part.text for part in recognized)),
            seconds=self._seconds(last.next_start),
            words=tuple(replace(word, text=printable(word.text)) for word in words),
            effective=self.effective,
        )

    def _seconds(self, samples: int) -> float:
        return samples_to_seconds(samples, self._rate)


def default_batch_seconds(effective: Effective) -> float:
    """Return the seconds of padded audio that a batch should have on the model's device."""
    return CPU_BATCH_SECONDS if effective.device == "cpu" else GPU_BATCH_SECONDS


def open_recognizer(
    folder: Path, *, decoder: str | None = None, hotwords: str | None = None, **options: Any
) -> OpenBundle:
    """Open a bundle of a recognizer, with the options of `Transcriber.load`."""
    opened = open_model(folder, **options)
    try:
        bundle = opened.with_decoder(decoder).with_hotwords_option(hotwords)
        runtime = bundle.model.effective.runtime
        if runtime != "torch" and bundle.decoder and bundle.decoder.attention_rescoring:
            raise ConfigError(
                f"`--runtime {runtime}` does not support the decoder of this bundle, which needs "
                "the attention decoder, which is not exported. Pass --runtime torch or --decoder "
                "greedy, or export the run after: sbkit tune RUN --no-attention-rescoring"
            )
        bundle.task.require_prediction("text", command="transcribe")
        return bundle
    except BaseException:
        opened.model.close()
        raise


def _pools(
    segments: Iterable[_SourceSegment], sample_rate: int, seconds: float
) -> Iterator[list[_SourceSegment]]:
    """Collect segments into pools of at least that many seconds of audio."""
    pool: list[_SourceSegment] = []
    missing = max_samples = seconds_to_samples(seconds, sample_rate)
    for item in segments:
        pool.append(item)
        missing -= len(item.segment.samples) if isinstance(item.segment, Segment) else sample_rate
        if missing <= 0:
            yield pool
            return_freed_memory()  # not after short audio: many threads transcribe clip by clip
            pool, missing = [], max_samples
    if pool:
        yield pool
