"""Trials of `sbkit doctor`: each does a little work, and returns its result or raises anything."""

from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import soundfile

from sbkit.audio.io import Samples, encode_audio, read_audio
from sbkit.base.errors import SbkitError
from sbkit.base.files import write_bytes_atomically
from sbkit.base.units import SAMPLE_RATE
from sbkit.base.user_folders import make_cache_folder
from sbkit.runtime.onnx_model import OnnxModel

RAMP = np.arange(SAMPLE_RATE, dtype=np.int16)
# z = x @ x of any matrix, in opset 13 and IR version 7, which every supported onnxruntime knows.
# Made from one MatMul node by `helper.make_model` of the package `onnx`, which a server lacks.
ONNX_SQUARE = bytes.fromhex(
    "08073a380a110a01780a017812017a22064d61744d756c1201675a0f0a0178120a0a08080112040a000a00620f"
    "0a017a120a0a08080112040a000a0042040a00100d"
)


def read_with_pyav() -> str:
    """Read a FLAC file as each recording is read."""
    return _compare(read_audio(encode_audio(RAMP, SAMPLE_RATE, "FLAC")))


def read_with_soundfile() -> str:
    """Read a FLAC file with libsndfile."""
    file = BytesIO(encode_audio(RAMP, SAMPLE_RATE, "FLAC"))
    return _compare(soundfile.read(file, dtype="int16")[0])


def write_and_read_cache() -> str:
    """Write a file into the cache, and map it."""
    cache = make_cache_folder()
    with TemporaryDirectory(dir=cache) as folder:
        write_bytes_atomically(file := Path(folder, "ramp"), RAMP.tobytes())
        return f"{_compare(np.memmap(file, np.int16, 'r'))} in {cache}"


def run_graph() -> str:
    """Square a matrix on the CPU."""
    matrix = np.array([[1, 2], [3, 4]], np.float32)
    model = OnnxModel(ONNX_SQUARE)
    if not np.array_equal(square := model.run(matrix)[0], matrix @ matrix):
        raise SbkitError(f"The square of {matrix.tolist()} was computed as {square.tolist()}")
    return f"runs on {model.runs_on}"


def _compare(samples: Samples) -> str:
    if not np.array_equal(samples, RAMP):
        raise SbkitError("The samples that were read differ from those that were written")
    return "reads what was written"


TRIALS = {
    "PyAV": read_with_pyav,
    "soundfile": read_with_soundfile,
    "the cache": write_and_read_cache,
    "onnxruntime": run_graph,
}
