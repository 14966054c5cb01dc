"""Voice activity: where speech is, of a whole clip, or as it comes in pieces of any size.

samples -> a model's probability of speech, frame by frame -> events: started, stopped

The detector of the package silero-vad, as a VoiceDetector takes it: frames of 32 ms.
"""

from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from sbkit.audio.io import FULL_SCALE, Samples, to_samples
from sbkit.base.errors import SbkitError
from sbkit.base.process import require_package
from sbkit.base.units import samples_to_seconds
from sbkit.bundle.bundle import Bundle
from sbkit.runtime.model import ModelThread
from sbkit.runtime.runtimes import open_model
from sbkit.tasks.voice_activity import DELAY


class Segment(NamedTuple):
    """Speech, from start to end in seconds."""

    start: float
    end: float


class SpeechEvent(NamedTuple):
    """Speech has started or stopped at ``seconds``; the audio up to ``known`` told so."""

    kind: Literal["started", "stopped"]
    seconds: float
    known: float


@dataclass(frozen=True, kw_only=True)
class SpeechRules:
    """From probabilities to segments.

    onset: the probability at which speech may begin; offset: below it, speech may end. Seconds:
    shortest: of frames above ``offset`` that count; hang_over: without such a frame, after which
    speech has ended; padding: added on both sides, at most ``hang_over``.
    """

    onset: float = 0.75
    offset: float = 0.5
    shortest: float = 0.1
    hang_over: float = 0.3
    padding: float = 0.05


@dataclass
class SpeechState:
    """Where a stream stands; `push` returns another one, so that it may be gone on from twice.

    model: what the model keeps; samples (S,): from the first one of the next frame; frames: so
    far; first: of the speech that may have begun; last: the frame after the last one of speech;
    is_speech: whether that was long enough; end: of the segment before, in seconds.
    """

    model: Any
    samples: Samples = field(default_factory=lambda: np.zeros(0, np.int16))
    frames: int = 0
    first: int | None = None
    last: int = 0
    is_speech: bool = False
    end: float = 0.0


