"""A bundle's model behind a `Batcher`, and the threads in which requests are transcribed."""

import asyncio
import shutil
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from sbkit.audio.io import AudioError, declared_seconds
from sbkit.base.errors import SbkitError
from sbkit.inference.bundle.bundle import Bundle
from sbkit.inference.runtime.shapes import Shapes
from sbkit.inference.transcribe.transcriber import Transcriber, Transcript
from sbkit.serve.batcher import Batcher, cancelled
from sbkit.serve.errors import ApiError, too_large
from sbkit.serve.fields import Fields
from sbkit.serve.limits import Limits
from sbkit.serve.metrics import Metrics

POOL_SECONDS = 60.0  # of a request that are read ahead; batches are made of all requests


class Recognizer:
    """Transcribe the files of many requests at a time; effective: what the model runs on."""

    def __init__(self, bundle: Bundle, *, shapes: Shapes, wait: float, limits: Limits) -> None:
        """Take a bundle whose model has a thread of its own; wait: seconds, see `Batcher`."""
        rate = bundle.config.sample_rate
        self.metrics, self.language = Metrics(sample_rate=rate), bundle.config.language
        self.effective = bundle.model.effective
        self._thread, self._shapes, self._limits = bundle.model, shapes, limits
        batcher = Batcher(
            bundle.model, shapes=shapes, wait_seconds=wait, on_batch=self.metrics.on_batch
        )
        self.metrics.show("queued_pieces", "that wait for the model", lambda: len(batcher))
        self._bundle = replace(bundle, model=batcher)
        self._by_times = {each: _transcriber(self._bundle, each) for each in (False, True)}
        self._threads = ThreadPoolExecutor(limits.max_concurrent, thread_name_prefix="request")

    def warm_up(self) -> None:
        """Run every shape of the table, and what follows the model."""
        self._thread.warm_up(self._shapes)
        rate = self._bundle.config.sample_rate
        for transcriber in self._by_times.values():
            transcriber.transcribe(np.zeros(rate, np.int16), rate)

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

    def close(self) -> None:
        """Cancel what waits, and end all threads and processes."""
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
        decoder = self._bundle.decoder
        if not fields.phrases or decoder is None or decoder.kind == "graph":
            return self._by_times[fields.has_times]
        return _transcriber(self._bundle.expecting(fields.phrases), fields.has_times)

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
        if seconds > self._limits.max_seconds:
            raise too_large(f"{self._limits.max_seconds:g} s of audio")


def _transcriber(bundle: Bundle, times: bool) -> Transcriber:
    return Transcriber(bundle=bundle, times=times, pool_seconds=POOL_SECONDS)
