"""Write models for sherpa-onnx, which recognizes speech on servers, phones and in browsers.

A model is written as `fire-red-asr-2-ctc`, one of sherpa-onnx's own model types: whole clips, from
80 log-mel bins. sherpa-onnx computes these itself, with sbkit's settings: no partial windows,
filters up to half the sample rate, the scale of int16. It decodes greedily, and its texts contain
special tokens such as <unk>, which sbkit omits. A streaming model is written for whole clips only.

Legend: B clips, T feature frames, M mel bins, U frames, V vocabulary.
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sbkit.audio.fbank import EPSILON, Fbank
from sbkit.audio.io import FULL_SCALE
from sbkit.audio.lengths import append_silence
from sbkit.audio.segments import TAIL_SECONDS
from sbkit.base.arrays import Array, Counts, Float32s
from sbkit.base.errors import BundleError
from sbkit.base.imports import require_package
from sbkit.base.units import SAMPLE_RATE, SHIFT_MS, shift_samples
from sbkit.export.onnx_graph import make_onnx, save_onnx
from sbkit.export.onnx_recognizer import write_tokens
from sbkit.export.parity import Candidate, Outputs, RunBatch
from sbkit.export.recognizer_texts import best_path_texts
from sbkit.export.trace import EXAMPLE_BATCH, NetworkModule, trace, trained_log_probs
from sbkit.runtime.onnx_model import OnnxModel
from sbkit.runtime.torch_model import TorchModel
from sbkit.tasks.asr.bundle import AsrBundle

MODEL_FILE = "model.onnx"
MODEL_TYPE = "fire-red-asr-2-ctc"
N_MELS = 80  # mel bins of this type
TAIL_FRAMES = round(1000 * TAIL_SECONDS / SHIFT_MS)  # frames of features


def write_sherpa(bundle: AsrBundle[TorchModel], folder: Path) -> Sequence[Candidate]:
    """Write the model and its tokens."""
    recognizer_class = require_package("sherpa_onnx", extra="export").OfflineRecognizer
    features = bundle.model.network.encoder.modules.get("compute_features")
    is_fbank = type(features) is Fbank and features.n_mels == N_MELS
    if not is_fbank or bundle.config.sample_rate != SAMPLE_RATE:
        raise BundleError(
            f"sherpa-onnx computes the features of a model itself: {N_MELS} mel bins at "
            f"{SAMPLE_RATE} Hz. This model takes other features, or waveforms. Export it as onnx "
            "instead, which sbkit and onnxruntime run."
        )
    file = folder / MODEL_FILE
    run, run_trained = _write_graph(bundle, file)
    tokens = write_tokens(bundle, folder)
    recognizer = recognizer_class.from_fire_red_asr_ctc(model=str(file), tokens=str(tokens))
    return [
        Candidate(
            name=MODEL_TYPE,
            files=(MODEL_FILE,),
            run=run,
            run_trained=run_trained,
            texts=partial(_transcribe, recognizer),
            trained_texts=partial(best_path_texts, bundle),
        )
    ]


def _transcribe(recognizer: Any, clips: Sequence[Float32s], outputs: Sequence[Array]) -> list[str]:
    texts = []
    for clip in clips:
        stream = recognizer.create_stream()
        stream.accept_waveform(SAMPLE_RATE, clip)
        recognizer.decode_stream(stream)
        texts.append(str(stream.result.text))
    return texts


class FeatureModel(NetworkModule):
    """Features from another program to log-probabilities: (B, T, M), (B,) -> (B, U, V), (B,).

    The features of digital silence are appended to a clip: no window crosses its end.
    """

    def forward(self, x: Tensor, x_lens: Tensor) -> tuple[Tensor, Tensor]:
        encoder = self.network.encoder
        x, lengths = append_silence(x, x_lens, TAIL_FRAMES, value=math.log(EPSILON))
        features = encoder.features.module.remove_level(x, lengths, x_lens)
        states, frames = encoder.encode_features(*features)
        return self.network.frame_log_probs(states), frames


def _write_graph(bundle: AsrBundle[TorchModel], file: Path) -> list[RunBatch]:
    """Write the graph; return what runs it, and what runs the trained model."""
    frames = 100 * EXAMPLE_BATCH
    lengths = torch.tensor([frames, frames - 20, frames // 2])
    network = bundle.model.network
    model = FeatureModel(network)
    program = trace(model, torch.zeros(EXAMPLE_BATCH, frames, N_MELS), lengths)
    graph = make_onnx(program, ["x", "x_lens"], ["log_probs", "log_probs_lens"])
    metadata = {
        "model_type": MODEL_TYPE,
        "vocab_size": bundle.tokenizer.vocab_size,
        "subsampling_factor": bundle.model.samples_per_frame // shift_samples(SAMPLE_RATE),
        "cmvn_mean": ",".join(["0"] * N_MELS),  # the graph itself normalizes
        "cmvn_inv_stddev": ",".join(["1"] * N_MELS),
    }
    save_onnx(graph, file, metadata)
    runs: list[RunBatch] = [
        OnnxModel(file.read_bytes()).log_probs,
        partial(trained_log_probs, model),
    ]
    return [partial(_feature_log_probs, network, run) for run in runs]


@torch.inference_mode()
def _feature_log_probs(network: Any, run: RunBatch, audio: Float32s, lengths: Counts) -> Outputs:
    scaled = torch.from_numpy(audio) * FULL_SCALE
    fbank = network.encoder.features.module
    features, frames = fbank.log_mels(scaled, torch.from_numpy(lengths))
    return run(features.numpy(), frames.numpy())
