"""A bundle that speaks, for many clients."""

from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Any

from sbkit.base.errors import SbkitError
from sbkit.serve.encoder import Encoder
from sbkit.serve.metrics import Metrics
from sbkit.serve.workers import Workers

MAX_SPEECH_SECONDS = 360  # of a request: 4,096 characters of plain words take 315
WARM_UP = "1, 2, 3."  # which any language can say


class Voice:
    """Speak the texts of many clients at a time, sentence by sentence.

    effective: what the model runs on.
    """

    def __init__(self, speaker: Any, *, workers: Workers, metrics: Metrics) -> None:
        """Take what a task's `load` returns.

        It has `sample_rate`, `effective`, `close()`, and `stream(text, speed, max_seconds=...)`,
        which raises SbkitError over a text that it cannot speak or that takes longer. The result
        has `notes` on how the text is read, and yields the samples of its sentences: (S,) of
        float32 between -1 and 1.
        """
        self.effective, self.sample_rate = speaker.effective, speaker.sample_rate
        self._speaker, self._workers, self._metrics = speaker, workers, metrics

    def warm_up(self) -> None:
        """Speak once."""
        with suppress(SbkitError):
            deque(self._speaker.stream(WARM_UP), maxlen=0)

    def speak(
        self, text: str, speed: float, format: str
    ) -> AsyncGenerator[Sequence[str] | bytes | float]:
        """Yield notes, the bytes of a file as they are made, then its seconds.

        See `Workers.results`.

        Raises:
            SbkitError: the text cannot be spoken.
        """

        def work(give: Callable[[Sequence[str] | bytes], None]) -> float:
            encoder = Encoder(format, self.sample_rate)
            speech = self._speaker.stream(text, speed, max_seconds=MAX_SPEECH_SECONDS)
            give(speech.notes)
            with encoder.file:  # at the end of the program there is nothing to write it to
                for piece in speech:
                    self._metrics.speech.inc(len(piece) / self.sample_rate)
                    give(encoder.push(piece))
                give(encoder.finish())
                return encoder.seconds

        return self._workers.results(work)

    def close(self) -> None:
        """End the model."""
        self._speaker.close()
