"""Transcription: audio of any length to text, by a model in a thread of its own.

    sources -> pieces -> batches of similar length, across sources -> log-probabilities
        -> joined at overlaps -> decoded -> a transcript for each source, in their order

Any number of threads may call one Transcriber.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Self, cast

import numpy.typing as npt

from sbkit.audio.io import Samples, convert_array, stream_audio
from sbkit.base.errors import SbkitError
from sbkit.base.machine import return_freed_memory, usable_cores
from sbkit.base.text import printable
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.decoding.ctc_decoder import DecoderInput, Recognized, raise_errors
from sbkit.decoding.spelling import SPACE
from sbkit.inference.bundle.bundle import Bundle
from sbkit.inference.runtime.model import Effective, Encoded, ModelThread, naming_audio
from sbkit.inference.runtime.runtimes import RuntimeOptions, open_model
from sbkit.inference.transcribe.pieces import Cutter, Piece, find_gap
from sbkit.text.word import Word

BATCH_SECONDS = 60.0  # of padded audio
CPU_BATCH_SECONDS = 10.0  # fits the caches of a core; with 32 s ONNX takes 1.15 times as long
POOL_SECONDS = 480.0  # that are read ahead, and sorted by length; 15 MB of audio

Audio = Path | str | npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """The text of a source, and its words where their times were asked for.

    file: its name, None for an array; seconds: of audio; effective: what the model ran on;
    refused_hotwords: those that the model cannot spell.
    """

    file: str | None
    text: str
    seconds: float
    effective: Effective
    words: tuple[Word, ...] = ()
    refused_hotwords: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the text."""
        return self.text

    def plain(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        refused = {"refused_hotwords": self.refused_hotwords} if self.refused_hotwords else {}
        return {
            "file": self.file,
            "text": self.text,
            "seconds": round(self.seconds, 3),
            "words": [word.plain() for word in self.words],
            "effective": asdict(self.effective),
            **refused,
        }


@dataclass(frozen=True)
class AudioSource:
    """Audio to be transcribed: its name, and a function that yields blocks at the model's rate."""

    name: str | None
    blocks: Callable[[], Iterable[Samples]]


@dataclass(frozen=True)
class _QueuedPiece:
    """A piece of a source, or the error that ends it."""

    source: AudioSource
    piece: Piece | None
    is_last: bool
    error: SbkitError | None = None


@dataclass
class _Unfinished:
    """The pieces of a source that are decoded so far, or the error that ends it."""

    texts: list[str] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    error: SbkitError | None = None

    def add(self, found: Recognized | SbkitError) -> None:
        """Add the text of the next piece, or its error."""
        if isinstance(found, SbkitError):
            self.error = self.error or found
            return
        self.texts += [found.text] if found.text else []
        self.words += [replace(each, text=printable(each.text)) for each in found.words]


class Transcriber:
    """Transcribe files and arrays; made by `Transcriber.load`."""

    def __init__(self, *, bundle: Bundle, times: bool = True) -> None:
        """Take a bundle whose model has a thread of its own."""
        self._bundle, self._pool, self._times = bundle, bundle.decoder_pool, times
        self._thread: ModelThread = bundle.model
        tokenizer = bundle.tokenizer
        spaces = (number for number, each in enumerate(tokenizer.pieces()) if each == SPACE)
        self._silent = (tokenizer.vocabulary.blank, *spaces)
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
        on_recompile: str = "error",
        decoder: str | None = None,
        hotwords: str | None = None,
        times: bool = True,
        own: frozenset[str] = frozenset(),
    ) -> Self:
        """Load a bundle and its model; ``effective`` says what it runs on, which is what was asked.

        device: cpu, cuda, cuda:N or auto; runtime: torch or onnx; precision: fp32, bf16, fp16, or
        int8 of onnx; compile: default or reduce-overhead, None for not at all; on_recompile: error,
        or fallback to uncompiled code, which is counted; decoder: greedy, beam or graph, None for
        the bundle's own; hotwords: phrases with commas, or a file of them; times: whether words
        are timed; own: modules of the user's that the bundle may use.

        Raises:
            SbkitError: the bundle is damaged, or the device, runtime or precision is not there.
        """
        options = RuntimeOptions(
            device=device,
            runtime=runtime,
            precision=precision,
            compile=compile,
            on_recompile=on_recompile,
        )
        bundle = open_model(Path(folder), options, own=own)
        try:
            ready = bundle.with_decoder(decoder).with_hotwords(hotwords)
            _require_runtime_for_decoder(ready, runtime)
            return cls(bundle=ready, times=times)
        except BaseException:
            bundle.model.close()
            raise

    @property
    def fallbacks(self) -> int:
        """How many batches a compiled model ran uncompiled."""
        return self._thread.call(lambda model: model.fallbacks)

    def transcribe(self, audio: Audio, sample_rate: int | None = None) -> Transcript:
        """Transcribe a file, or an array at ``sample_rate``: (S,) or (S, channels).

        Raises:
            SbkitError: the file is no audio, or the array no finite samples.
        """
        (transcript,) = self.transcribe_batch([audio], sample_rate)
        return transcript

    def transcribe_batch(
        self, audios: Sequence[Audio], sample_rate: int | None = None
    ) -> list[Transcript]:
        """Transcribe several as `transcribe` does, in batches of similar length.

        Raises:
            SbkitError: one of them cannot be read.
        """
        rate = self._bundle.config.sample_rate
        sources = (
            self.file_source(each)
            if isinstance(each, Path | str)
            else AudioSource(None, partial(convert_array, each, sample_rate, rate))
            for each in audios
        )
        return raise_errors(self.stream(sources))

    def file_source(self, path: Path | str, *, name: str | None = None) -> AudioSource:
        """Make a source of a file, which may go by another name."""
        rate = self._bundle.config.sample_rate
        return AudioSource(name or str(path), partial(_read, path, rate, name))

    def stream(
        self, sources: Iterable[AudioSource], *, on_seconds: Callable[[float], object] | None = None
    ) -> Iterator[Transcript | SbkitError]:
        """Yield the transcript of each source, or its error, in their order.

        on_seconds: called with the seconds of audio that were decoded since it was called last.
        """
        opened, cut = _Unfinished(), 0
        for pool in _pools(self._parts(sources), self._bundle.config.sample_rate):
            found, cut = self._recognize(pool, cut)
            for part, each in zip(pool, found, strict=True):
                opened.add(each)
                if part.piece is not None and on_seconds is not None:
                    on_seconds(self._seconds(part.piece.next_start - part.piece.start))
                if part.is_last:
                    yield opened.error or self._close(opened, part)
                    opened = _Unfinished()

    def close(self) -> None:
        """End the thread of the model, and the processes that decode."""
        self._pool.close()
        self._thread.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread of the model."""
        self.close()

    def _parts(self, sources: Iterable[AudioSource]) -> Iterator[_QueuedPiece]:
        """Read and cut one source after the other; one that cannot be read ends in its error."""
        cutter = Cutter(self._bundle.config.sample_rate, self._thread.samples_per_frame)
        for source in sources:
            pieces = cutter.pieces(source.blocks())
            try:
                for piece, following in pairwise(chain(pieces, [None])):
                    yield _QueuedPiece(source, piece, is_last=following is None)
            except SbkitError as error:
                yield _QueuedPiece(source, None, is_last=True, error=error)

    def _score(self, pool: Sequence[_QueuedPiece]) -> dict[int, Encoded | SbkitError]:
        """Run the model on the pieces of a pool, batched by length: by place in the pool."""
        rows: dict[int, Encoded | SbkitError] = {}
        clips = {place: part.piece.samples for place, part in enumerate(pool) if part.piece}
        on_cpu, rate = self.effective.device == "cpu", self._bundle.config.sample_rate
        most = seconds_to_samples(CPU_BATCH_SECONDS if on_cpu else BATCH_SECONDS, rate)
        batches = list(_batches(clips, most, fewest=usable_cores() if on_cpu else 1))
        audio = [[clips[place] for place in batch] for batch in batches]
        for batch, found in zip(batches, self._thread.encode_batches(audio), strict=True):
            if isinstance(
                found, Exception
            ):  # each is run by itself, to find the one with the fault
                rows |= {place: self._run_single(pool[place]) for place in batch}
            else:
                rows |= zip(batch, found, strict=True)
        return rows

    def _run_single(self, part: _QueuedPiece) -> Encoded | SbkitError:
        assert part.piece is not None
        try:
            with naming_audio(part.source.name or "an array"):
                return self._thread.encode([part.piece.samples])[0]
        except SbkitError as error:
            return error

    def _recognize(
        self, pool: Sequence[_QueuedPiece], cut: int
    ) -> tuple[list[Recognized | SbkitError], int]:
        """Return the text of each piece of a pool, or its error.

        cut: frames that the first piece leaves to the one before it, as returned with that one.
        """
        rows, clips = self._score(pool), dict[int, DecoderInput]()
        for place, part in enumerate(pool):
            encoded, first, cut = rows.get(place), cut, 0
            if part.piece is not None and isinstance(encoded, Encoded):
                clips[place], cut = self._trim(part.piece, encoded, first)
        decoded = self._pool.decode(list(clips.values()), times=self._times)
        recognized = dict(zip(clips, decoded, strict=True))
        found = [
            part.error or recognized.get(place) or rows[place] for place, part in enumerate(pool)
        ]
        return cast(list[Recognized | SbkitError], found), cut

    def _trim(self, piece: Piece, encoded: Encoded, first: int) -> tuple[DecoderInput, int]:
        """Leave out the first frames of a piece, and of its last ones those that the next decodes.

        Return also how many the next one leaves out.
        """
        step, end, cut = self._thread.samples_per_frame, len(encoded.log_probs), 0
        if piece.overlap:
            following = (piece.next_start - piece.start) // step
            end = find_gap(encoded.log_probs, end - following, self._silent)
            cut = end - following
        whole = end == len(encoded.log_probs)
        samples = len(piece.samples) - first * step if whole else (end - first) * step
        begin = self._seconds(piece.start + first * step)
        clip = self._bundle.decoder_input(encoded.part(first, end), samples=samples, begin=begin)
        return clip, cut

    def _close(self, opened: _Unfinished, part: _QueuedPiece) -> Transcript:
        assert part.piece is not None
        return Transcript(
            file=part.source.name,
            text=printable(" ".join(opened.texts)),
            seconds=self._seconds(part.piece.start + len(part.piece.samples)),
            words=tuple(opened.words),
            effective=self.effective,
            refused_hotwords=tuple(map(printable, self._bundle.refused_hotwords)),
        )

    def _seconds(self, samples: int) -> float:
        return samples_to_seconds(samples, self._bundle.config.sample_rate)


def _require_runtime_for_decoder(bundle: Bundle, runtime: str) -> None:
    """Raise SbkitError for a decoder that needs what the runtime does not have."""
    if runtime != "torch" and bundle.decoder is not None and bundle.decoder.attention is not None:
        raise SbkitError(
            f"`--runtime {runtime}` must have all that the decoder needs, but this bundle's needs "
            "the attention decoder, which is not exported. Pass --runtime torch or --decoder "
            "greedy, or export the run after: sbkit tune RUN --attention none"
        )


def _read(path: Path | str, sample_rate: int, name: str | None) -> Iterator[Samples]:
    """Yield the blocks of a file; an error calls it by its other name."""
    try:
        yield from stream_audio(path, sample_rate)
    except SbkitError as error:
        raise SbkitError(str(error).replace(str(path), name or str(path))) from error


def _pools(parts: Iterable[_QueuedPiece], sample_rate: int) -> Iterator[list[_QueuedPiece]]:
    """Collect parts until they hold POOL_SECONDS of audio."""
    pool: list[_QueuedPiece] = []
    left = most = seconds_to_samples(POOL_SECONDS, sample_rate)
    for part in parts:
        pool.append(part)
        left -= len(part.piece.samples) if part.piece else sample_rate
        if left <= 0:
            yield pool
            return_freed_memory()  # not after short audio: many threads transcribe clip by clip
            pool, left = [], most
    if pool:
        yield pool


def _batches(clips: Mapping[int, Samples], most: int, *, fewest: int) -> Iterator[list[int]]:
    """Yield the places of clips of similar length, within ``most`` samples of padded audio.

    There are at least ``fewest`` batches, where there are as many clips.
    """
    lengths = {place: len(clip) for place, clip in clips.items()}
    most = min(most, sum(lengths.values()) // fewest)
    batch: list[int] = []
    for place in sorted(lengths, key=lengths.__getitem__):
        full = lengths[place] * (len(batch) + 1) > most
        if batch and (full or lengths[place] > 2 * lengths[batch[0]]):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch
