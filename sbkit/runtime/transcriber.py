"""Transcription: audio of any length to text, by a model in a thread of its own.

    sources -> pieces -> batches of similar length, across sources -> log-probabilities
        -> joined at overlaps -> decoded -> a transcript for each source, in their order

Any number of threads may call one Transcriber.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Self

import numpy.typing as npt

from sbkit.audio.io import Samples, convert_array, stream_audio
from sbkit.base.errors import SbkitError
from sbkit.base.machine import return_freed_memory, usable_cores
from sbkit.base.text import listed, printable
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.bundle.bundle import Bundle
from sbkit.bundle.protocols import Effective, Encoded
from sbkit.decoding.ctc_decoder import DecoderInput, Recognized
from sbkit.runtime.model import ModelThread, naming_audio
from sbkit.runtime.runtimes import open_model
from sbkit.runtime.segments import Cutter, Piece, find_gap
from sbkit.runtime.voice_detector import VoiceDetector
from sbkit.text.normalize import join_segments
from sbkit.text.word import Word

BATCH_SECONDS = 60.0  # of padded audio
CPU_BATCH_SECONDS = 10.0  # fits the caches of a core; with 32 s ONNX takes 1.15 times as long
POOL_SECONDS = 480.0  # that are read ahead, and sorted by length; 15 MB of audio

Audio = Path | str | npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """The text of a source, and its words where their times were asked for.

    file: its name, None for an array; seconds: of audio; effective: what the model ran on.
    """

    file: str | None
    text: str
    seconds: float
    effective: Effective
    words: tuple[Word, ...] = ()

    def __str__(self) -> str:
        """Return the text."""
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


class BatchError(SbkitError):
    """Some of several could not be read; ``results`` has the transcript or the error of each."""

    def __init__(self, results: Sequence[Transcript | SbkitError]) -> None:
        errors = [each for each in results if isinstance(each, SbkitError)]
        super().__init__(
            f"All of a batch must be audio, but {len(errors)} of {len(results)} cannot be read. "
            f"The transcripts of the others are in `results`. The first error: {errors[0]}"
        )
        self.results = tuple(results)


@dataclass(frozen=True)
class _QueuedPiece:
    """A piece of a source, or the error that ends it; name: of the source, None for an array."""

    name: str | None
    piece: Piece | SbkitError
    is_last: bool


class Transcriber(AbstractContextManager["Transcriber"]):
    """Transcribe files and arrays; made by `Transcriber.load`."""

    def __init__(
        self,
        *,
        bundle: Bundle,
        times: bool = True,
        pool_seconds: float = POOL_SECONDS,
        detector: VoiceDetector | None = None,
    ) -> None:
        """Take a bundle whose model has a thread of its own; pool_seconds: what is read ahead."""
        self._bundle, self._pool, self._times = bundle, bundle.decoder_pool, times
        self._pool_seconds = pool_seconds
        self._thread: ModelThread = bundle.model
        self._rate = bundle.config.sample_rate
        self._cutter = Cutter(self._rate, self._thread.samples_per_frame, detector=detector)
        if detector is not None:
            detector.require_rate(self._rate)
        self.effective = self._thread.effective

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
        """Load a bundle and its model; ``effective`` says what it runs on, which is what was asked.

        device: cpu, cuda, cuda:N or auto; runtime: torch or onnx; precision: fp32, bf16, fp16, or
        int8 of onnx; compile: default or reduce-overhead, None for not at all; decoder: greedy,
        beam or graph, None for the bundle's own; hotwords: phrases with commas, or a file of them;
        times: whether words are timed; detector: of the pauses in which long audio is cut; own:
        modules of the user's that the bundle may use.

        Raises:
            SbkitError: the bundle is damaged, or the device, runtime or precision is not there.
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
        """Transcribe a file, or an array at ``sample_rate``, as `to_samples` takes it.

        Raises:
            SbkitError: the file is no audio, or the array no finite samples.
        """
        (transcript,) = self.stream([audio], sample_rate)
        if isinstance(transcript, SbkitError):
            raise transcript
        return transcript

    def transcribe_batch(
        self, audios: Sequence[Audio], sample_rate: int | None = None
    ) -> list[Transcript]:
        """Transcribe several as `transcribe` does, in batches of similar length.

        Raises:
            BatchError: some cannot be read; its ``results`` have the transcripts of the others.
        """
        results = list(self.stream(audios, sample_rate))
        found = [each for each in results if isinstance(each, Transcript)]
        if len(found) < len(results):
            raise BatchError(results)
        return found

    def stream(
        self,
        audios: Iterable[Audio],
        sample_rate: int | None = None,
        *,
        on_seconds: Callable[[float], object] | None = None,
        on_text: Callable[[str], object] | None = None,
        phrases: Sequence[str] = (),
    ) -> Iterator[Transcript | SbkitError]:
        """Yield the transcript of each file or array, or its error, in their order.

        on_seconds: called with the seconds of audio that were decoded since it was called last;
        on_text: called with the text that each piece adds to its source, as soon as it is known.
        phrases: to expect, where the decoder can expect any.
        """
        found, cut = list[Recognized](), 0
        expected = self._bundle.spellable(phrases)[0]
        for pool in _pools(self._cut(audios, sample_rate), self._rate, self._pool_seconds):
            decoded, cut = self._recognize(pool, cut, expected)
            for part in pool:
                if isinstance(part.piece, SbkitError):
                    yield part.piece
                    found = []
                    continue
                found.append(next(decoded))
                if on_text is not None:
                    texts = [segment.text for segment in found]
                    before = join_segments(texts[:-1])
                    on_text(printable(join_segments(texts).removeprefix(before)))
                if on_seconds is not None:
                    on_seconds(self._seconds(part.piece.next_start - part.piece.start))
                if part.is_last:
                    yield self._join(found, part.name, part.piece)
                    found = []

    def close(self) -> None:
        """End the thread of the model, and the processes that decode."""
        self._pool.close()
        self._thread.close()

    def __exit__(self, *_: object) -> None:
        """End the thread of the model."""
        self.close()

    def _cut(self, audios: Iterable[Audio], sample_rate: int | None) -> Iterator[_QueuedPiece]:
        """Read and cut one source after the other; one that cannot be read ends in its error."""
        for audio in audios:
            name: str | None = None
            if isinstance(audio, Path | str):
                name, blocks = str(audio), stream_audio(audio, self._rate)
            else:
                blocks = convert_array(audio, sample_rate, self._rate)
            try:
                for piece, following in pairwise(chain(self._cutter.pieces(blocks), [None])):
                    assert piece is not None
                    yield _QueuedPiece(name, piece, is_last=following is None)
            except SbkitError as error:
                yield _QueuedPiece(name, error, is_last=True)

    def _recognize(
        self, pool: Sequence[_QueuedPiece], cut: int, phrases: tuple[str, ...]
    ) -> tuple[Iterator[Recognized], int]:
        """Return the text of each piece of a pool.

        cut: frames that the first piece leaves to the one before it, as returned with that one.
        """
        clips: list[DecoderInput] = []
        encoded = iter(self._encode(pool))
        for part in pool:
            if isinstance(part.piece, SbkitError):
                cut = 0
            else:
                clip, cut = self._trim(part.piece, next(encoded), cut)
                clips.append(replace(clip, phrases=phrases))
        return iter(self._pool.decode(clips, times=self._times)), cut

    def _encode(self, pool: Sequence[_QueuedPiece]) -> list[Encoded]:
        """Run the model on the pieces of a pool, in batches of similar length."""
        clips = [part.piece.samples for part in pool if isinstance(part.piece, Piece)]
        on_cpu = self.effective.device == "cpu"
        most = seconds_to_samples(CPU_BATCH_SECONDS if on_cpu else BATCH_SECONDS, self._rate)
        batches = list(_batches(clips, most, fewest=usable_cores() if on_cpu else 1))
        with naming_audio(listed(dict.fromkeys(part.name or "an array" for part in pool))):
            found = self._thread.encode_batches([[clips[n] for n in batch] for batch in batches])
        rows = dict(zip(chain(*batches), chain(*found), strict=True))
        return [rows[n] for n in range(len(clips))]

    def _trim(self, piece: Piece, encoded: Encoded, first: int) -> tuple[DecoderInput, int]:
        """Leave out the first frames of a piece, and of its last ones those that the next decodes.

        Return also how many the next one leaves out.
        """
        step, end, cut = self._thread.samples_per_frame, len(encoded.log_probs), 0
        if piece.overlap:
            following = (piece.next_start - piece.start) // step
            end = find_gap(encoded.log_probs, end - following, self._bundle.tokenizer.silent)
            cut = end - following
        whole = end == len(encoded.log_probs)
        samples = len(piece.samples) - first * step if whole else (end - first) * step
        begin = self._seconds(piece.start + first * step)
        clip = self._bundle.decoder_input(encoded.part(first, end), samples=samples, begin=begin)
        return clip, cut

    def _join(self, found: Sequence[Recognized], name: str | None, last: Piece) -> Transcript:
        words = chain.from_iterable(each.words for each in found)
        return Transcript(
            file=name,
            text=printable(join_segments(each.text for each in found)),
            seconds=self._seconds(last.next_start),
            words=tuple(replace(each, text=printable(each.text)) for each in words),
            effective=self.effective,
        )

    def _seconds(self, samples: int) -> float:
        return samples_to_seconds(samples, self._rate)


