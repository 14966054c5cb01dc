"""A bundle's model behind a `Batcher`, and the threads in which requests are transcribed."""

import asyncio
import shutil
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from sbkit.audio.io import AudioError, declared_seconds
from sbkit.base.errors import SbkitError
from sbkit.inference.bundle.bundle import Bundle
from sbkit.inference.runtime.shapes import Shapes
from sbkit.inference.transcribe.transcriber import Transcriber, Transcript
from sbkit.serve.batcher import Batcher, Work, working_for
from sbkit.serve.errors import ApiError
from sbkit.serve.fields import Fields
from sbkit.serve.limits import Limits
from sbkit.serve.metrics import Metrics

POOL_SECONDS = 60.0  # of a request that are read ahead; batches are made of all requests


class Recognizer:
    """Transcribe files of many requests at a time; effective: what the model runs on."""

    def __init__(self, bundle: Bundle, *, shapes: Shapes, wait: float, limits: Limits) -> None:
        """Take a bundle whose model has a thread of its own.

        wait: seconds that a piece waits for others while the model is idle.
        """
        self.metrics = Metrics(sample_rate=bundle.config.sample_rate)
        self._thread, self._shapes, self._limits = bundle.model, shapes, limits
        self._batcher = Batcher(
            bundle.model, shapes=shapes, wait_seconds=wait, on_batch=self.metrics.on_batch
        )
        self._bundle = replace(bundle, model=self._batcher)
        self.effective, self.language = bundle.model.effective, bundle.config.language
        self._transcribers = {each: self._transcriber(self._bundle, each) for each in (False, True)}
        self._threads = ThreadPoolExecutor(limits.max_concurrent, thread_name_prefix="request")
        self.metrics.show("sbkit_queued_pieces", "pieces that wait", lambda: len(self._batcher))

    def warm_up(self) -> None:
        """Run every shape of the table, and all that follows the model."""
        self._thread.warm_up(self._shapes)
        rate = self._bundle.config.sample_rate
        for transcriber in self._transcribers.values():
            transcriber.transcribe(np.zeros(rate, np.int16), rate)

    async def transcribe(self, fields: Fields) -> AsyncGenerator[str | Transcript]:
        """Yield the text of each piece of the audio as it is known, then the transcript.

        Nothing goes on once the iterator is closed or cancelled.

        Raises:
            ApiError: the file is no audio, or too long.
        """
        loop, found = asyncio.get_running_loop(), asyncio.Queue[str | Future[Transcript]]()
        work = Work()

        def put(item: str | Future[Transcript]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(found.put_nowait, item)

        future = self._threads.submit(self._work, fields, work, put)
        future.add_done_callback(put)
        try:
            while isinstance(item := await found.get(), str):
                yield item
            yield item.result()
        finally:
            future.cancel()
            work.cancel()

    def close(self) -> None:
        """Cancel what waits, and end all threads and processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._transcribers[True].close()
        self._threads.shutdown()

    def _work(self, fields: Fields, work: Work, on_text: Callable[[str], object]) -> Transcript:
        """Transcribe the file of a request, in a thread of its own."""
        working_for.set(work)
        with TemporaryDirectory(prefix="sbkit") as folder:
            file = Path(folder, "file")
            with file.open("wb") as content:
                shutil.copyfileobj(fields.file.file, content)
            self._check_seconds(declared_seconds(file))
            try:
                return self._read(file, fields, on_text)
            except AudioError as error:
                told = str(error).replace(f"{folder}/", "")
                raise ApiError(HTTPStatus.UNPROCESSABLE_ENTITY, told, param="file") from error

    def _read(self, file: Path, fields: Fields, on_text: Callable[[str], object]) -> Transcript:
        total = 0.0

        def count(seconds: float) -> None:  # a header may say less than there is
            nonlocal total
            total += seconds
            self._check_seconds(total)
            self.metrics.audio.inc(seconds)

        transcriber = self._transcribers[fields.has_times]
        decoder = self._bundle.decoder
        if fields.phrases and decoder is not None and decoder.kind != "graph":
            expecting = self._bundle.expecting(fields.phrases)
            transcriber = self._transcriber(expecting, fields.has_times)
        (found,) = transcriber.stream([file], on_seconds=count, on_text=on_text)
        if isinstance(found, SbkitError):
            raise found
        return found

    def _check_seconds(self, seconds: float) -> None:
        if seconds > self._limits.max_seconds:
            raise ApiError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"Audio must have at most {self._limits.max_seconds:g} s, but has more. Send it in "
                "parts.",
                param="file",
            )

    def _transcriber(self, bundle: Bundle, times: bool) -> Transcriber:
        return Transcriber(bundle=bundle, times=times, pool_seconds=POOL_SECONDS)
