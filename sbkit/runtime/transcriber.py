"""Transcription: audio of any length to text, by a model in a thread of its own.

    sources -> segments -> batches of similar length, across sources -> log-probabilities
        -> joined at overlaps -> decoded -> a transcript for each source, in their order

Any number of threads may call one Transcriber.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from io import IOBase
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Self

import numpy.typing as npt

from sbkit.audio.io import Samples, convert_array, stream_audio
from sbkit.base.allocator import return_freed_memory
from sbkit.base.errors import ConfigError, DataError, SbkitError
from sbkit.base.messages import listed, printable
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.bundle.protocols import Effective, Encoded
from sbkit.decoding.decoder import DecoderInput, Recognized
from sbkit.runtime.model import Shapes, naming_audio
from sbkit.runtime.runtimes import OpenBundle, open_model
from sbkit.runtime.segments import Segment, Segmenter, find_gap
from sbkit.runtime.voice_detector import VoiceDetector
from sbkit.text.normalization import join_segments
from sbkit.text.word import Word

GPU_BATCH_SECONDS = 60.0  # of padded audio
CPU_BATCH_SECONDS = 10.0  # fits the caches of a core; with 32 s ONNX takes 1.15 times as long
POOL_SECONDS = 480.0  # that are read ahead, and sorted by length; 15 MB of audio

Audio = Path | str | IOBase | npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """The text of a source, and its words if their times were asked for.

    file: the name of the source; None for an array or an open file.
    seconds: of audio.
    effective: where and how the model ran.
    """

    file: str | None
    text: str
    seconds: float
    effective: Effective
    words: tuple[Word, ...] = ()

    def __str__(self) -> str:
        return self.text

    def plain(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {
            "file": self.file,
            "text": self.text,
            "seconds": round(self.seconds, 3),
            "words": [word.plain() for word in self.words],
            "effective": asdict(self.effective),
        }


class BatchError(DataError):
    """Some sources of a batch could not be read.

    results: the transcript or the error of each source.
    """

    def __init__(self, results: Sequence[Transcript | SbkitError]) -> None:
        errors = [result for result in results if isinstance(result, SbkitError)]
        super().__init__(
            f"{len(errors)} of {len(results)} files or arrays cannot be read; `results` has the "
            f"transcripts of the others. The first error: {errors[0]}"
        )
        self.results = tuple(results)


@dataclass(frozen=True)
class _SourceSegment:
    """A segment of a source, or the error that ends the source; name: of a file."""

    name: str | None
    segment: Segment | SbkitError
    is_last: bool


class Transcriber(AbstractContextManager["Transcriber"]):
    """Transcribe files and arrays; made by `Transcriber.load`.

    effective: where and how the model runs.

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
        pool_seconds: audio that is read ahead.
        detector: finds the pauses in which long audio is cut.
        encode: runs the model on segments, by default in batches of similar length.
        """
        self._bundle, self._pool, self._times = bundle, bundle.decoder_pool, times
        self._pool_seconds = pool_seconds
        self._thread = bundle.model
        self._rate = bundle.config.sample_rate
        self._segmenter = Segmenter(self._rate, self._thread.samples_per_frame, detector=detector)
        if detector is not None:
            detector.require_rate(self._rate)
        self.effective = self._thread.effective
        seconds = default_batch_seconds(self.effective)
        self._shapes = Shapes(max_samples=seconds_to_samples(seconds, self._rate))
        self._encode = encode or self._encode_by_length

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
        """Load a bundle and its model, which runs as asked or is refused.

        device: cpu, cuda, cuda:N or auto.
        runtime: torch or onnx.
        precision: fp32, bf16 or fp16 of torch, fp32 or int8 of onnx.
        compile: default or reduce-overhead; None for not at all.
        decoder: greedy, beam or graph; None for the bundle's own.
        hotwords: phrases separated by commas, or a file of them.
        times: whether words are timed.
        detector: finds the pauses in which long audio is cut.
        user_modules: the user's modules that the bundle may import.

        Raises:
            SbkitError: the bundle is damaged, or the device, runtime or precision not available.
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
            DataError: the file is no audio, or the array no finite samples.
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
            BatchError: some cannot be read; its ``results`` have the transcripts of the others.
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
        on_seconds: Callable[[float], object] | None = None,
        on_text: Callable[[str], object] | None = None,
        phrases: Sequence[str] = (),
        times: bool | None = None,
    ) -> Iterator[Transcript | SbkitError]:
        """Yield the transcript of each source, or its error, in their order.

        on_seconds: called with the seconds of audio that were decoded since its last call.
        on_text: called with the text that each segment adds to its source, as soon as it is known.
        phrases: to expect, if the decoder can expect any.
        times: whether words are timed, if other than the Transcriber's.
        """
        recognized: list[Recognized] = []
        cut = 0  # frames that a segment leaves to the one before it
        expected = self._bundle.spellable(phrases)[0]
        is_timed = self._times if times is None else times
        queued = self._read(audios, sample_rate)
        for pool in _pools(queued, self._rate, self._pool_seconds):
            inputs, cut = self._decoder_inputs(pool, cut, expected)
            decoded = iter(self._pool.decode(inputs, times=is_timed))
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
                if on_seconds is not None:
                    on_seconds(self._seconds(item.segment.next_start - item.segment.start))
                if item.is_last:
                    yield self._join(recognized, item.name, item.segment)
                    recognized = []

    def close(self) -> None:
        """End the thread of the model, and the processes that decode."""
        self._pool.close()
        self._thread.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, audios: Iterable[Audio], sample_rate: int | None) -> Iterator[_SourceSegment]:
        """Read and cut one source after the other; one that cannot be read ends in its error."""
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
        self, pool: Sequence[_SourceSegment], cut: int, phrases: tuple[str, ...]
    ) -> tuple[list[DecoderInput], int]:
        """Run the model on a pool; return what the decoder takes of each segment.

        cut: frames that the first segment leaves to the one before it. It is returned for the first
        segment of the next pool, too.
        """
        segments = [item.segment for item in pool if isinstance(item.segment, Segment)]
        with naming_audio(listed(dict.fromkeys(item.name or "an array" for item in pool))):
            encoded = iter(self._encode([segment.samples for segment in segments]))
        inputs: list[DecoderInput] = []
        for item in pool:
            if isinstance(item.segment, SbkitError):
                cut = 0
            else:
                trimmed, cut = self._trim(item.segment, next(encoded), cut)
                inputs.append(replace(trimmed, phrases=phrases))
        return inputs, cut

    def _encode_by_length(self, segments: Sequence[Samples]) -> list[Encoded]:
        return self._thread.encode_by_length(segments, self._shapes)

    def _trim(self, segment: Segment, encoded: Encoded, first: int) -> tuple[DecoderInput, int]:
        """Cut off the first frames of a segment, and those of its overlap that the next decodes.

        Return also how many frames the next segment cuts off.
        """
        step, end, cut = self._thread.samples_per_frame, len(encoded.log_probs), 0
        if segment.overlap:
            following = (segment.next_start - segment.start) // step
            end = find_gap(encoded.log_probs, end - following, self._bundle.tokenizer.silent)
            cut = end - following
        is_whole = end == len(encoded.log_probs)
        samples = len(segment.samples) - first * step if is_whole else (end - first) * step
        begin = self._seconds(segment.start + first * step)
        return (
            self._bundle.decoder_input(encoded.part(first, end), samples=samples, begin=begin),
            cut,
        )

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
    """Return how much padded audio a batch should have on a device."""
    return CPU_BATCH_SECONDS if effective.device == "cpu" else GPU_BATCH_SECONDS