def open_recognizer(
    folder: Path, *, decoder: str | None = None, hotwords: str | None = None, **options: Any
) -> Bundle:
    """Open a bundle that transcribes, its model in a new thread; see `Transcriber.load`."""
    bundle = open_model(folder, **options)
    try:
        ready = bundle.with_decoder(decoder).with_hotwords(hotwords)
        _require_runtime_for_decoder(ready, bundle.model.effective.runtime)
        ready.task.require("transcribe")
        return ready
    except BaseException:
        bundle.model.close()
        raise


def _require_runtime_for_decoder(bundle: Bundle, runtime: str) -> None:
    """Raise SbkitError for a decoder that needs what the runtime does not have."""
    if runtime != "torch" and bundle.decoder is not None and bundle.decoder.attention is not None:
        raise SbkitError(
            f"`--runtime {runtime}` must have all that the decoder needs, but this bundle's needs "
            "the attention decoder, which is not exported. Pass --runtime torch or --decoder "
            "greedy, or export the run after: sbkit tune RUN --attention none"
        )


def _pools(
    parts: Iterable[_QueuedPiece], sample_rate: int, seconds: float
) -> Iterator[list[_QueuedPiece]]:
    """Collect parts until they hold so much audio."""
    pool: list[_QueuedPiece] = []
    left = most = seconds_to_samples(seconds, sample_rate)
    for part in parts:
        pool.append(part)
        left -= len(part.piece.samples) if isinstance(part.piece, Piece) else sample_rate
        if left <= 0:
            yield pool
            return_freed_memory()  # not after short audio: many threads transcribe clip by clip
            pool, left = [], most
    if pool:
        yield pool


def _batches(clips: Sequence[Samples], most: int, *, fewest: int) -> Iterator[list[int]]:
    """Yield the places of clips of similar length, within ``most`` samples of padded audio.

    There are at least ``fewest`` batches, where there are as many clips.
    """
    lengths = [len(clip) for clip in clips]
    most = min(most, sum(lengths) // fewest)
    batch: list[int] = []
    for place in sorted(range(len(clips)), key=lengths.__getitem__):
        full = lengths[place] * (len(batch) + 1) > most
        if batch and (full or lengths[place] > 2 * lengths[batch[0]]):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch
