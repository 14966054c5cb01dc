"""Speech made of tones, and models that recognize it, without torch: a letter is a tone of 120 ms.

A model's output for a frame depends on no other frame, so a text is exactly right, or wrong. One
model runs chunk by chunk; `run` returns the events of a session of any model.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sbkit.audio.io import Samples
from sbkit.base.arrays import LogProbs
from sbkit.bundle.config import BundleConfig
from sbkit.bundle.protocols import ChunkSizes, EffectiveRuntime, Encoded, StreamingModel
from sbkit.bundle.side_inputs import SideInputs
from sbkit.decoding.beam import BeamDecoder
from sbkit.decoding.word_times import WordOffsets
from sbkit.runtime.model_thread import ClipsAndSides, ModelThread, run_batches
from sbkit.tasks.asr.bundle import AsrBundle
from sbkit.tasks.asr.predict import Transcriber
from sbkit.tasks.asr.session import Event, Final, Session, StreamingRecognizer
from sbkit.tasks.asr.task import AsrTask
from sbkit.text.tokenizer import Tokenizer
from tests.decoding.spoken import char_tokenizer, train_models

RATE, STEP = 16_000, 640  # samples a second, and of a frame
CHUNK = 16 * STEP
LETTER = 3  # frames; the last is silent
LOWEST, APART = 500.0, 150.0  # Hz


class ToneModel:
    """Recognize the loudest frequency of each frame."""

    samples_per_frame = STEP
    padded_lengths: Sequence[int] = ()

    @property
    def streaming(self) -> StreamingModel | None:
        return None

    def __init__(self, vocab_size: int, blank: int) -> None:
        self.runs_on = EffectiveRuntime(runtime="tones", device="cpu", precision="fp32")
        self._vocab_size, self._blank = vocab_size, blank
        self.batches: list[list[float]] = []  # the seconds of their clips

    def encode(self, clips: Sequence[Samples], sides: Sequence[SideInputs] = ()) -> list[Encoded]:
        self.batches.append([len(clip) / RATE for clip in clips])
        return [Encoded(self._hear(clip)) for clip in clips]

    def encode_batches(self, batches: Sequence[ClipsAndSides]) -> list[list[Encoded]]:
        return run_batches(self.encode, batches)

    def _hear(self, clip: Samples) -> LogProbs:
        position, is_silent = _listen(clip)
        token = np.clip(np.rint(position), 0, self._vocab_size - 1).astype(int)
        token[is_silent] = self._blank
        scores = np.full((len(token), self._vocab_size), -20.0)
        scores[np.arange(len(token)), token] = 0.0
        return scores


class UnsureModel(ToneModel):
    """Give the neighbors of the loudest frequency nearly its probability."""

    def _hear(self, clip: Samples) -> LogProbs:
        position, is_silent = _listen(clip)
        scores = -2 * np.abs(position[:, None] - np.arange(self._vocab_size))
        scores[is_silent] = -20.0
        scores[is_silent, self._blank] = 0.0
        result: LogProbs = scores - np.log(np.exp(scores).sum(1, keepdims=True))
        return result


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


def _listen(clip: Samples) -> tuple[Any, Any]:
    """Return the loudest frequency of each frame as the index of a token, and what is silent."""
    frames = clip[: len(clip) // STEP * STEP].reshape(-1, STEP).astype(np.float64)
    hertz = np.abs(np.fft.rfft(frames * np.hanning(STEP))).argmax(1) * RATE / STEP
    return (hertz - LOWEST) / APART, np.abs(frames).mean(1) < 500


def speak(tokenizer: Tokenizer, text: str, *, offset: float = 0.0) -> Samples:
    """Speak a text without a pause: a tone for each letter and space, higher by some hertz."""
    time = np.arange((LETTER - 1) * STEP) / RATE
    breath = np.random.default_rng(0).normal(0, 300, STEP)  # louder than silence
    parts = []
    for token in tokenizer.encode(text):
        parts += [8000 * np.sin(2 * np.pi * (LOWEST + APART * token + offset) * time), breath]
    return np.concatenate(parts).astype(np.int16)


def silence(seconds: float) -> Samples:
    return np.zeros(round(seconds * RATE / STEP) * STEP, np.int16)


def noise(*seconds: float) -> list[Samples]:
    """Return loud clips of these durations."""
    random = np.random.default_rng(0)
    return [random.integers(-9000, 9000, round(s * RATE)).astype(np.int16) for s in seconds]


def tone_transcriber(folder: Path) -> tuple[Transcriber, Tokenizer, ToneModel]:
    bundle, tokenizer, model = tone_bundle(folder)
    return Transcriber(bundle=bundle), tokenizer, model


def tone_bundle(
    folder: Path,
    text: str = "the quick brown fox jumps over a lazy dog",
    *,
    model_class: type[ToneModel] = ToneModel,
    lm_texts: Sequence[str] = (),
    token_order: int = 0,
    **decoder: Any,
) -> tuple[AsrBundle[ModelThread], Tokenizer, ToneModel]:
    """Make a bundle of a `ToneModel` for the characters of a text.

    lm_texts: the texts of the beam decoder's language models; without any, decoding is greedy.
    """
    lm_file = folder / "lm.safetensors"
    tokenizer = char_tokenizer(folder, [text])
    model = model_class(tokenizer.vocab_size, tokenizer.vocabulary.blank)
    config = BundleConfig(
        task=AsrTask().name,
        sample_rate=RATE,
        model=("model",),
        parts={},
        word_offsets=WordOffsets(0.0, 0.0),  # a tone fills its frames
    )
    beam = None
    if lm_texts:
        train_models(lm_file, tokenizer, lm_texts, tokens=token_order)
        options = {"weights": {}, **decoder}
        beam = BeamDecoder(tokenizer=tokenizer, language_models=lm_file, **options)
    thread = ModelThread(lambda: model)
    bundle = AsrBundle(config=config, task=AsrTask(), labels=tokenizer, decoder=beam, model=thread)
    return bundle, tokenizer, model


streaming_bundle = partial(tone_bundle, model_class=StreamingToneModel)


def streaming_tones(
    folder: Path, **options: Any
) -> tuple[StreamingRecognizer, Tokenizer, ToneModel]:
    """Make a recognizer of tones, with the options of `tone_bundle`."""
    bundle, tokenizer, model = streaming_bundle(folder, token_order=3, **options)
    return StreamingRecognizer(bundle=bundle), tokenizer, model


def run(recognizer: StreamingRecognizer, blocks: Iterable[Samples]) -> list[Event]:
    session = Session(recognizer)
    return [*(event for block in blocks for event in session.push(block)), *session.finish()]


def finals(events: Iterable[Event]) -> list[Final]:
    return [event for event in events if isinstance(event, Final)]
