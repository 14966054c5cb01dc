"""A recognizer as ONNX: waveform in, log-probabilities of its tokens out."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch.export import ExportedProgram

from sbkit.bundle.bundle import Bundle
from sbkit.export.onnx_chunks import write_chunk_graph
from sbkit.export.onnx_graph import WRITERS, make_onnx
from sbkit.export.onnx_whisper import write_decoder
from sbkit.export.parity import Candidate
from sbkit.export.recognizer_texts import best_path_texts
from sbkit.export.trace import (
    EXAMPLE_BATCH,
    EncodingModel,
    NetworkModule,
    WaveformModel,
    trace,
)
from sbkit.runtime.onnx_model import MODEL_FILES, OnnxModel
from sbkit.runtime.torch_model import TorchModel
from sbkit.tasks.asr.bundle import AsrBundle


def write_recognizer(
    bundle: AsrBundle[TorchModel], folder: Path, metadata: Mapping[str, object]
) -> list[Candidate]:
    """Write ``model.onnx``, and the graphs of a Whisper's decoder or of a streaming model."""
    has_decoder = bundle.decoder_tokenizer is not None
    program = trace_recognizer(bundle, EncodingModel if has_decoder else WaveformModel)
    outputs = ["log_probs", "frame_lengths", *(["states"] if has_decoder else [])]
    graph = make_onnx(program, ["audio", "audio_lengths"], outputs)
    tokens = write_tokens(bundle, folder).name
    metadata = {**metadata, "blank": bundle.blank, "tokens": tokens}
    texts = partial(best_path_texts, bundle)
    candidates: list[Candidate] = []
    for precision, file in MODEL_FILES.items():
        WRITERS[precision](graph, folder / file, metadata)
        candidates.append(
            Candidate(
                name=precision,
                files=(file,),
                is_exact=precision == "fp32",
                run=OnnxModel((folder / file).read_bytes()).log_probs,
                texts=texts,
                trained_texts=texts,
            )
        )
    if has_decoder:
        candidates += write_decoder(bundle, folder, metadata)
    if bundle.model.chunks is not None:
        candidates += write_chunk_graph(bundle.model, folder, metadata, texts)
    return candidates


def trace_recognizer(
    bundle: Bundle[TorchModel], model_class: type[NetworkModule] = WaveformModel
) -> ExportedProgram:
    """Trace a recognizer; raise BundleError for one that does not take any size."""
    rate = bundle.config.sample_rate
    noise = torch.randn(EXAMPLE_BATCH, rate, generator=torch.Generator().manual_seed(0)) / 10
    lengths = torch.tensor([rate, rate * 3 // 4, rate // 2])
    return trace(model_class(bundle.model.network).eval(), noise, lengths)


def write_tokens(bundle: AsrBundle[TorchModel], folder: Path) -> Path:
    """Write the names of a recognizer's tokens, as sherpa-onnx reads them, and return the file."""
    file = folder / "tokens.txt"
    names = dict(enumerate(bundle.tokenizer.pieces())) | {bundle.blank: "<blk>"}
    file.write_text("".join(f"{name} {id}\n" for id, name in names.items()), encoding="utf-8")
    return file
