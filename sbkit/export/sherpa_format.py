"""Write models for sherpa-onnx, which recognizes speech on servers, phones and in browsers.

A model is written as one of sherpa-onnx's own model types, which it knows how to run:

fire-red-asr-2-ctc   whole clips, from 80 log-mel bins
omnilingual-asr-ctc  whole clips, from waveforms, for a pretrained encoder

sherpa-onnx computes the features itself, with settings of the model type. Those of
fire-red-asr-2-ctc are sbkit's: no partial windows, filters up to half the sample rate, the scale of
int16. It decodes greedily, and its texts contain special tokens such as <unk>, which sbkit omits. A
streaming model is written for whole clips only.

Legend: B clips, S samples, T feature frames, M mel bins, U frames, V vocabulary.
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sbkit.audio.fbank import EPSILON, Fbank
from sbkit.audio.io import FULL_SCALE
from sbkit.audio.lengths import append_silence, length_mask
from sbkit.audio.segments import TAIL_SECONDS
from sbkit.base.arrays import Counts, Float32s
from sbkit.base.errors import BundleError
from sbkit.base.imports import require_package
from sbkit.base.units import SAMPLE_RATE, SHIFT_MS, shift_samples
from sbkit.export.onnx_format import make_onnx, save_onnx, write_tokens
from sbkit.export.parity import Candidate, RunBatch, join
from sbkit.export.trace import EXAMPLE_BATCH, NetworkModule, trace, trained_log_probs
from sbkit.models.pretrained.features import VARIANCE_EPS as MODEL_EPS
from sbkit.models.pretrained.features import NormalizedAudio
from sbkit.runtime.onnx_model import BatchLogProbs, OnnxModel
from sbkit.runtime.torch_model import TorchBundle

MODEL_FILE = "model.onnx"
FIRE_RED = "fire-red-asr-2-ctc"
OMNILINGUAL = "omnilingual-asr-ctc"
N_MELS = 80  # of FIRE_RED
TAIL_FRAMES = round(1000 * TAIL_SECONDS / SHIFT_MS)  # of features
SHERPA_EPS = 1e-5  # what sherpa-onnx adds to the variance of a clip; the encoder adds MODEL_EPS


def write_sherpa(bundle: TorchBundle, folder: Path) -> Sequence[Candidate]:
    """Write the model and its tokens."""
    recognizers = require_package("sherpa_onnx", extra="export").OfflineRecognizer
    file = folder / MODEL_FILE
    features = bundle.model.network.encoder.modules.get("compute_features")
    body = getattr(features, "body", None)
    if type(features) is Fbank:
        model_type, write = FIRE_RED, _write_fire_red
        load = recognizers.from_fire_red_asr_ctc
        is_supported = features.n_mels == N_MELS
    else:
        model_type, write = OMNILINGUAL, _write_omnilingual
        load = recognizers.from_omnilingual_asr_ctc
        is_supported = isinstance(body, NormalizedAudio) and body.do_normalize
    if not is_supported or bundle.config.sample_rate != SAMPLE_RATE:
        raise BundleError(
            f"sherpa-onnx computes the features of a model itself, at {SAMPLE_RATE} Hz: those of "
            f"an Fbank with {N_MELS} mel bins, or a normalized waveform. This model has others."
        )
    runs = write(bundle, file)
    recognizer = load(model=str(file), tokens=str(write_tokens(bundle, folder)))
    transcribe = partial(_transcribe, recognizer)
    return [Candidate(name=model_type, files=(MODEL_FILE,), transcribe=transcribe, **runs)]


def _transcribe(recognizer: Any, clips: Sequence[Float32s]) -> list[str]:
    texts = []
    for clip in clips:
        stream = recognizer.create_stream()
        stream.accept_waveform(SAMPLE_RATE, clip)
        recognizer.decode_stream(stream)
        texts.append(str(stream.result.text))
    return texts


# Models of log-mel features: FIRE_RED


class FeatureModel(NetworkModule):
    """Features from another program to log-probabilities: (B, T, M), (B,) -> (B, U, V), (B,).

    The features of digital silence follow a clip: there are no windows across its end.
    """

    def forward(self, x: Tensor, x_lens: Tensor) -> tuple[Tensor, Tensor]:
        encoder = self.network.encoder
        x, lengths = append_silence(x, x_lens, TAIL_FRAMES, value=math.log(EPSILON))
        features = encoder.features.module.remove_level(x, lengths, x_lens)
        states, frames = encoder.encode_features(*features)
        return self.network.ctc_log_probs(states), frames


def _write_fire_red(bundle: TorchBundle, file: Path) -> dict[str, Any]:
    frames = 100 * EXAMPLE_BATCH
    lengths = torch.tensor([frames, frames - 20, frames // 2])
    network = bundle.model.network
    model = FeatureModel(network)
    program = trace(model, torch.zeros(EXAMPLE_BATCH, frames, N_MELS), lengths)
    graph = make_onnx(program, ["x", "x_lens"], ["log_probs", "log_probs_lens"])
    metadata = {
        "model_type": FIRE_RED,
        "vocab_size": bundle.tokenizer.vocab_size,
        "subsampling_factor": bundle.model.samples_per_frame // shift_samples(SAMPLE_RATE),
        "cmvn_mean": ",".join(["0"] * N_MELS),  # the graph itself normalizes
        "cmvn_inv_stddev": ",".join(["1"] * N_MELS),
    }
    save_onnx(graph, file, metadata)
    runs: dict[str, RunBatch] = {
        "log_probs": OnnxModel(file.read_bytes()).log_probs,
        "trained": partial(trained_log_probs, model),
    }
    return {name: partial(_feature_log_probs, network, run) for name, run in runs.items()}


@torch.inference_mode()
def _feature_log_probs(
    network: Any, run: RunBatch, audio: Float32s, lengths: Counts
) -> BatchLogProbs:
    scaled = torch.from_numpy(audio) * FULL_SCALE
    fbank = network.encoder.features.module
    features, frames = fbank.log_mels(scaled, torch.from_numpy(lengths))
    return run(features.numpy(), frames.numpy())


# Models of waveforms: OMNILINGUAL. sherpa-onnx passes whole clips, one by one, without lengths. It
# subtracts the mean of each clip, and divides by the root of its variance plus SHERPA_EPS
# (`offline-omnilingual-asr-ctc-model.cc`). The encoder was trained with MODEL_EPS in its place, so
# the graph first rescales the audio.


class SherpaNormalizedModel(NetworkModule):
    """A recognizer of clips that sherpa-onnx has normalized: (B, S) -> (B, U, V)."""

    def forward(self, audio: Tensor) -> Tensor:
        # If the variance of a clip was v, sherpa-onnx has made it v / (v + SHERPA_EPS).
        variance = audio.double().var(1, correction=0, keepdim=True)
        ratio = MODEL_EPS / SHERPA_EPS
        audio = audio * (variance + ratio * (1 - variance)).rsqrt().float()
        lengths = torch.full_like(variance[:, 0], audio.shape[1], dtype=torch.int64)
        audio, lengths = append_silence(audio, lengths, self.network.tail_samples)
        states, frames = self.network.encoder.encode_features(audio.unsqueeze(-1), lengths)
        log_probs: Tensor = self.network.ctc_log_probs(states)
        # All zeros, of which the first is the largest, are the blank.
        return log_probs * length_mask(frames, log_probs.shape[1], audio.device).unsqueeze(-1)


def _write_omnilingual(bundle: TorchBundle, file: Path) -> dict[str, Any]:
    example = torch.randn(EXAMPLE_BATCH, SAMPLE_RATE, generator=torch.Generator().manual_seed(0))
    program = trace(SherpaNormalizedModel(bundle.model.network).eval(), example)
    save_onnx(make_onnx(program, ["audio"], ["log_probs"]), file, {"model_type": OMNILINGUAL})
    session = require_package("onnxruntime", extra="export").InferenceSession(file)
    return {"log_probs": partial(_waveform_log_probs, session)}


def _waveform_log_probs(session: Any, audio: Float32s, lengths: Counts) -> BatchLogProbs:
    """Normalize clips as sherpa-onnx does, and run the graph on one after the other."""
    outputs = []
    for samples, length in zip(audio, lengths, strict=True):
        clip = samples[:length].astype(np.float64)
        clip = (clip - clip.mean()) / np.sqrt(clip.var() + SHERPA_EPS)
        (output,) = session.run(None, {"audio": clip[None].astype(np.float32)})
        outputs.append(output[0])
    return join(outputs)
