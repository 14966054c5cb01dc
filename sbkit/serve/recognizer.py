"""A bundle that transcribes the files and turns of many clients, in common batches."""

import asyncio
import shutil
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import numpy as np

from sbkit.audio.io import AudioError, Samples, declared_seconds
from sbkit.base.errors import SbkitError
from sbkit.base.units import samples_to_seconds
from sbkit.runtime.model import Shapes
from sbkit.runtime.runtimes import OpenBundle
from sbkit.runtime.transcriber import Transcriber, Transcript
from sbkit.runtime.voice_detector import VoiceDetector
from sbkit.serve.batcher import Batcher
from sbkit.serve.errors import ApiError, too_large
from sbkit.serve.metrics import Metrics
from sbkit.serve.streams import StreamBatcher
from sbkit.serve.turns import SpeechTurns
from sbkit.serve.workers import Workers
from sbkit.streaming.recognizer import StreamingRecognizer
from sbkit.streaming.session import Event, Final, Session

POOL_SECONDS = 60.0  # of a request that are read ahead; batches are made of all requests
TURN_SILENCE = 0.5  # seconds, as OpenAI's server_vad has it; by endpoint rules alone it is longer


@dataclass
class Clip:
    """What is said in a turn, made and fed as a `Session` is, for a model of whole clips."""

    phrases: tuple[str, ...]
    start: int
    parts: list[Samples] = field(default_factory=list)
    is_finished: bool = False

    def feed(self, samples: Samples) -> None:
        """Take samples (S,) of int16."""
        self.parts.append(samples)


