"""Voice activity: where speech is, in a whole clip or in audio that arrives block by block.

    samples -> a model's probability of speech, frame by frame -> events: started, stopped

The model comes from a bundle, or from the package silero-vad.
"""

from argparse import Namespace
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np

from sbkit.audio.io import FULL_SCALE, Samples, to_samples
from sbkit.base.arrays import Float32s
from sbkit.base.errors import ConfigError
from sbkit.base.imports import require_package
from sbkit.base.units import samples_to_seconds
from sbkit.bundle.bundle import Bundle
from sbkit.bundle.protocols import ModelState, StreamingModel
from sbkit.runtime.model_thread import ModelThread, ReopenedWhenUnpickled
from sbkit.runtime.runtimes import load_in_thread
from sbkit.tasks.vad.task import DELAY_FRAMES

SILERO = "silero"  # the name of the detector, and of the extra that installs it
SILERO_CONTEXT = 64  # samples before a frame that the model needs
SILERO_FILE = "data/silero_vad_16k_op15.onnx"  # in the package, whose Python code imports torch


class SpeechSegment(NamedTuple):
    """Speech, from start to end in seconds."""

    start: float
    end: float


class SpeechEvent(NamedTuple):
    """Speech started or stopped at ``seconds``, as detected from the audio up to ``detected``."""

    kind: Literal["started", "stopped"]
    seconds: float
    detected: float


@dataclass(frozen=True, kw_only=True)
class SpeechRules:
    """How probabilities of frames become spans of speech; times are in seconds.

    onset: the probability at which speech may begin.
    offset: the probability below which speech may end.
    shortest: the shortest speech: time that its probability stays above ``offset``.
    hang_over: speech ends after this much time below ``offset``.
    padding: added to both ends of a span, at most ``hang_over``.
    """

    onset: float = 0.75
    offset: float = 0.5
    shortest: float = 0.1
    hang_over: float = 0.3
    padding: float = 0.05


@dataclass
class SpeechState:
    """The state of a stream. `push` returns a new one, so a stream can be continued twice."""

    model: ModelState
    samples: Samples = field(default_factory=lambda: np.zeros(0, np.int16))  # of the next frame
    frames: int = 0  # so far
    first: int | None = None  # the first frame of possible speech; None in silence
    end: int = 0  # the frame after its last one with speech
    is_speech: bool = False  # whether the possible speech was long enough
    previous_end: float = 0.0  # of the previous span, in seconds


class SpeechModel(Protocol):
    """A model that computes the probability of speech in every frame."""

    sample_rate: int  # in Hz
    shift: int  # samples from one frame to the next
    overlap: int  # samples of the next frame that a frame needs
    delay: int  # the lag of its output behind the audio, in frames

    def start(self) -> ModelState:
        """Return the state before the first sample; `advance` does not change it."""

    def advance(self, samples: Samples, state: ModelState) -> tuple[Float32s, ModelState]:
        """Compute U probabilities from U * shift + overlap samples, and the new state."""


