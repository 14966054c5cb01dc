"""Hostile ONNX models of a bundle."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from sbkit.checkpoint.integrity import write_checksums
from sbkit.text.tokenizer import Tokenizer
from tests.attacks.bundles import KINDS
from tests.attacks.case import Case, Place
from tests.attacks.mutate import mutate_bytes

STEP = 640  # samples of a frame
METADATA = {"sample_rate": 16_000, "min_samples": STEP, "samples_per_frame": STEP, "blank": 0}
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def all_onnx() -> Iterator[Case]:
    """List every hostile ONNX model."""
    for name, change in MODELS.items():
        yield Case("onnx", name, partial(_transcribe, change), harmless=name in HARMLESS)
    for seed in range(40):
        yield Case("onnx", f"mutant {seed}", partial(_mutant, seed), harmless=True)
    for name, kind in KINDS.items():
        yield Case("onnx", f"file {name}", partial(_with_kind, kind))


def _model(size: int) -> onnx.ModelProto:
    """Make a model of one convolution: (B, S), (B,) -> (B, U, V), (B,)."""
    audio = helper.make_tensor_value_info("audio", FLOAT, ["B", "S"])
    lengths = helper.make_tensor_value_info("audio_lengths", INT64, ["B"])
    out = helper.make_tensor_value_info("log_probs", FLOAT, ["B", "U", "V"])
    frames = helper.make_tensor_value_info("frame_lengths", INT64, ["B"])
    weight = np.random.default_rng(0).normal(size=(size, 1, STEP)).astype(np.float32)
    constants = [
        numpy_helper.from_array(weight, "w"),
        numpy_helper.from_array(np.array([1]), "one"),
        numpy_helper.from_array(np.array(STEP), "step"),
    ]
    nodes = [
        helper.make_node("Unsqueeze", ["audio", "one"], ["wide"]),
        helper.make_node("Conv", ["wide", "w"], ["scores"], strides=[STEP]),
        helper.make_node("Transpose", ["scores"], ["turned"], perm=[0, 2, 1]),
        helper.make_node("LogSoftmax", ["turned"], ["log_probs"], axis=-1),
        helper.make_node("Div", ["audio_lengths", "step"], ["frame_lengths"]),
    ]
    graph = helper.make_graph(nodes, "g", [audio, lengths], [out, frames], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    _describe(model)
    return model


def _describe(model: onnx.ModelProto, **changes: object) -> None:
    model.ClearField("metadata_props")
    helper.set_model_props(
        model, {name: str(value) for name, value in {**METADATA, **changes}.items()}
    )


def _prepare(place: Place) -> tuple[Path, onnx.ModelProto]:
    folder = place.bundle / "onnx"
    folder.mkdir()
    size = Tokenizer(model_file=place.bundle / "tokenizer.model").vocab_size
    return folder / "model.onnx", _model(size)


def _command(place: Place) -> list[str]:
    return [*place.transcribe(), "--runtime", "onnx", "--format", "json"]


def _transcribe(change: Callable[[onnx.ModelProto], Any], place: Place) -> list[str]:
    file, model = _prepare(place)
    change(model)
    file.write_bytes(model.SerializeToString())
    write_checksums(file.parent)
    return _command(place)


def _mutant(seed: int, place: Place) -> list[str]:
    file, model = _prepare(place)
    file.write_bytes(mutate_bytes(model.SerializeToString(), seed))
    write_checksums(file.parent)
    return _command(place)


def _with_kind(kind: Callable[[Path], None], place: Place) -> list[str]:
    file, model = _prepare(place)
    file.write_bytes(model.SerializeToString())
    write_checksums(file.parent)
    kind(file)
    return _command(place)


def _say(**changes: object) -> Callable[[onnx.ModelProto], None]:
    return lambda model: _describe(model, **changes)


def _weights(value: float) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        weight = model.graph.initializer[0]
        filled = np.full(list(weight.dims), value, np.float32)
        weight.CopyFrom(numpy_helper.from_array(filled, "w"))

    return change


def _last(kind: str, *constants: tuple[str, Any], **attributes: Any) -> Callable[[Any], None]:
    """Let another node give the log-probabilities."""

    def change(model: onnx.ModelProto) -> None:
        model.graph.node[3].output[0] = "before"
        names = [name for name, _ in constants]
        for name, value in constants:
            model.graph.initializer.append(numpy_helper.from_array(np.array(value), name))
        node = helper.make_node(kind, ["before", *names], ["log_probs"], **attributes)
        model.graph.node.append(node)

    return change


def _frames(kind: str, name: str, value: Any) -> Callable[[onnx.ModelProto], None]:
    """Let another node give the numbers of frames."""

    def change(model: onnx.ModelProto) -> None:
        model.graph.node[4].output[0] = "counts"
        model.graph.initializer.append(numpy_helper.from_array(np.array(value), name))
        model.graph.node.append(helper.make_node(kind, ["counts", name], ["frame_lengths"]))

    return change


def _more(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("more", FLOAT, ["B"]))


def _fewer(model: onnx.ModelProto) -> None:
    del model.graph.output[1:]


def _fewer_inputs(model: onnx.ModelProto) -> None:
    del model.graph.input[1:]
    model.graph.initializer.append(numpy_helper.from_array(np.array([8_000]), "audio_lengths"))


def _outside(path: str) -> Callable[[onnx.ModelProto], None]:
    """Let the weights lie in another file."""

    def change(model: onnx.ModelProto) -> None:
        weight = model.graph.initializer[0]
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
        for key, value in (("location", path), ("offset", "0")):
            entry = weight.external_data.add()
            entry.key, entry.value = key, value

    return change


def _loop(model: onnx.ModelProto) -> None:
    """Let a loop go on for 2**62 rounds."""
    done = helper.make_tensor_value_info("go", TensorProto.BOOL, [])
    count = helper.make_tensor_value_info("i", INT64, [])
    state = helper.make_tensor_value_info("x", FLOAT, None)
    same = helper.make_tensor_value_info("go_on", TensorProto.BOOL, [])
    after = helper.make_tensor_value_info("y", FLOAT, None)
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_on"]), helper.make_node("Neg", ["x"], ["y"])],
        "body", [count, done, state], [same, after],
    )  # fmt: skip
    _last("Loop")(model)
    node = model.graph.node[-1]
    del node.input[:]
    node.input.extend(["rounds", "yes", "before"])
    node.attribute.append(helper.make_attribute("body", body))
    model.graph.initializer.append(numpy_helper.from_array(np.array(2**62), "rounds"))
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))


def _foreign(model: onnx.ModelProto) -> None:
    model.graph.node[3].domain = "ai.canary"
    model.opset_import.append(helper.make_opsetid("ai.canary", 1))


MODELS: dict[str, Callable[[onnx.ModelProto], Any]] = {
    "as it is": lambda model: None,
    **{
        f"{name} {value!r:.20}": _say(**{name: value})
        for name in ("min_samples", "samples_per_frame", "sample_rate", "blank")
        for value in ("", "x", "-1", "0", "1e9", "9" * 30, f"{1:09d}{'0' * 12}", "9" * 5000,
                      "\u0663", f"{10**12}")
    },
    "weights NaN": _weights(float("nan")),
    "weights infinite": _weights(float("inf")),
    "weights of 1e38": _weights(1e38),
    "another vocabulary": _last("Concat", ("same", np.zeros((1, 12, 1), np.float32)), axis=-1),
    "probabilities above one": _last("Add", ("five", np.float32(5))),
    "other numbers": _last("Cast", to=TensorProto.DOUBLE),
    "whole numbers": _last("Cast", to=INT64),
    "texts": _last("Cast", to=TensorProto.STRING),
    "one axis": _last("Reshape", ("all", [-1])),
    "four axes": _last("Unsqueeze", ("axis", [0])),
    "values without end": _last("Expand", ("large", [2**20, 1, 2**12, 1])),
    "a loop without end": _loop,
    "more frames than there are": _frames("Mul", "many", 1000),
    "frames below nothing": _frames("Mul", "less", -1),
    "no frames": _frames("Mul", "none", 0),
    "frames of another type": lambda model: setattr(model.graph.node[4], "op_type", "Equal"),
    "more inputs": _more,
    "fewer inputs": _fewer_inputs,
    "fewer outputs": _fewer,
    "weights in /etc/passwd": _outside("/etc/passwd"),
    "weights in a folder above": _outside("../../mine/kept.txt"),
    "weights in /dev/zero": _outside("/dev/zero"),
    "a node of another's": _foreign,
    "a node that is none": lambda model: setattr(model.graph.node[3], "op_type", "\x1b[2J"),
    "no product": lambda model: model.graph.ClearField("node"),
}  # fmt: skip
HARMLESS = {"as it is", "no frames", "min_samples '0'", "weights of 1e38",
            *(name for name in MODELS if name.startswith(("sample_rate", "blank")))}  # fmt: skip
