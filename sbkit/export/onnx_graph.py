"""One ONNX graph: made from a traced module, and written in float32 or int8."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from sbkit.base.errors import BundleError
from sbkit.base.imports import require_package
from sbkit.runtime.onnx_model import MIN_ONNXRUNTIME

OPSET = 18  # 17 gives an invalid model

Proto = Any  # a message of the package onnx, which makes its classes at run time


def make_onnx(program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> Proto:
    """Translate a traced graph to ONNX, check it, and remove the names of local folders."""
    onnx = require_package("onnx", extra="export")
    require_package("onnxscript", extra="export")
    names: dict[str, Any] = {"input_names": inputs, "output_names": outputs}
    try:
        onnx_program = torch.onnx.export(
            program, dynamo=True, opset_version=OPSET, verbose=False, **names
        )
        assert onnx_program is not None
        model = onnx_program.model_proto
        _strip(model)
        onnx.checker.check_model(model)
    except Exception as error:  # the exporter and the checker have many exceptions of their own
        raise BundleError(
            f"This model cannot be written as ONNX: the exporter raised {type(error).__name__} "
            f"({str(error)[:300]})."
        ) from error
    return model


def save_onnx(model: Proto, file: Path, metadata: Mapping[str, object]) -> None:
    """Write a model for onnxruntime from MIN_ONNXRUNTIME on, with only this metadata."""
    helper = require_package("onnx", extra="export").helper
    # By ONNX's table of versions (docs/Versioning.md), opset 18 came with IR version 8.
    model.ir_version = helper.find_min_ir_version_for(model.opset_import, ignore_unknown=True)
    model.ClearField("metadata_props")
    facts = {**metadata, "min_onnxruntime": MIN_ONNXRUNTIME}
    helper.set_model_props(model, {name: str(value) for name, value in facts.items()})
    file.write_bytes(model.SerializeToString())


def _save_int8(model: Proto, file: Path, metadata: Mapping[str, object]) -> None:
    """Write the weights of matrix products in int8, each column with its scale.

    Convolutions stay in float32, because onnxruntime is slower with int8 convolutions. The mel
    filters and the operations before them stay in float32, too: 8 bits are too few for a log-mel.
    They do not need float64: what it gains in the spectra is less than what int8 loses elsewhere.
    """
    onnx = require_package("onnx", extra="export")
    quantization: Any = require_package("onnxruntime.quantization", extra="export")
    _to_float32(model)
    quantization.quantize_dynamic(
        model,
        file,
        op_types_to_quantize=["MatMul"],
        nodes_to_exclude=sorted(_before_logarithm(model.graph)),
        per_channel=True,
        weight_type=quantization.QuantType.QInt8,
    )
    save_onnx(onnx.load(file), file, metadata)


WRITERS = {"fp32": save_onnx, "int8": _save_int8}  # called in this order: int8 changes the graph


def _to_float32(model: Proto) -> None:
    """Replace float64 by float32: 1.1 times as fast overall (`Fbank` says what uses float64)."""
    onnx = require_package("onnx", extra="export")
    double, single = onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT
    attributes = [attribute for node in model.graph.node for attribute in node.attribute]
    constants = [attribute.t for attribute in attributes if attribute.HasField("t")]
    for tensor in [*model.graph.initializer, *constants]:
        if tensor.data_type == double:
            values = onnx.numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    for attribute in attributes:
        if attribute.name == "to" and attribute.i == double:  # the type of a Cast
            attribute.i = single


def _before_logarithm(graph: Proto) -> set[str]:
    """Return the names of the nodes that a logarithm depends on: they compute the features."""
    node_of_output = {name: node for node in graph.node for name in node.output}
    pending = [node for node in graph.node if node.op_type == "Log"]
    names: set[str] = set()
    while pending:
        node = pending.pop()
        if node.name not in names:
            names.add(node.name)
            pending += [node_of_output[name] for name in node.input if name in node_of_output]
    return names


def _strip(model: Proto) -> None:
    """Remove the exporter's debugging notes, whose stack traces name local folders."""
    graph = model.graph
    graph.ClearField("value_info")
    protos = [model, graph, *graph.node, *graph.input, *graph.output, *graph.initializer]
    for function in model.functions:
        protos += [function, *function.node]
    for proto in protos:
        proto.ClearField("metadata_props")
        proto.ClearField("doc_string")