@dataclass(frozen=True)
class VoiceDetector:
    """Find speech with a model that any number of streams and threads may share.

    >>> detector = VoiceDetector.load("my-vad")  # doctest: +SKIP
    >>> detector.speech_segments(samples)  # doctest: +SKIP
    [SpeechSegment(start=0.35, end=1.72)]
    """

    model: SpeechModel
    rules: SpeechRules = field(default_factory=SpeechRules)

    @classmethod
    def load(cls, name: Path | str, **options: Any) -> Self:
        """Load a bundle with options of `load_bundle`, or the package silero-vad by "silero"."""
        if str(name) == SILERO:
            return cls(SileroModel(), SpeechRules(onset=0.5, offset=0.35))
        return cls(BundleSpeechModel(load_in_thread(name, streaming="only", **options)))

    def require_rate(self, sample_rate: int) -> None:
        """Raise ConfigError if the model does not take audio at this rate in Hz."""
        if sample_rate != self.model.sample_rate:
            raise ConfigError(
                f"This voice detector takes audio at {self.model.sample_rate} Hz, but the "
                f"recognizer's is at {sample_rate} Hz. Train it with `sample_rate: {sample_rate}`."
            )

    def start(self) -> SpeechState:
        """Return the state of a stream before its first sample."""
        return SpeechState(self.model.start())

    def push(self, samples: Samples, state: SpeechState) -> tuple[list[SpeechEvent], SpeechState]:
        """Take live samples as `to_samples` does; return the new events and the new state."""
        shift = self.model.shift
        pending = np.concatenate([state.samples, to_samples(samples, is_live=True)])
        frames = max(0, (len(pending) - self.model.overlap) // shift)
        events: list[SpeechEvent] = []
        state = replace(state, samples=pending[frames * shift :])
        if frames:
            complete = pending[: frames * shift + self.model.overlap]
            probabilities, state.model = self.model.advance(complete, state.model)
            events += filter(None, (self._read(p, state) for p in probabilities.tolist()))
        return events, state

    def finish(self, state: SpeechState) -> list[SpeechEvent]:
        """End a stream: speech that has not stopped ends with the last sample."""
        samples = state.frames * self.model.shift + len(state.samples)
        end = samples_to_seconds(samples, self.model.sample_rate)
        return [SpeechEvent("stopped", end, end)] if state.is_speech else []

    def speech_segments(self, audio: Samples) -> list[SpeechSegment]:
        """Return the spans of speech in a whole clip, which `to_samples` converts."""
        events, state = self.push(to_samples(audio), self.start())
        times = [event.seconds for event in (*events, *self.finish(state))]
        return list(map(SpeechSegment, times[::2], times[1::2]))

    def _read(self, probability: float, state: SpeechState) -> SpeechEvent | None:
        """Update the state with the probability of the next frame."""
        rules = self.rules
        frame = state.frames
        state.frames += 1
        if probability >= (rules.onset if state.first is None else rules.offset):
            state.first = frame if state.first is None else state.first
            state.end = frame + 1
        elif not state.is_speech:
            state.first = None
        now = self._seconds(state.frames)
        delay = self.model.delay
        if state.first is None:
            return None
        if not state.is_speech and self._seconds(state.end - state.first) >= rules.shortest:
            state.is_speech = True
            start = self._seconds(state.first - delay) - rules.padding
            return SpeechEvent("started", max(state.previous_end, start), now)
        if state.is_speech and self._seconds(state.frames - state.end) >= rules.hang_over:
            state.first, state.is_speech = None, False
            state.previous_end = self._seconds(max(0, state.end - delay)) + rules.padding
            return SpeechEvent("stopped", state.previous_end, now)
        return None

    def _seconds(self, frames: int) -> float:
        return samples_to_seconds(frames * self.model.shift, self.model.sample_rate)


class BundleSpeechModel(ReopenedWhenUnpickled):
    """The model of a bundle in its thread, as a `SpeechModel`."""

    def __init__(self, bundle: Bundle[ModelThread]) -> None:
        bundle.task.require_prediction("speech", command="transcribe --vad")
        self._thread = bundle.model
        self.sample_rate = bundle.config.sample_rate
        self.delay = DELAY_FRAMES
        chunks = self._thread.chunks
        assert chunks is not None
        self.shift = chunks.step
        self.overlap = chunks.window - chunks.step
        # The ONNX graph takes one frame, because the exporter unrolls a GRU.
        self._one_frame = self._thread.runs_on.runtime != "torch"

    def start(self) -> ModelState:
        return self._thread.start()

    def advance(self, samples: Samples, state: ModelState) -> tuple[Float32s, ModelState]:
        return self._thread.call(lambda model: self._run(samples, state, model.streaming))

    def _run(
        self, samples: Samples, state: ModelState, model: StreamingModel
    ) -> tuple[Float32s, ModelState]:
        size = self.shift + self.overlap if self._one_frame else len(samples)
        probabilities: list[Float32s] = []
        for first in range(0, len(samples) - self.overlap, size - self.overlap):
            [(log_probs, state)] = model.advance([samples[first : first + size]], [state])
            probabilities.append(np.exp(log_probs[:, 1]))
        return np.concatenate(probabilities), state


SileroState = tuple[Float32s, Float32s]  # the recurrent state, and the last SILERO_CONTEXT samples


class SileroModel(ReopenedWhenUnpickled):
    """The ONNX graph of silero-vad as a `SpeechModel`, with frames of 32 ms."""

    sample_rate, shift, overlap, delay = 16_000, 512, 0, 0

    def __init__(self) -> None:
        onnxruntime = require_package("onnxruntime", extra=SILERO)
        spec = find_spec("silero_vad")
        origin = spec.origin if spec else require_package("silero_vad", extra=SILERO).__file__
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        file = Path(str(origin)).parent / SILERO_FILE
        self._session = onnxruntime.InferenceSession(file, options)

    def start(self) -> SileroState:
        return np.zeros((2, 1, 128), np.float32), np.zeros(SILERO_CONTEXT, np.float32)

    def advance(self, samples: Samples, state: SileroState) -> tuple[Float32s, SileroState]:
        recurrent, context = state
        probabilities: list[Float32s] = []
        for frame in samples.reshape(-1, self.shift).astype(np.float32) / FULL_SCALE:
            x = np.concatenate([context, frame])
            inputs = {"input": x[None], "state": recurrent, "sr": np.array(self.sample_rate)}
            probability, recurrent = self._session.run(None, inputs)
            probabilities.append(probability[0])
            context = x[-SILERO_CONTEXT:]
        return np.concatenate(probabilities), (recurrent, context)


def open_detector(options: Namespace) -> VoiceDetector | None:
    """Open the voice activity detector of ``--vad``."""
    if options.vad is None:
        return None
    return VoiceDetector.load(options.vad, device=options.device, runtime=options.runtime)
