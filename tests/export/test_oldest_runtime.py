"""Every written graph runs in the oldest onnxruntime that is promised, which phones bundle."""

import subprocess
import sys
from pathlib import Path

import pytest

from sbkit.export.export import export_run
from sbkit.runtime.onnx_model import MIN_ONNXRUNTIME
from tests.export.test_huggingface import run_of
from tests.runtime.bundles import ROOT, WITHOUT_DATA

RUN = """
import sys, numpy, onnxruntime
for file in sys.argv[1:]:
    session = onnxruntime.InferenceSession(file)
    for size in (0, 1, 399, 2000) if "/model." in file else (2000,):
        inputs = {}
        for x in session.get_inputs():
            shape = [s if isinstance(s, int) else (2, size)[axis] for axis, s in enumerate(x.shape)]
            dtype = "int64" if "int64" in x.type else "float32"
            inputs[x.name] = numpy.full(shape, size * x.name.endswith(("lengths", "lens")), dtype)
        assert session.run(None, inputs)
    print(onnxruntime.__version__)
"""


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("oldest")
    pip = f"-m pip install --no-deps onnxruntime=={MIN_ONNXRUNTIME} numpy==1.26.4 --target {folder}"
    process = subprocess.run([sys.executable, *pip.split()], capture_output=True, text=True)
    if process.returncode:
        pytest.skip(f"The runtime cannot be installed: {process.stderr[-200:]}")
    return folder


def run_graphs(oldest: Path, *bundles: Path) -> None:
    graphs = [graph for bundle in bundles for graph in bundle.rglob("*.onnx")]
    command, environment = [sys.executable, "-c", RUN, *graphs], {"PYTHONPATH": str(oldest)}
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.stdout.split() == [MIN_ONNXRUNTIME] * len(graphs) != [], process.stderr[-2000:]


@pytest.mark.slow(60)
def test_oldest_runtime_runs_the_graphs_of_every_task(
    oldest: Path, exported: Path, streaming: Path, task_bundles: Path
) -> None:
    assert MIN_ONNXRUNTIME in (ROOT / "docs/guide/export.md").read_text("utf-8")
    run_graphs(oldest, exported, streaming, task_bundles)


@pytest.mark.slow(25)
@pytest.mark.parametrize("kind", ["wav2vec2", "whisper"])
def test_oldest_runtime_runs_pretrained_encoders(oldest: Path, kind: str, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", kind, **WITHOUT_DATA)
    export_run(run, tmp_path / "bundle", formats=["onnx", "sherpa-onnx"])
    run_graphs(oldest, tmp_path / "bundle")
