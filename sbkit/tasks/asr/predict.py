"""Transcription: audio of any length to text, by a model in a thread of its own.

    inputs -> segments -> batches of similar length, across inputs -> log-probabilities
        -> joined at overlaps -> decoded -> a transcript for each input, in their order

Audio is cut in pauses: where it is quiet, or between the speech that a voice detector finds. If
there is no pause, two segments overlap. Their log-probabilities are joined at one frame, in the
longest gap between two tokens of the first segment, so that no word is lost or repeated. A frame of
CTC belongs to a fixed time, so this works with every decoder.

Legend: S samples, W windows of 20 ms, U frames, V vocabulary.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, Self, cast

from sbkit.audio.channels import Downmixer
from sbkit.audio.containers import AudioError
from sbkit.audio.io import AudioLike, Samples, path_or_file, stream_input
from sbkit.audio.segments import Segment, Segmenter
from sbkit.base.errors import DataError, SbkitError
from sbkit.base.messages import listed, printable
from sbkit.base.threads_and_memory import return_freed_memory
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.bundle.protocols import EffectiveRuntime, Encoded
from sbkit.bundle.side_inputs import SideInputs
from sbkit.bundle.task import ClipBatch, SideField
from sbkit.decoding.pool import Alternative, DecoderInput, RecognizedClip, join_recognitions
from sbkit.runtime.batch_shapes import BatchShapes
from sbkit.runtime.model_thread import ModelThread, ReopenedWhenUnpickled, model_errors
from sbkit.runtime.runtimes import load_in_thread
from sbkit.tasks.asr.bundle import AsrBundle, as_recognizer
from sbkit.tasks.asr.transcript import Transcript, merge_channels
from sbkit.tasks.vad.predict import VoiceDetector
from sbkit.text.normalization import join_segments
from sbkit.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Channel = int | Literal["each"] | None
EncodeSegments = Callable[[Sequence[Samples], Sequence[SideInputs]], list[Encoded]]
NO_ROW: Mapping[str, Any] = MappingProxyType({})

GPU_BATCH_SECONDS = 60.0  # of padded audio
CPU_BATCH_SECONDS = 10.0  # fits the caches of a core; with 32 s ONNX takes 1.15 times as long
EACH: Final = "each"  # of the channels apart
MAX_CALL_CHANNELS = 8  # the most channels that are transcribed apart
READ_AHEAD_SECONDS = 480.0  # of audio, whose segments are batched by length; 15 MB


@dataclass(frozen=True)
class _SegmentResult:
    """A segment of an input, or the error that ends the input."""

    file: str | None  # None for an array or an open file
    segment: Segment | SbkitError
    is_last: bool = False  # in its input, or in its channel, if channels are transcribed apart
    num_channels: int = 1  # of the input that are transcribed apart


@dataclass(eq=False)
class OverlapJoiner:
    """Run the encoder on the segments of inputs, and join its output where they overlap."""

    bundle: AsrBundle[ModelThread]
    encode: EncodeSegments  # takes any number of segments
    sides: Sequence[SideInputs] = ()  # of the input, if the model has side inputs
    frames_to_skip: int = 0  # of the next segment, which belong to the previous one

    def decoder_inputs(self, segments: Sequence[Segment]) -> list[DecoderInput]:
        """Return the decoder's input of each segment; the segments follow those of the last call.

        It lacks the frames that the previous segment or the next one provides.
        """
        bundle = self.bundle
        frame_samples = bundle.model.samples_per_frame
        rate, silent_ids = bundle.config.sample_rate, bundle.tokenizer.silent_ids
        sides = [*self.sides] * len(segments)
        outputs = self.encode([segment.samples for segment in segments], sides)
        inputs: list[DecoderInput] = []
        for segment, encoded in zip(segments, outputs, strict=True):
            if segment.start == 0:  # of a new input; an error may have ended the last one
                self.frames_to_skip = 0
            first_sample = self.frames_to_skip * frame_samples
            end, skipped_by_next = segment.end_frame(encoded.log_probs, frame_samples, silent_ids)
            last_sample = end * frame_samples if segment.overlap else len(segment.samples)
            inputs.append(
                bundle.decoder_input(
                    encoded.frames(self.frames_to_skip, end),
                    samples=last_sample - first_sample,
                    start=samples_to_seconds(segment.start + first_sample, rate),
                )
            )
            self.frames_to_skip = skipped_by_next
        return inputs


class Transcriber(ReopenedWhenUnpickled):
    """Transcribe files and arrays; made by `Transcriber.load`.

    Any number of threads may call it. It pickles as the call that loads it again.

    runs_on: where and how the model runs.
    sample_rate: of the model, in Hz; frame_seconds: from one frame of CTC to the next.

    >>> with Transcriber.load("my-model", device="cpu") as transcriber:  # doctest: +SKIP
    ...     print(transcriber.transcribe("talk.mp3").text)
    hello there
    """

    def __init__(
        self,
        *,
        bundle: AsrBundle[ModelThread],
        times: bool = True,
        read_ahead_seconds: float = READ_AHEAD_SECONDS,
        detector: VoiceDetector | None = None,
        encode: EncodeSegments | None = None,
    ) -> None:
        """Use an open bundle.

        times: whether words are timed.
        read_ahead_seconds: how much audio is read before the model runs on its segments.
        detector: finds the pauses where long audio is cut.
        encode: runs the encoder on segments, by default in batches of similar length; tasks that
            decode no frames do not use it.
        """
        self._bundle = bundle
        self._model = bundle.model
        self._times = times
        decodes_frames = bundle.task.decodes_frames
        self._decoder_pool = bundle.decoder_pool if decodes_frames else None
        frame_samples = self._model.samples_per_frame if decodes_frames else 1
        self.sample_rate = bundle.config.sample_rate
        self._read_ahead_seconds = read_ahead_seconds
        self.runs_on = bundle.model.runs_on
        self._spaces = bundle.config.has_words
        if detector is not None:
            detector.require_rate(self.sample_rate)
        self._segmenter = Segmenter(self.sample_rate, frame_samples, detector, decodes_frames)
        max_samples = seconds_to_samples(default_batch_seconds(self.runs_on), self.sample_rate)
        self.frame_seconds = frame_samples / self.sample_rate
        self._shapes = BatchShapes(max_samples=max_samples)
        self._encode = encode or partial(self._model.encode_by_length, shapes=self._shapes)

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        times: bool = True,
        detector: VoiceDetector | None = None,
        **options: Any,
    ) -> Self:
        """Load a bundle with the options of `load_bundle`, and use it as the constructor does."""
        bundle = as_recognizer(load_in_thread(folder, **options))
        return cls(bundle=bundle, times=times, detector=detector)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._bundle.tokenizer

    @property
    def side_fields(self) -> Mapping[str, SideField]:
        """The values that the model takes beside audio."""
        return self._bundle.task.side_fields

    def transcribe(
        self,
        audio: AudioLike,
        sample_rate: float | None = None,
        *,
        channel: Channel = None,
        nbest: int = 0,
        keep_truncated: bool = False,
        row: Mapping[str, Any] = NO_ROW,
    ) -> Transcript:
        """Transcribe audio, in any form that `stream_input` takes.

        sample_rate: of an array, in Hz.
        channel: the one to transcribe, counted from 0; None: all are downmixed; "each": up to
            eight, with a speaker each, are transcribed apart and merged, as by `merge_channels`.
        nbest: up to this many of the most probable texts are in `nbest`, and the first is the text.
            A model that decodes greedily uses beam search for them.
        keep_truncated: whether a truncated file is transcribed to its end instead of being refused.
        row: what the model takes beside the audio, by the names of its task's `side_fields`.
        """
        (transcript,) = self.stream(
            [audio],
            sample_rate,
            channel=channel,
            nbest=nbest,
            keep_truncated=keep_truncated,
            row=row,
        )
        if isinstance(transcript, SbkitError):
            raise transcript
        return transcript

    def __call__(
        self, audio: AudioLike | list[Path | str], **options: Any
    ) -> Transcript | list[Transcript]:
        """Transcribe audio, or each of a list of files, as `transcribe` does with its options."""
        if not (isinstance(audio, list) and all(isinstance(file, Path | str) for file in audio)):
            return self.transcribe(cast("AudioLike", audio), **options)
        transcripts: list[Transcript] = []
        for result in self.stream(audio, **options):
            if isinstance(result, SbkitError):
                raise result
            transcripts.append(result)
        return transcripts

    def stream(
        self,
        audios: Iterable[AudioLike],
        sample_rate: float | None = None,
        *,
        on_seconds: Callable[[float], object] | None = None,
        on_text: Callable[[str], object] | None = None,
        phrases: Sequence[str] = (),
        times: bool | None = None,
        channel: Channel = None,
        nbest: int = 0,
        keep_truncated: bool = False,
        row: Mapping[str, Any] = NO_ROW,
    ) -> Iterator[Transcript | SbkitError]:
        """Yield the transcript of each input, or its error, in their order.

        Segments are decoded in batches of up to ``read_ahead_seconds``, so the calls below come
        batch by batch, one for each segment.

        on_seconds: called with the seconds of audio that a segment adds.
        on_text: called with the text that a segment adds to the transcript.
        phrases: hotwords, for a decoder that takes them; a string is one phrase.
        times: whether words are timed; None for the setting of the Transcriber.
        channel: of every input, as for `transcribe`. The calls come channel by channel.
        nbest: how many of the most probable texts each transcript has, as for `transcribe`.
        keep_truncated: as for `transcribe`.
        row: as for `transcribe`, of all inputs.
        """
        if nbest and channel == EACH:
            raise DataError("`nbest` is for one channel, or for their downmix.")
        hotwords = (phrases,) if isinstance(phrases, str) else tuple(phrases)
        if hotwords and self._bundle.task.decodes_frames:
            hotwords, _ = self._bundle.split_phrases(hotwords)
        times = channel == EACH or (self._times if times is None else times)
        request = ClipBatch(clips=(), rows=[row], times=times, phrases=hotwords, nbest=nbest)
        joiner = OverlapJoiner(self._bundle, self._encode, self._bundle.side_inputs([row], 1))
        recognized: list[RecognizedClip] = []  # the segments of the present input
        last_character = ""  # of the text of the present input
        channel_transcripts: list[Transcript] = []  # of the present input
        results = self._read(audios, sample_rate, channel, keep_truncated=keep_truncated)
        for batch in _batches(results, self.sample_rate, self._read_ahead_seconds):
            segments = [item.segment for item in batch if isinstance(item.segment, Segment)]
            with model_errors(_names(batch)):
                decoded = iter(self._predict(segments, joiner, request))
            for item in batch:
                if isinstance(item.segment, SbkitError):
                    yield item.segment
                    channel_transcripts = []
                else:
                    recognized.append(next(decoded))
                    text = join_segments([last_character, recognized[-1].text], spaces=self._spaces)
                    if on_text is not None:
                        on_text(printable(text.removeprefix(last_character)))
                    last_character = text[-1:]
                    if on_seconds is not None:
                        seconds = self._seconds(item.segment.next_start - item.segment.start)
                        on_seconds(seconds / item.num_channels)
                    if item.is_last:
                        transcript = self._join(recognized, item.file, item.segment, nbest)
                        channel_transcripts.append(transcript)
                    if len(channel_transcripts) == item.num_channels:
                        is_call = channel == EACH
                        yield merge_channels(channel_transcripts) if is_call else transcript
                        channel_transcripts = []
                if item.is_last:
                    recognized = []
                    last_character = ""

    def encode(
        self,
        audio: AudioLike,
        sample_rate: float | None = None,
        *,
        channel: int | None = None,
        row: Mapping[str, Any] = NO_ROW,
    ) -> Iterator[tuple[Segment, DecoderInput]]:
        """Yield the segments of an input with their log-probabilities, and decode nothing.

        audio, sample_rate, row: as for `transcribe`.
        channel: counted from 0; None: all are downmixed.
        """
        self._bundle.task.require_frames("Alignment")
        joiner = OverlapJoiner(self._bundle, self._encode, self._bundle.side_inputs([row], 1))
        results = self._read([audio], sample_rate, channel)
        for batch in _batches(results, self.sample_rate, self._read_ahead_seconds):
            segments = [item.segment for item in batch if isinstance(item.segment, Segment)]
            with model_errors(_names(batch)):
                inputs = joiner.decoder_inputs(segments)
            yield from zip(segments, inputs, strict=True)
            if isinstance(batch[-1].segment, SbkitError):
                raise batch[-1].segment

    def close(self) -> None:
        if self._decoder_pool is not None:
            self._decoder_pool.close()
        self._model.close()

    def _read(
        self,
        audios: Iterable[AudioLike],
        sample_rate: float | None,
        channel: Channel,
        *,
        keep_truncated: bool = False,
    ) -> Iterator[_SegmentResult]:
        """Read and cut one input after the other; an error ends its input."""
        if isinstance(audios, Mapping) or path_or_file(audios) is not None:
            raise DataError(f"`{str(audios)[:100]}` is a single input. Pass a list of inputs.")
        apart = channel == EACH
        for audio in audios:
            file = os.fsdecode(audio) if isinstance(audio, str | os.PathLike) else None
            blocks = partial(
                stream_input, audio, sample_rate, self.sample_rate, keep_truncated=keep_truncated
            )
            downmixer = Downmixer(0 if isinstance(channel, str) else channel)
            try:
                yield from self._read_channel(file, blocks(downmixer), downmixer, apart=apart)
                for index in range(1, downmixer.num_channels if apart else 1):
                    downmixer = Downmixer(index)
                    yield from self._read_channel(file, blocks(downmixer), downmixer, apart=apart)
            except SbkitError as error:
                yield _SegmentResult(file, error, is_last=True)

    def _read_channel(
        self, file: str | None, blocks: Iterator[Samples], downmixer: Downmixer, *, apart: bool
    ) -> Iterator[_SegmentResult]:
        """Cut one channel of an input, or its downmix; raises SbkitError.

        apart: whether all channels are transcribed apart.
        """
        previous: Segment | None = None
        num_channels = 1  # unless they are transcribed apart
        for segment in self._segmenter.split(blocks):
            if apart:
                num_channels = downmixer.num_channels
            if num_channels > MAX_CALL_CHANNELS:
                fault = f"{file or 'The audio'} has {num_channels} channels, but at most "
                raise AudioError(
                    "too many channels", f"{fault}{MAX_CALL_CHANNELS} are transcribed apart."
                )
            if previous is not None:
                yield _SegmentResult(file, previous, num_channels=num_channels)
            previous = segment
        assert previous is not None  # there is always a segment, which may be empty
        if downmixer.fault:
            logger.warning(
                f"The two channels of {file or 'the audio'} {downmixer.fault}, but are downmixed. "
                "Choose one as `channel`, counted from 0, or transcribe each."
            )
        yield _SegmentResult(file, previous, is_last=True, num_channels=num_channels)

    def _predict(
        self, segments: Sequence[Segment], joiner: OverlapJoiner, request: ClipBatch
    ) -> list[RecognizedClip]:
        """Predict segments: in one batch if frames are decoded, else in some of similar length."""
        bundle, task = self._bundle, self._bundle.task
        clips = [segment.samples for segment in segments]
        if task.decodes_frames:
            encode = partial(joiner.decoder_inputs, segments)
            rows = [*request.rows] * len(clips)
            batch = replace(request, clips=clips, rows=rows, encode=encode)
            return [*task.predict(bundle, batch)]
        by_index: dict[int, RecognizedClip] = {}
        for indices in self._shapes.batches([*map(len, clips)]):
            rows = [*request.rows] * len(indices)
            batch = replace(request, clips=[clips[index] for index in indices], rows=rows)
            for index, recognized in zip(indices, task.predict(bundle, batch), strict=True):
                by_index[index] = recognized.later(self._seconds(segments[index].start))
        return [by_index[index] for index in range(len(segments))]

    def _join(
        self, recognized: Sequence[RecognizedClip], file: str | None, last: Segment, nbest: int
    ) -> Transcript:
        joined = join_recognitions(recognized, spaces=self._spaces)
        return Transcript(
            file=file,
            text=printable(joined.text),
            seconds=self._seconds(last.next_start),
            words=tuple(replace(word, text=printable(word.text)) for word in joined.words),
            utterances=tuple(recognized),
            runs_on=self.runs_on,
            spaces=self._spaces,
            nbest=_join_alternatives(recognized, nbest, spaces=self._spaces),
        )

    def _seconds(self, samples: int) -> float:
        return samples_to_seconds(samples, self.sample_rate)


def _join_alternatives(
    recognized: Sequence[RecognizedClip], count: int, *, spaces: bool
) -> tuple[Alternative, ...]:
    """Return the most probable texts of consecutive segments, whose probabilities multiply."""
    best = [Alternative("", 0.0)]
    for segment in recognized:
        joined = [
            Alternative(
                printable(join_segments([before.text, after.text], spaces=spaces)),
                before.log_prob + after.log_prob,
            )
            for before, after in product(best, segment.nbest)
        ]
        distinct: dict[str, Alternative] = {}
        for alternative in sorted(joined, key=attrgetter("log_prob"), reverse=True):
            distinct.setdefault(alternative.text, alternative)
        best = [*distinct.values()][:count]
    return tuple(best)


def default_batch_seconds(runs_on: EffectiveRuntime) -> float:
    """Return the seconds of padded audio that a batch should have on the model's device."""
    return CPU_BATCH_SECONDS if runs_on.device == "cpu" else GPU_BATCH_SECONDS


def _names(batch: Sequence[_SegmentResult]) -> str:
    return listed(dict.fromkeys(item.file or "an array" for item in batch))


def _batches(
    segments: Iterable[_SegmentResult], sample_rate: int, seconds: float
) -> Iterator[list[_SegmentResult]]:
    """Collect segments into batches that grow to ``seconds`` of audio."""
    max_samples = seconds_to_samples(seconds, sample_rate)
    # The first batch fills a GPU, no more, so that the first result comes soon.
    target_samples = seconds_to_samples(min(seconds, GPU_BATCH_SECONDS), sample_rate)
    batch: list[_SegmentResult] = []
    num_samples = 0
    for item in segments:
        batch.append(item)
        if isinstance(item.segment, Segment):
            num_samples += len(item.segment.samples)
        else:
            num_samples += sample_rate  # so that a list of many broken files is reported early
        if num_samples >= target_samples:
            yield batch
            return_freed_memory()  # not after short audio: many threads transcribe clip by clip
            target_samples = min(2 * target_samples, max_samples)
            batch = []
            num_samples = 0
    if batch:
        yield batch
