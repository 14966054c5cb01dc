"""Run the ONNX model of a bundle without torch: waveforms in, log-probabilities out.

Legend: B utterances, S samples, U frames, V vocabulary.

What is asked is what runs: which provider each node went to is read back from the session, because
onnxruntime falls back to the CPU with no more than a warning, or none.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from sbkit.audio.io import FULL_SCALE
from sbkit.base.errors import SbkitError
from sbkit.base.optional import require_package
from sbkit.base.printable import printable
from sbkit.base.regular import read_regular
from sbkit.checkpoint.integrity import CHECKSUMS, refuse_changed

FOLDER = "onnx"  # of a bundle
FILES = {"fp32": "model.onnx", "int8": "model.int8.onnx"}
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
HEAVY = ("MatMul", "Gemm", "Conv", "Attention")  # in names, fused ones too: nearly all arithmetic
LOOPS = ("Loop", "Scan")
LARGEST = 1 << 31  # bytes of a protobuf
LARGEST_SUMS = 1 << 16  # bytes
LONGEST_NUMBER = 9  # digits
MOST_SAMPLES = 1 << 20  # from one frame to the next, and that a model must have
RECORD = "session.record_ep_graph_assignment_info"

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int64]


class LogProbs(NamedTuple):
    """log_probs (B, U, V) in float32; lengths (B,) in frames, past which they mean nothing."""

    log_probs: Floats
    lengths: Counts


class OnnxModel:
    """A session, and where its nodes run.

    Attributes:
        placement: nodes by the provider that they were given to.
        metadata: what the file says of itself: sample_rate, min_samples, blank.
    """

    def __init__(self, content: bytes, *, provider: str = "cpu", threads: int = 0) -> None:
        """Make a session of a file's bytes; ``threads`` 0 are those that onnxruntime chooses.

        Raises SbkitError where onnxruntime or the provider is not there, or does not run the model.
        """
        runtime = require_package("onnxruntime", extra="export")
        asked = _require_provider(provider, runtime.get_available_providers())
        options = runtime.SessionOptions()
        options.add_session_config_entry(RECORD, "1")
        options.intra_op_num_threads = threads
        options.log_severity_level = 4  # errors are raised, and printed they quote names of nodes
        try:
            self._session = runtime.InferenceSession(
                content, options, providers=[asked], enable_fallback=0
            )
        except Exception as error:  # onnxruntime has an exception for each of its error codes
            raise SbkitError(
                "An ONNX model must be one that onnxruntime loads, but it raised "
                f"{type(error).__name__} ({printable(str(error))[:200]}). Export it again."
            ) from error
        nodes = _placed_nodes(self._session)
        self.placement: Mapping[str, int] = Counter(name for name, _ in nodes)
        _refuse_loops(nodes)
        _refuse_elsewhere(asked, nodes)
        self._providers = _providers_of(self._session)
        self.metadata = dict(self._session.get_modelmeta().custom_metadata_map)
        needed = {"min_samples": "0", **self.metadata}
        self._min_samples = read_count(needed, "min_samples", least=0)

    @classmethod
    def load(
        cls, bundle: Path, *, provider: str = "cpu", precision: str = "fp32", threads: int = 0
    ) -> Self:
        """Load ``onnx/`` of a bundle; what was hashed is what is parsed.

        Raises SbkitError when it is missing, damaged, or does not run on the provider.
        """
        folder = bundle / FOLDER
        if precision not in FILES:
            raise SbkitError(
                f"The precision of an ONNX model must be fp32 or int8, but is {precision!r}."
                " Choose one of them."
            )
        name = FILES[precision]
        if not (folder / name).exists():
            raise SbkitError(
                f"A bundle must hold {FOLDER}/{name} to be run by onnxruntime, but {bundle} does "
                "not. Export it: sbkit export RUN --out DIR --formats onnx"
            )
        content = read_regular(folder / name, largest=LARGEST, what="An ONNX model")
        sums = read_regular(folder / CHECKSUMS, largest=LARGEST_SUMS, what="A list of checksums")
        refuse_changed({name: content}, sums, of=folder)
        return cls(content, provider=provider, threads=threads)

    def log_probs(self, audio: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> LogProbs:
        """Compute log-probabilities: (B, S), (B,) -> (B, U, V), (B,).

        ``audio`` is int16, or floating point between -1 and 1; zero past each length.
        """
        scale = FULL_SCALE if audio.dtype == np.int16 else 1
        missing = self._min_samples - audio.shape[1]
        padded = np.pad(audio, ((0, 0), (0, missing))) if missing > 0 else audio
        inputs = (padded.astype(np.float32) / np.float32(scale), lengths.astype(np.int64))
        names = (each.name for each in self._session.get_inputs())
        found = self._session.run(None, dict(zip(names, inputs, strict=True)))
        if (now := _providers_of(self._session)) != self._providers:  # an error may move it
            raise SbkitError(
                f"An ONNX model must run where it was loaded ({self._providers[0]}), but over an "
                f"error onnxruntime has moved it to {now[0]}. Check the "
                "driver and the memory of the GPU, or choose the provider cpu."
            )
        return LogProbs(found[0], found[1])


def _providers_of(session: Any) -> list[str]:
    return list(getattr(session, "get_providers", list)())


def _placed_nodes(session: Any) -> list[tuple[str, str]]:
    """Return the provider and the kind of each node of a session.

    Raises SbkitError where this onnxruntime does not tell: 1.23 did not, 1.24 does.
    """
    if not hasattr(session, "get_provider_graph_assignment_info"):
        raise SbkitError(
            "onnxruntime must tell where each node of a model runs, but this one is too old for "
            "that. Install a newer one: pip install 'onnxruntime>=1.24'"
        )
    subgraphs = session.get_provider_graph_assignment_info()
    return [(each.ep_name, node.op_type) for each in subgraphs for node in each.get_nodes()]


def read_count(metadata: Mapping[str, str], name: str, *, least: int) -> int:
    """Read a number of samples from the metadata of a model; raises SbkitError where it is none."""
    text = metadata.get(name, "")
    is_number = text.isascii() and text.isdecimal() and len(text) <= LONGEST_NUMBER
    if not is_number or not least <= int(text) <= MOST_SAMPLES:
        raise SbkitError(
            f"`{name}` of an ONNX model must be a number from {least} to {MOST_SAMPLES}, but is "
            f"{text[:60]!r}. Export it again."
        )
    return int(text)


def _require_provider(name: str, available: list[str]) -> str:
    asked = PROVIDERS.get(name, name)
    if asked not in available:
        here = [short for short, long in PROVIDERS.items() if long in available]
        raise SbkitError(
            f"The provider must be one that this onnxruntime has ({', '.join(here)}), but is "
            f"{printable(name)}. Choose one of them; cuda needs the package onnxruntime-gpu in "
            "place of onnxruntime."
        )
    return asked


def _refuse_loops(nodes: list[tuple[str, str]]) -> None:
    """Refuse what might never end; the encoders that are exported have none."""
    if any(kind in LOOPS for _, kind in nodes):
        raise SbkitError(
            "An ONNX model must be without loops, which may have no end, but has one. Export it "
            "again."
        )


def _refuse_elsewhere(asked: str, nodes: list[tuple[str, str]]) -> None:
    """Refuse a session whose arithmetic runs on another provider than the one asked for."""
    heavy = [name for name, kind in nodes if any(part in kind for part in HEAVY)]
    elsewhere = Counter(name for name in heavy if name != asked)
    if elsewhere or not heavy:
        where = ", ".join(f"{count} by {name}" for name, count in elsewhere.items())
        raise SbkitError(
            f"{asked} must run the model's matrix products and convolutions, but of {len(heavy)} "
            f"it has {len(heavy) - elsewhere.total()} ({where or 'nothing was placed'}). Check the "
            "driver and the CUDA libraries, or choose the provider cpu."
        )
