"""A TTS model for many clients."""

from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sbkit.audio.encode import FileWriter
from sbkit.base.errors import SbkitError
from sbkit.runtime.clients import Workers
from sbkit.serve.middleware import ApiError, Metrics

if TYPE_CHECKING:
    from sbkit.tasks.tts.predict import Synthesizer

MAX_SPEECH_SECONDS = 360  # of a request: 4,096 characters of plain words take 315
WARM_UP_TEXT = "1, 2, 3."  # works in any language

SpeechStream = AsyncGenerator[Any]  # notes, the file in chunks of bytes, then its seconds


class Voice:
    """Speak texts of many clients at the same time, sentence by sentence."""

    def __init__(self, synthesizer: "Synthesizer", *, workers: Workers, metrics: Metrics) -> None:
        self.runs_on, self.sample_rate = synthesizer.runs_on, synthesizer.sample_rate
        self.language = synthesizer.language
        self._synthesizer = synthesizer
        self._workers = workers
        self._metrics = metrics

    def warm_up(self) -> None:
        with suppress(SbkitError):
            speech = self._synthesizer.stream(WARM_UP_TEXT, max_seconds=MAX_SPEECH_SECONDS)
            deque(speech.audio, maxlen=0)

    def speak(self, text: str, speed: float, format: str) -> SpeechStream:
        """Speak a text in one of FILE_FORMATS; raises ApiError if it cannot be spoken."""

        def work(send: Callable[[Sequence[str] | bytes], None]) -> float:
            writer = FileWriter(format, self.sample_rate)
            try:
                speech = self._synthesizer.stream(text, speed, max_seconds=MAX_SPEECH_SECONDS)
            except SbkitError as error:
                raise ApiError(400, str(error), "input") from error
            send(speech.notes)
            with writer.file:
                for block in speech.audio:
                    self._metrics.speech.inc(len(block) / self.sample_rate)
                    send(writer.push(block))
                send(writer.finish())
                return writer.seconds

        return self._workers.run(work)

    def close(self) -> None:
        self._synthesizer.close()
