"""The graphs of a task's model as ONNX, compared with it output by output."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from sbkit.base.checksums import listed_checksums
from sbkit.base.messages import printable
from sbkit.bundle.config import WEIGHTS_FILE
from sbkit.export.onnx_format import make_onnx, save_onnx
from sbkit.export.parity import DIFFERENCE, Grid, HeldOut, cases
from sbkit.export.traced import EXAMPLE, TrainedModel, trace
from sbkit.runtime.onnx_model import SETTINGS_JSON, WEIGHTS_SHA256, OnnxModel

Array = npt.NDArray[Any]
OTHER = 1e-3  # of whole numbers: a value on the edge of two is rounded to either


class GraphModule(nn.Module):
    """A method of a task's model as a module."""

    def __init__(self, network: Any, name: str) -> None:
        super().__init__()
        self.parts, self.call = network.model, getattr(network, name)

    def forward(self, *arrays: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call it."""
        return tuple(self.call(*arrays))


@dataclass
class WrittenGraph:
    """A graph as it was written, and how far it is from the trained model.

    difference: the largest, of floats; others, compared: of whole numbers; failure: what it raised.
    """

    name: str
    files: tuple[str, ...]
    run: Callable[..., Sequence[Array]]
    difference: float = 0.0
    others: int = 0
    compared: int = 0
    where: str = ""
    cases: list[str] = field(default_factory=list)
    failure: str = ""

    def compare(self, arguments: Sequence[Array], expected: Sequence[Array], what: str) -> None:
        """Run it on a batch, and add up what differs; shapes that differ are a failure."""
        self.cases.append(what)
        try:
            for one, two in zip(expected, self.run(*arguments), strict=True):
                if one.dtype.kind == "i":
                    self.others += int((one != two).sum())
                    self.compared += one.size
                elif not (worst := float(np.abs(one - two).max(initial=0))) <= self.difference:
                    self.difference, self.where = worst, what
        except Exception as error:  # a runtime has many of its own
            reason = f"{type(error).__name__}: {printable(str(error))[:300]}"
            self.failure = self.failure or f"it must run on {what}, but raised {reason}"

    def report(self) -> dict[str, Any]:
        """Return what was found as plain data."""
        reasons = [self.failure] if self.failure else []
        if not self.difference <= DIFFERENCE:
            reasons.append(f"an output differs by {self.difference:.1e} ({self.where})")
        if self.others > OTHER * self.compared:
            reasons.append(f"{self.others} of {self.compared} whole numbers are others")
        return {
            "written": not reasons,
            "reasons": reasons,
            "limits": {"difference": DIFFERENCE, "other_whole_numbers": OTHER},
            "cases": self.cases,
            "largest_difference": self.difference,
            "other_whole_numbers": self.others,
            "whole_numbers": self.compared,
        }


def write_graphs(
    trained: TrainedModel, folder: Path, grid: Grid, held_out: HeldOut | str
) -> list[WrittenGraph]:
    """Write each graph of a task into the folder of its format, as ONNX, and compare it.

    Raises SbkitError for a bundle that the format does not fit.
    """
    task, model = trained.bundle.task, trained.bundle.model
    graphs = {
        name: each
        for name, each in task.require_export().graphs.items()
        if each.format == folder.name
    }
    rate = trained.bundle.config.sample_rate
    metadata = {
        "sample_rate": rate,
        WEIGHTS_SHA256: listed_checksums(folder.parent).get(WEIGHTS_FILE, ""),
        SETTINGS_JSON: json.dumps(model.settings),
    }
    noise = next(Grid(batches=(EXAMPLE,), seconds=(1.0,)).cases(rate))
    written = []
    for name, graph in graphs.items():
        more, texts = graph.companions(trained.bundle)
        for other, content in texts.items():
            (folder / other).write_text(content, encoding="utf-8")
        example = graph.arguments(model.run, noise.audio, noise.lengths)
        program = _trace(GraphModule(model.network, name).eval(), example)
        file = folder / f"{name}.onnx"
        save_onnx(make_onnx(program, graph.inputs, graph.outputs), file, {**metadata, **more})
        written.append(WrittenGraph(name, (file.name, *texts), OnnxModel(file.read_bytes()).run))
    for case in cases(grid, held_out, rate):
        for each, (name, graph) in zip(written, graphs.items(), strict=True):
            arguments = graph.arguments(model.run, case.audio, case.lengths)
            each.compare(arguments, model.run(name, *arguments), case.what)
    return written


def _trace(module: nn.Module, example: Sequence[Array]) -> ExportedProgram:
    free = tuple(
        {at: Dim.DYNAMIC for at, size in enumerate(each.shape[:2]) if size > 1} for each in example
    )
    return trace(module, *map(torch.from_numpy, example), free=(free,))  # of `*arrays`
