"""A model of tones that runs chunk by chunk, without torch, and sessions of any model."""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sbkit.audio.io import Samples
from sbkit.base.arrays import LogProbs
from sbkit.bundle.protocols import ChunkSizes, StreamingModel
from sbkit.tasks.recognition.session import Event, Final, Session, StreamingRecognizer
from sbkit.text.tokenizer import Tokenizer
from tests.runtime.tones import STEP, ToneModel, tone_bundle

CHUNK = 16 * STEP


class StreamingToneModel(ToneModel):
    """Hear tones in chunks; the state counts them."""

    chunks = ChunkSizes(CHUNK, CHUNK, STEP)

    @property
    def streaming(self) -> StreamingModel:
        return self

    def start(self) -> int:
        return 0

    def advance(self, chunks: Sequence[Samples], states: Sequence[int]) -> list[Any]:
        self.batches.append([len(chunk) / STEP for chunk in chunks])
        outputs: list[LogProbs] = [self._hear(chunk) for chunk in chunks]
        return [(output, state + 1) for output, state in zip(outputs, states, strict=True)]


streaming_bundle = partial(tone_bundle, model_class=StreamingToneModel)


def streaming_tones(
    folder: Path, **options: Any
) -> tuple[StreamingRecognizer, Tokenizer, ToneModel]:
    """Make a recognizer of tones, with the options of `tone_bundle`."""
    bundle, tokenizer, model = streaming_bundle(folder, token_order=3, **options)
    return StreamingRecognizer(bundle=bundle), tokenizer, model


def run(recognizer: StreamingRecognizer, blocks: Iterable[Samples]) -> list[Event]:
    """Return the events of a session."""
    session = Session(recognizer)
    return [*(event for block in blocks for event in session.push(block)), *session.finish()]


def finals(events: Iterable[Event]) -> list[Final]:
    return [event for event in events if isinstance(event, Final)]
