"""Every written graph runs in the oldest onnxruntime that is promised, which phones bundle."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from sbkit.base.arrays import Array
from sbkit.export.export import export_run
from sbkit.runtime.onnx_model import MIN_ONNXRUNTIME, NUMPY_TYPES
from sbkit.runtime.runtimes import load_bundle
from tests.export.test_huggingface import run_of
from tests.runtime.bundles import ROOT, SMALL, WITHOUT_DATA

COMPARE = """
import sys, numpy, onnxruntime
for file in sys.argv[1:]:
    saved = numpy.load(file)
    session = onnxruntime.InferenceSession(str(saved["graph"]))
    inputs = {node.name: saved[node.name] for node in session.get_inputs()}
    for index, output in enumerate(session.run(None, inputs)):
        tolerance = 99 if "int8" in str(saved["graph"]) else 1e-3
        numpy.testing.assert_allclose(output, saved[f"output {index}"], atol=tolerance)
    print(onnxruntime.__version__)
"""


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the runtime into a folder of its own."""
    folder = tmp_path_factory.mktemp("oldest")
    packages = (f"onnxruntime=={MIN_ONNXRUNTIME}", "numpy==1.26.4")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", folder, *packages]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        pytest.skip(f"pip cannot install {' and '.join(packages)}: {process.stderr[-200:]}")
    return folder


def inputs(bundle: Path, graph: Path, session: Any) -> Iterator[Sequence[Array]]:
    """Yield inputs of a graph; those of whole clips also below the length of a window."""
    first, *others = session.get_inputs()
    noise = np.random.default_rng(0).normal(size=(2, 16_000)).astype(np.float32) / 10
    loaded = load_bundle(bundle)
    if graph.stem in loaded.task.graphs:
        arguments = loaded.task.graphs[graph.stem].arguments
        yield arguments(loaded.model.run, noise, np.array([16_000, 8_000]))
        return
    state = [np.zeros((2, *x.shape[1:]), NUMPY_TYPES[x.type]) for x in others[1:]]
    window = session.get_modelmeta().custom_metadata_map.get("window")  # of a chunk
    for size in (int(window),) if window else (0, 1, 399, 16_000):
        clips, length = noise[:, :size], size
        if first.name == "x":
            clips, length = np.repeat(noise[:, : size // 160, None], 80, 2), size // 160
        yield [clips, *[np.full(2, length)] * bool(others), *state]


def run_in(oldest: Path, bundle: Path, folder: Path) -> None:
    """Compare the outputs of each graph of a bundle in the oldest and the present runtime."""
    files: list[Path] = []
    for graph in bundle.rglob("*.onnx"):
        session = onnxruntime.InferenceSession(graph)
        for arrays in inputs(bundle, graph, session):
            named = {x.name: array for x, array in zip(session.get_inputs(), arrays, strict=True)}
            outputs = {f"output {i}": x for i, x in enumerate(session.run(None, named))}
            files.append(folder / f"{graph.stem} {len(files)}.npz")
            np.savez(files[-1], graph=str(graph), **named, **outputs)
    command = [sys.executable, "-c", COMPARE, *files]
    environment = {"PYTHONPATH": str(oldest)}
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.stdout.split() == [MIN_ONNXRUNTIME] * len(files) != [], process.stderr[-2000:]


@pytest.mark.slow(60)
def test_oldest_runtime_runs_the_graphs_of_every_task(
    oldest: Path, exported: Path, streaming: Path, task_bundles: Path, tmp_path: Path
) -> None:
    assert MIN_ONNXRUNTIME in (ROOT / "docs/guide/export.md").read_text("utf-8")
    for bundle in (exported, streaming, *task_bundles.iterdir()):
        run_in(oldest, bundle, tmp_path)


@pytest.mark.slow(25)
@pytest.mark.parametrize("model_type", ["wav2vec2", "wav2vec2-bert", "parakeet_encoder", "whisper"])
def test_oldest_runtime_runs_pretrained_encoders(
    oldest: Path, model_type: str, tmp_path: Path
) -> None:
    run = run_of(tmp_path / "run", model_type, **WITHOUT_DATA)
    export_run(run, tmp_path / "bundle", formats=["onnx", "sherpa-onnx"], grid=SMALL)
    run_in(oldest, tmp_path / "bundle", tmp_path)