@dataclass(frozen=True)
class VoiceDetector:
    """Find speech by a model of frames, which any number of streams and threads may share.

    model: has ``sample_rate``; ``step``, the samples from one frame to the next; ``overlap``, those
    of the next that a frame needs; ``delay``, by how many frames its output is later; ``start()``,
    which returns a state that nothing changes; and ``advance(samples, state)``, which takes U *
    step + overlap samples, and returns U probabilities and the state after them.
    """

    model: Any
    rules: SpeechRules = field(default_factory=SpeechRules)

    @classmethod
    def load(cls, name: Path | str, **options: Any) -> Self:
        """Load a bundle, with the options of `open_model`, or "silero", the package silero-vad.

        Raises:
            SbkitError: it is no detector, or cannot be used here.
        """
        if str(name) == SILERO:
            return cls(SileroFrames(), SpeechRules(onset=0.5, offset=0.35))
        return cls(BundleFrames(open_model(Path(name), live=True, **options)))

    def require_rate(self, sample_rate: int) -> None:
        """Raise SbkitError for audio of another rate, in Hz, than the model's."""
        if sample_rate != self.model.sample_rate:
            raise SbkitError(
                f"A detector of voice activity must take audio at the {sample_rate} Hz of the "
                f"recognizer, but this one takes {self.model.sample_rate} Hz. Train it with "
                f"--sample_rate={sample_rate}."
            )

    def start(self) -> SpeechState:
        """Return the state of a stream before its first sample."""
        return SpeechState(self.model.start())

    def push(self, samples: Samples, state: SpeechState) -> tuple[list[SpeechEvent], SpeechState]:
        """Take samples, as `to_samples` does; return what they make known, and the state then."""
        step, waiting = self.model.step, np.concatenate([state.samples, to_samples(samples)])
        frames, events = max(0, (len(waiting) - self.model.overlap) // step), list[SpeechEvent]()
        state = replace(state, samples=waiting[frames * step :])
        if frames:
            taken = waiting[: frames * step + self.model.overlap]
            probabilities, state.model = self.model.advance(taken, state.model)
            events += filter(None, (self._read(each, state) for each in probabilities.tolist()))
        return events, state

    def finish(self, state: SpeechState) -> list[SpeechEvent]:
        """End a stream: speech that goes on stops with its last sample."""
        samples = state.frames * self.model.step + len(state.samples)
        end = samples_to_seconds(samples, self.model.sample_rate)
        return [SpeechEvent("stopped", end, end)] if state.is_speech else []

    def speech_segments(self, audio: Samples) -> list[Segment]:
        """Return where speech is in a whole clip, as `to_samples` takes it."""
        events, state = self.push(audio, self.start())
        times = [each.seconds for each in (*events, *self.finish(state))]
        return list(map(Segment, times[::2], times[1::2]))

    def _read(self, probability: float, state: SpeechState) -> SpeechEvent | None:
        """Take one frame, and change the state."""
        rules, place = self.rules, state.frames
        state.frames += 1
        if probability >= (rules.onset if state.first is None else rules.offset):
            state.first, state.last = place if state.first is None else state.first, place + 1
        elif not state.is_speech:
            state.first = None
        now, heard = self._seconds(state.frames), self.model.delay
        if state.first is None:
            return None
        if not state.is_speech and self._seconds(state.last - state.first) >= rules.shortest:
            state.is_speech = True
            begin = self._seconds(state.first - heard) - rules.padding
            return SpeechEvent("started", max(state.end, begin), now)
        if state.is_speech and self._seconds(state.frames - state.last) >= rules.hang_over:
            state.first, state.is_speech = None, False
            state.end = self._seconds(max(0, state.last - heard)) + rules.padding
            return SpeechEvent("stopped", state.end, now)
        return None

    def _seconds(self, frames: int) -> float:
        return samples_to_seconds(frames * self.model.step, self.model.sample_rate)


class BundleFrames:
    """The model of a bundle, in its thread, as a VoiceDetector takes it."""

    def __init__(self, bundle: Bundle) -> None:
        bundle.task.require("transcribe --vad")
        self._thread: ModelThread = bundle.model
        self.sample_rate = bundle.config.sample_rate
        sizes = self._thread.call(lambda model: model.chunks)
        self.step, self.overlap, self.delay = sizes.step, sizes.window - sizes.step, DELAY
        # The graph of ONNX has one frame, since its exporter unrolls a GRU.
        self._at_once = bundle.model.effective.runtime == "torch"

    def start(self) -> Any:
        """Return the state of a stream before its first sample."""
        return self._thread.call(lambda model: model.start())

    def advance(self, samples: Samples, state: Any) -> tuple[npt.NDArray[np.float32], Any]:
        """Compute U frames: (S,) -> (U,), and the state after them."""
        return self._thread.call(lambda model: self._run(samples, state, model))

    def _run(self, samples: Samples, state: Any, model: Any) -> tuple[npt.NDArray[np.float32], Any]:
        size = len(samples) if self._at_once else self.step + self.overlap
        found = list[npt.NDArray[np.float32]]()
        for first in range(0, len(samples) - self.overlap, size - self.overlap):
            [(log_probs, state)] = model.advance([samples[first : first + size]], [state])
            found.append(np.exp(log_probs[:, 1]))
        return np.concatenate(found), state


SILERO = "silero"  # the extra
CONTEXT = 64  # samples before a frame that it is given, too
FILE = "data/silero_vad_16k_op15.onnx"  # of the package, which imports torch: only this is read

State = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]  # recurrent, and the context


class SileroFrames:
    """A session of its ONNX graph; raises SbkitError without the package."""

    sample_rate, step, overlap, delay = 16_000, 512, 0, 0

    def __init__(self) -> None:
        runtime = require_package("onnxruntime", extra=SILERO)
        found = find_spec("silero_vad") or require_package("silero_vad", extra=SILERO).__spec__
        options = runtime.SessionOptions()
        options.intra_op_num_threads = 1
        file = Path(str(found.origin)).parent / FILE
        self._session = runtime.InferenceSession(file, options)

    def start(self) -> State:
        """Return the state of a stream before its first sample."""
        return np.zeros((2, 1, 128), np.float32), np.zeros(CONTEXT, np.float32)

    def advance(self, samples: Samples, state: State) -> tuple[npt.NDArray[np.float32], State]:
        """Compute U frames: (S,) -> (U,), and the state after them."""
        (kept, context), found = state, list[npt.NDArray[np.float32]]()
        for frame in samples.reshape(-1, self.step).astype(np.float32) / FULL_SCALE:
            x = np.concatenate([context, frame])
            inputs = {"input": x[None], "state": kept, "sr": np.array(self.sample_rate)}
            probability, kept = self._session.run(None, inputs)
            found.append(probability[0])
            context = x[-CONTEXT:]
        return np.concatenate(found), (kept, context)
