"""Trials of `sbkit doctor`: each does a little work, and returns its result or raises anything."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from sbkit.audio.formats import FORMATS, TONE_HERTZ, encode_tone, loudest_hertz
from sbkit.audio.io import read_audio, write_wav
from sbkit.base.errors import SbkitError
from sbkit.base.units import SAMPLE_RATE

# z = x @ x of any matrix, in opset 13 and IR version 7, which every supported onnxruntime knows.
# `helper.make_model` of the package `onnx`, which a server lacks, made it of one node, MatMul.
ONNX_SQUARE = bytes.fromhex(
    "08073a380a110a01780a017812017a22064d61744d756c1201675a0f0a0178120a0a08080112040a000a00620f"
    "0a017a120a0a08080112040a000a0042040a00100d"
)


def trials() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the subject of each trial, and the trial; optional packages must be installed."""
    for container, codec in FORMATS:
        yield f"{codec} in {container}", partial(read_tone, (container, codec))
    for subject, package, trial in (
        ("cache", "datasets", write_and_read_cache),
        ("tokenizer", "sentencepiece", encode_and_decode),
        ("ONNX graph", "onnxruntime", run_graph),
    ):
        if find_spec(package) is not None:
            yield subject, trial


def read_tone(name: tuple[str, str]) -> str:
    """Read a second of a tone in a container and a codec."""
    samples = read_audio(encode_tone(name))
    seconds, hertz = len(samples) / SAMPLE_RATE, loudest_hertz(samples)
    if not (0.95 < seconds < 1.1 and abs(hertz - TONE_HERTZ) < 2):  # encoders add up to 45 ms
        raise SbkitError(f"1 s of {TONE_HERTZ} Hz was read as {seconds:.3f} s of {hertz:.0f} Hz")
    return "read"


def write_and_read_cache() -> str:
    """Write a row into a temporary folder of the cache, and read it."""
    from datasets import Dataset

    from sbkit.base.content_cache import default_cache
    from sbkit.data.cache import cache_audio
    from sbkit.data.manifest import Clip, Manifest
    from sbkit.data.shard import read_clips

    ramp = np.arange(SAMPLE_RATE, dtype=np.int16)
    (cache := default_cache()).mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=cache) as name, using_cache(name):
        folder = Path(name)
        write_wav(folder / "ramp.wav", ramp, SAMPLE_RATE)
        manifest = Manifest.of([Clip("ramp", folder / "ramp.wav", "")])
        stored = cache_audio(manifest, sample_rate=SAMPLE_RATE, store="pcm", title="cache")
        rows = Dataset(stored.table.append_column("id", [["ramp"]]), fingerprint="ramp")
        if not np.array_equal(next(read_clips(rows, [0])), ramp):
            raise SbkitError("The row has other samples than were written")
    return f"written and read in {cache}"


@contextmanager
def using_cache(folder: str) -> Iterator[None]:
    """Let SBKIT_CACHE name a folder for now."""
    before = os.environ.get("SBKIT_CACHE")
    os.environ["SBKIT_CACHE"] = folder
    try:
        yield
    finally:
        del os.environ["SBKIT_CACHE"]
        if before is not None:
            os.environ["SBKIT_CACHE"] = before


def encode_and_decode() -> str:
    """Train a tokenizer on a sentence, and encode and decode it."""
    from sbkit.text.tokenizer import ensure_tokenizer

    text = "the cat sat on the mat"
    with TemporaryDirectory() as folder:
        file = Path(folder, "tokenizer.model")
        tokenizer = ensure_tokenizer(
            model_file=file, kind="bpe", vocab_size=20, texts=lambda: [text]
        )
    if (decoded := tokenizer.decode(tokenizer.encode(text))) != text:
        raise SbkitError(f"{text!r} was decoded as {decoded!r}")
    return "encodes and decodes"


def run_graph() -> str:
    """Square a matrix on the CPU."""
    from sbkit.runtime.onnx_model import OnnxModel

    matrix = np.array([[1, 2], [3, 4]], np.float32)
    model = OnnxModel(ONNX_SQUARE)
    if not np.array_equal(square := model.run(matrix)[0], matrix @ matrix):
        raise SbkitError(f"The square of {matrix.tolist()} is given as {square.tolist()}")
    return f"runs on {model.effective}"
