"""A bundle's model behind a `Batcher`, and the threads in which requests are transcribed."""

import asyncio
import io
import shutil
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import soundfile
from starlette.datastructures import UploadFile

from sbkit.audio.io import AudioError, Samples, declared_seconds
from sbkit.base.errors import SbkitError
from sbkit.base.units import samples_to_seconds
from sbkit.inference.bundle.bundle import Bundle
from sbkit.inference.runtime.shapes import Shapes
from sbkit.inference.transcribe.transcriber import Transcriber, Transcript
from sbkit.live.endpoint import EndpointRules
from sbkit.live.recognizer import LiveRecognizer
from sbkit.live.session import Event, Final, Session
from sbkit.serve.batcher import Batcher, cancelled
from sbkit.serve.errors import ApiError, too_large
from sbkit.serve.fields import Fields
from sbkit.serve.limits import Limits
from sbkit.serve.metrics import Metrics
from sbkit.serve.streams import StreamBatcher

POOL_SECONDS = 60.0  # of a request that are read ahead; batches are made of all requests


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
    clips alone.
    """

    def __init__(self, bundle: Bundle, *, shapes: Shapes, wait: float, limits: Limits) -> None:
        """Take a bundle whose model has a thread of its own; wait: seconds, see `Batcher`."""
        rate = bundle.config.sample_rate
        self.metrics, self.language = Metrics(sample_rate=rate), bundle.config.language
        self.effective = bundle.model.effective
        self._thread, self._shapes, self.limits = bundle.model, shapes, limits
        batcher = Batcher(
            bundle.model, shapes=shapes, wait_seconds=wait, on_batch=self.metrics.on_batch
        )
        self.metrics.show("queued_pieces", "that wait for the model", lambda: len(batcher))
        self._bundle, self.sample_rate = replace(bundle, model=batcher), rate
        self.live, self._streams = self._live(bundle), StreamBatcher(self.metrics.streams.observe)
        self._by_times = {each: _transcriber(self._bundle, each) for each in (False, True)}
        self._threads = ThreadPoolExecutor(limits.max_concurrent, thread_name_prefix="request")

    def warm_up(self) -> None:
        """Run every shape of the table, and what follows the model."""
        self._thread.warm_up(self._shapes)
        silence = np.zeros(self.sample_rate, np.int16)
        for transcriber in self._by_times.values():
            transcriber.transcribe(silence, self.sample_rate)
        if self.live is not None:
            Session(self.live).push(silence)

    async def transcribe(self, fields: Fields) -> AsyncGenerator[str | Transcript]:
        """Yield the text of each piece of the audio as it is known, then the transcript.

        Nothing goes on once the iterator is closed or cancelled.

        Raises:
            ApiError: the file is no audio, or too long.
        """
        loop, found = asyncio.get_running_loop(), asyncio.Queue[str | Future[Transcript]]()
        end = threading.Event()

        def put(item: str | Future[Transcript]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(found.put_nowait, item)

        future = self._threads.submit(self._work, fields, end, put)
        future.add_done_callback(put)
        try:
            while isinstance(item := await found.get(), str):
                yield item
            yield item.result()
        finally:
            future.cancel()
            end.set()

    async def transcript(self, fields: Fields) -> Transcript:
        """Return the transcript of a file; raises as `transcribe` does."""
        async with aclosing(self.transcribe(fields)) as found:
            while isinstance(item := await anext(found), str):
                pass
        return item

    async def speech(
        self, phrases: tuple[str, ...], rules: EndpointRules | None
    ) -> Callable[[int], Session | Clip]:
        """Return what makes turns of their first sample's place; rules: of a session's ends."""
        live = self.live
        if live is not None and phrases:
            live = await asyncio.to_thread(lambda: self._live(self._expecting(phrases)))
        return lambda start: (
            Clip(phrases, start) if live is None else Session(live, rules, start=start)
        )

    async def advance(self, turn: Session | Clip) -> Sequence[Event]:
        """Run what a turn was fed, and return what it makes known: of a clip once it is finished.

        Raises:
            ApiError: a clip is too long.
        """
        if isinstance(turn, Session):
            return await self._streams.advance(turn)
        if not turn.is_finished:
            return ()
        file = io.BytesIO()
        soundfile.write(file, np.concatenate(turn.parts), self.sample_rate, format="WAV")
        file.seek(0)
        fields = Fields(file=UploadFile(file), format="verbose_json", phrases=turn.phrases)
        found = await self.transcript(fields)
        start = samples_to_seconds(turn.start, self.sample_rate)
        end, words = start + found.seconds, tuple(word.later(start) for word in found.words)
        final = Final(seconds=end, text=found.text, start=start, end=end, words=words)
        return [final] if found.text else ()

    def close(self) -> None:
        """Cancel what waits, and end all threads and processes."""
        self._streams.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._by_times[True].close()
        self._threads.shutdown()

    def _work(
        self, fields: Fields, end: threading.Event, on_text: Callable[[str], object]
    ) -> Transcript:
        """Transcribe the file of a request, in a thread of its own."""
        cancelled.set(end)
        with TemporaryDirectory(prefix="sbkit") as folder:
            file = Path(folder, "file")
            with file.open("wb") as content:
                shutil.copyfileobj(fields.file.file, content)
            self._check_seconds(declared_seconds(file))
            transcriber = self._choose(fields)
            (found,) = transcriber.stream([file], on_seconds=self._counter(), on_text=on_text)
        if isinstance(found, AudioError):
            told = str(found).replace(f"{folder}/", "")
            raise ApiError(422, told, "file")
        if isinstance(found, SbkitError):
            raise found
        return found

    def _choose(self, fields: Fields) -> Transcriber:
        """Return what transcribes with times or without, and with the phrases of the prompt."""
        bundle = self._expecting(fields.phrases)
        if bundle is self._bundle:
            return self._by_times[fields.has_times]
        return _transcriber(bundle, fields.has_times)

    def _expecting(self, phrases: tuple[str, ...]) -> Bundle:
        decoder = self._bundle.decoder
        if not phrases or decoder is None or decoder.kind == "graph":
            return self._bundle
        return self._bundle.expecting(phrases)

    def _live(self, bundle: Bundle) -> LiveRecognizer | None:
        try:
            return LiveRecognizer(bundle=replace(bundle, model=self._thread))
        except SbkitError:
            return None

    def _counter(self) -> Callable[[float], None]:
        """Return what counts seconds of a request, of which a header may declare too few."""
        total = 0.0

        def count(seconds: float) -> None:
            nonlocal total
            total += seconds
            self._check_seconds(total)
            self.metrics.audio.inc(seconds)

        return count

    def _check_seconds(self, seconds: float) -> None:
        if seconds > self.limits.max_seconds:
            raise too_large(f"{self.limits.max_seconds:g} s of audio")


def _transcriber(bundle: Bundle, times: bool) -> Transcriber:
    return Transcriber(bundle=bundle, times=times, pool_seconds=POOL_SECONDS)
