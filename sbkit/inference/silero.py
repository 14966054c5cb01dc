"""The detector of the package silero-vad, as a VoiceDetector takes it: frames of 32 ms."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sbkit.audio.io import FULL_SCALE, Samples
from sbkit.base.process import require_package

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