def open_recognizer(
    folder: Path, *, decoder: str | None = None, hotwords: str | None = None, **options: Any
) -> OpenBundle:
    """Open a bundle that transcribes, its model in a new thread; see `Transcriber.load`."""
    bundle = open_model(folder, **options)
    try:
        ready = bundle.with_decoder(decoder).with_hotwords(hotwords)
        runtime = bundle.model.effective.runtime
        if runtime != "torch" and ready.decoder and ready.decoder.attention_rescoring:
            raise ConfigError(
                f"`--runtime {runtime}` does not support the decoder of this bundle, which needs "
                "the attention decoder: that is not exported. Pass --runtime torch or --decoder "
                "greedy, or export the run after: sbkit tune RUN --no-attention-rescoring"
            )
        ready.task.require_prediction("text", command="transcribe")
        return ready
    except BaseException:
        bundle.model.close()
        raise


def _pools(
    queued: Iterable[_SourceSegment], sample_rate: int, seconds: float
) -> Iterator[list[_SourceSegment]]:
    """Collect segments until they hold that many seconds of audio."""
    pool: list[_SourceSegment] = []
    missing = max_samples = seconds_to_samples(seconds, sample_rate)
    for item in queued:
        pool.append(item)
        missing -= len(item.segment.samples) if isinstance(item.segment, Segment) else sample_rate
        if missing <= 0:
            yield pool
            return_freed_memory()  # not after short audio: many threads transcribe clip by clip
            pool, missing = [], max_samples
    if pool:
        yield pool
