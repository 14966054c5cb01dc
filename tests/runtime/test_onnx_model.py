"""onnxruntime runs where requested, and imports no torch."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from sbkit.base.errors import SbkitError
from sbkit.bundle.protocols import ChunkSizes
from sbkit.runtime.onnx_model import OnnxModel, OnnxStreamingModel

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def content() -> bytes:
    """Make a model of one product: (B, S), (B,) -> (B, S), (B,)."""
    audio = helper.make_tensor_value_info("audio", TensorProto.FLOAT, ["B", "S"])
    lengths = helper.make_tensor_value_info("audio_lengths", TensorProto.INT64, ["B"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", "S"])
    n = helper.make_tensor_value_info("n", TensorProto.INT64, ["B"])
    weight = onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")
    nodes = [
        helper.make_node("MatMul", ["audio", "w"], ["y"]),
        helper.make_node("Identity", ["audio_lengths"], ["n"]),
    ]
    graph = helper.make_graph(nodes, "g", [audio, lengths], [y, n], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    helper.set_model_props(model, {"min_samples": "4"})
    return bytes(model.SerializeToString())


def test_onnx_model_pads_short_audio() -> None:
    result = OnnxModel(content()).log_probs(np.array([[0.5, -1.0, 0.25]]), np.array([3]))
    assert result.log_probs.tolist() == [[0.5, -1.0, 0.25, 0.0]]
    assert result.lengths.tolist() == [3]


def test_onnx_streaming_model_batches_chunks_with_their_own_states() -> None:
    model = onnx.parser.parse_model(
        """
        <ir_version: 10, opset_import: ["": 18],
            metadata_props: ["step": "2", "window": "3", "shortest": "1"]>
        g (float[B,S] audio, int64[B] audio_lengths, float[B,1] kept)
            => (float[B,S] y, int64[B] n, float[B,1] after) <float[1,1] two = {2}>
        { y = Add(audio, kept)  n = Identity(audio_lengths)  after = MatMul(kept, two) }
        """
    )
    stream = OnnxStreamingModel(model.SerializeToString())
    chunks = [np.array([16384, -32768, 0], np.int16), np.array([8192], np.int16)]
    states = [{"kept": stream.start()["kept"] + number} for number in range(2)]
    (one, one_state), (two, two_state) = stream.advance(chunks, states)
    assert (one.tolist(), two.tolist()) == ([0.5, -1.0, 0.0], [1.25])
    assert stream.advance(chunks[1:], states[1:])[0][0].tolist() == two.tolist()
    assert (one_state["kept"].item(), two_state["kept"].item()) == (0.0, 2.0)
    assert stream.chunks == ChunkSizes(step=2, window=3, shortest=1)


def test_onnx_model_preloads_cuda_and_disables_tf32(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only torch finds the libraries of CUDA's wheels by itself, and this runtime has none."""
    arguments: list[Any] = []

    def refuse(content: bytes, options: object, **more: Any) -> None:
        arguments.extend([*more["providers"], more["enable_fallback"]])
        raise RuntimeError("no GPU")

    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: print("loaded"))
    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    with pytest.raises(SbkitError, match="no GPU"):
        OnnxModel(content(), device="cuda:1")
    assert arguments == [(CUDA, {"device_id": "1", "use_tf32": "0"}), 0]  # errors move it nowhere
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "loaded\n")


class Fusing(onnxruntime.InferenceSession):  # type: ignore[misc]
    """Run a product on the GPU, and a fused convolution on the CPU."""

    def __init__(self, content: bytes, options: object, **more: object) -> None:
        super().__init__(content, options, providers=[CPU])

    def get_provider_graph_assignment_info(self) -> list[object]:
        def on(provider: str, kind: str) -> object:
            return SimpleNamespace(
                ep_name=provider, get_nodes=lambda: [SimpleNamespace(op_type=kind)]
            )

        return [on(CUDA, "MatMul"), on(CPU, "FusedConv")]


def test_onnx_model_refuses_a_fused_node_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "InferenceSession", Fusing)
    with pytest.raises(SbkitError, match=r"all 2 .* but runs 1 \(1 by CPUExecutionProvider\)"):
        OnnxModel(content(), device="cuda")


def test_onnx_model_imports_no_torch() -> None:
    """`tools/runtime.txt` names all that a server has installed."""
    code = (
        "import sys, sbkit; sbkit.Transcriber; import sbkit.runtime.onnx_model;"
        "heavy = {'torch', 'speechbrain', 'datasets', 'hyperpyyaml', 'ruamel', 'jinja2', 'onnx'};"
        "sys.exit(len(heavy & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