class Recognizer:
    """Transcribe the files and turns of many clients at a time.

    effective: what the model runs on; live: what it is for streams, None where it takes whole
    clips alone; silence: seconds that end a turn, None where only a client can end one.
    """

    def __init__(
        self,
        bundle: OpenBundle,
        *,
        shapes: Shapes,
        wait: float,
        max_seconds: float,
        workers: Workers,
        metrics: Metrics,
        detector: VoiceDetector | None = None,
    ) -> None:
        """Take a bundle whose model has a thread of its own; wait: seconds, see `Batcher`.

        max_seconds: of a file or turn; detector: by which turns begin and end.
        """
        self.sample_rate, self.language = bundle.config.sample_rate, bundle.config.language
        self.effective, self._max_seconds = bundle.model.effective, max_seconds
        self._thread, self._shapes, self._detector = bundle.model, shapes, detector
        self._workers, self._metrics = workers, metrics
        self.batcher = Batcher(
            bundle.model, shapes=shapes, wait_seconds=wait, on_batch=self._on_batch
        )
        self._bundle = OpenBundle.of(bundle, self.batcher)
        self.live, self._streams = self._live(bundle), StreamBatcher(metrics.streams.observe)
        self._by_times = {
            times: Transcriber(bundle=self._bundle, times=times, pool_seconds=POOL_SECONDS)
            for times in (False, True)
        }
        self.silence = None if self.live is None else self.live.rules.silence
        if detector is not None:
            detector.require_rate(self.sample_rate)
            self.silence = TURN_SILENCE

    def warm_up(self) -> None:
        """Run every shape of the table, and what follows the model."""
        self._thread.warm_up(self._shapes)
        silence = np.zeros(self.sample_rate, np.int16)
        for transcriber in self._by_times.values():
            transcriber.transcribe(silence, self.sample_rate)
        if self.live is not None:
            Session(self.live).push(silence)
        if self._detector is not None:
            self._detector.speech_segments(silence)

    def transcribe(
        self, audio: BinaryIO | Samples, *, times: bool, phrases: tuple[str, ...] = ()
    ) -> AsyncGenerator[str | Transcript]:
        """Yield the text of each piece of a file, or of samples, as it is known; then all of it.

        times: whether words are timed; phrases: to expect. See `Workers.results`.

        Raises:
            ApiError: the file is no audio, or too long.
        """
        return self._workers.results(partial(self._work, audio, times, phrases))

    async def transcript(
        self, audio: BinaryIO | Samples, *, times: bool, phrases: tuple[str, ...] = ()
    ) -> Transcript:
        """Return the transcript; raises as `transcribe` does."""
        async with aclosing(self.transcribe(audio, times=times, phrases=phrases)) as found:
            while isinstance(item := await anext(found), str):
                pass
        return item

    def speech_turns(self, silence: float | None, start: float) -> SpeechTurns | None:
        """Return what cuts a stream into turns, where a detector does; see `SpeechTurns`."""
        if self._detector is None or silence is None:
            return None
        return SpeechTurns(self._detector, silence=silence, start=start)

    async def turns(
        self, phrases: tuple[str, ...], silence: float | None
    ) -> Callable[[int], Session | Clip]:
        """Return what makes a turn of the place of its first sample.

        phrases: to expect; silence: seconds that end a turn where no detector does it.
        """
        live = self.live
        if live is None:
            return partial(Clip, phrases)
        rules = live.rules
        if silence is not None and self._detector is None:
            rules = replace(rules, silence=silence)
        if phrases:
            live = await asyncio.to_thread(lambda: self._live(self._expecting(phrases)))
            assert live is not None
        return lambda start: Session(live, rules, start=start)

    async def advance(self, turn: Session | Clip) -> Sequence[Event]:
        """Run what a turn was fed, and return what it makes known: of a clip once it is finished.

        Raises:
            ApiError: a clip is too long.
        """
        if isinstance(turn, Session):
            return await self._streams.advance(turn)
        if not turn.is_finished:
            return ()
        samples, start = np.concatenate(turn.parts), self._seconds(turn.start)
        found = await self.transcript(samples, times=True, phrases=turn.phrases)
        end, words = start + found.seconds, tuple(word.later(start) for word in found.words)
        final = Final(seconds=end, text=found.text, start=start, end=end, words=words)
        return [final] if found.text else ()

    def close(self) -> None:
        """End all threads and processes."""
        self._streams.close()
        self._by_times[True].close()

    def _work(
        self,
        audio: BinaryIO | Samples,
        times: bool,
        phrases: tuple[str, ...],
        on_text: Callable[[str], None],
    ) -> Transcript:
        """Transcribe a file or samples, in a thread of their own."""
        with TemporaryDirectory(prefix="sbkit") as folder:
            file = Path(folder, "file")
            source = audio if isinstance(audio, np.ndarray) else self._save(audio, file)
            (found,) = self._by_times[times].stream(
                [source],
                self.sample_rate,
                on_seconds=self._counter(),
                on_text=on_text,
                phrases=phrases,
            )
        if isinstance(found, AudioError):
            raise ApiError(422, str(found).replace(f"{folder}/", ""), "file")
        if isinstance(found, SbkitError):
            raise found
        return found

    def _save(self, audio: BinaryIO, file: Path) -> Path:
        with file.open("wb") as content:
            shutil.copyfileobj(audio, content)
        self._check_seconds(declared_seconds(file))
        return file

    def _expecting(self, phrases: tuple[str, ...]) -> OpenBundle:
        decoder = self._bundle.decoder
        if not phrases or decoder is None or decoder.decoder_type == "graph":
            return self._bundle
        return self._bundle.expecting(phrases)

    def _live(self, bundle: OpenBundle) -> StreamingRecognizer | None:
        try:
            return StreamingRecognizer(bundle=OpenBundle.of(bundle, self._thread))
        except SbkitError:
            return None

    def _counter(self) -> Callable[[float], None]:
        """Return what counts seconds of a request, of which a header may declare too few."""
        total = 0.0

        def count(seconds: float) -> None:
            nonlocal total
            total += seconds
            self._check_seconds(total)
            self._metrics.audio.inc(seconds)

        return count

    def _check_seconds(self, seconds: float) -> None:
        if seconds > self._max_seconds:
            raise too_large(f"{self._max_seconds:g} s of audio")

    def _on_batch(self, clips: int, samples: int) -> None:
        self._metrics.on_batch(clips, clips * self._seconds(samples))

    def _seconds(self, samples: int) -> float:
        return samples_to_seconds(samples, self.sample_rate)
