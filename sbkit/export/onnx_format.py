"""ONNX: of a recognizer, of a streaming model's chunks, and of a task's graphs.

Legend: B utterances, S samples.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from sbkit.base.arrays import Array, Counts, Float32s
from sbkit.base.checksums import read_checksums
from sbkit.bundle.bundle import Bundle
from sbkit.bundle.config import WEIGHTS_FILE
from sbkit.bundle.task import Graph
from sbkit.export.onnx_chunks import write_chunk_graph
from sbkit.export.onnx_graph import make_onnx, save_onnx
from sbkit.export.onnx_recognizer import write_recognizer
from sbkit.export.parity import Candidate, noise_case
from sbkit.export.trace import EXAMPLE_BATCH, NetworkModule, as_tuple, trace
from sbkit.runtime.onnx_model import SETTINGS_JSON, WEIGHTS_SHA256, OnnxModel
from sbkit.runtime.torch_model import TorchModel
from sbkit.tasks.asr.bundle import as_recognizer


def write_onnx(bundle: Bundle[TorchModel], folder: Path) -> Sequence[Candidate]:
    """Write a recognizer's models, or a file for each of a task's graphs.

    A voice activity detector has only a chunk graph, for one frame: the exporter unrolls its GRU.
    """
    model = bundle.model
    metadata: dict[str, object] = {
        "sample_rate": bundle.config.sample_rate,
        WEIGHTS_SHA256: read_checksums(folder.parent).get(WEIGHTS_FILE, ""),
    }
    if bundle.task.graphs:
        return [*_write_graphs(bundle, folder, metadata)]
    metadata["samples_per_frame"] = model.samples_per_frame
    if bundle.labels is not None:
        return write_recognizer(as_recognizer(bundle), folder, metadata)
    return [*write_chunk_graph(model, folder, metadata, None)]


class MethodModule(NetworkModule):
    """A method of a task's model as a module."""

    def __init__(self, network: Any, name: str) -> None:
        super().__init__(network)
        self.method = getattr(network, name)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return as_tuple(self.method(*inputs))


def trace_graphs(bundle: Bundle[TorchModel]) -> Iterator[tuple[str, ExportedProgram]]:
    """Trace each graph of a task; raise BundleError for one that does not take any size."""
    model = bundle.model
    case = noise_case(EXAMPLE_BATCH, 1.0, bundle.config.sample_rate)
    for name, graph in bundle.task.graphs.items():
        example = graph.arguments(model.run, case.audio, case.lengths)
        dynamic = tuple(  # the first two dimensions, except where they have size 1
            {dim: Dim.DYNAMIC for dim, size in enumerate(array.shape[:2]) if size > 1}
            for array in example
        )
        program = trace(
            MethodModule(model.network, name).eval(),
            *map(torch.from_numpy, example),
            dynamic_shapes=(dynamic,),  # one entry for `*inputs`
        )
        yield name, program


def _write_graphs(
    bundle: Bundle[TorchModel], folder: Path, metadata: Mapping[str, object]
) -> Iterator[Candidate]:
    model = bundle.model
    metadata = {**metadata, SETTINGS_JSON: json.dumps(model.settings)}
    for name, program in trace_graphs(bundle):
        graph = bundle.task.graphs[name]
        file = folder / f"{name}.onnx"
        onnx_model = make_onnx(program, graph.inputs, graph.outputs)
        save_onnx(onnx_model, file, metadata)
        written = OnnxModel(file.read_bytes())
        yield Candidate(
            name=name,
            files=(file.name,),
            run=partial(_run_graph, graph, model, written.run),
            run_trained=partial(_run_graph, graph, model, partial(model.run, name)),
        )


def _run_graph(
    graph: Graph,
    model: TorchModel,
    run: Callable[..., Sequence[Array]],
    audio: Float32s,
    lengths: Counts,
) -> Sequence[Array]:
    return run(*graph.arguments(model.run, audio, lengths))
