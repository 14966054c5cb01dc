"""The folder that sherpa-onnx's offline CTC recognizers load, on servers, phones and in browsers.

sherpa-onnx computes features itself, by settings that follow from the model type. Those of
`fire-red-asr-2-ctc` are sbkit's: whole windows, filters up to half the sample rate, the scale of
int16. A pretrained encoder of waveforms becomes an `omnilingual-asr-ctc`. Where the bundle's
decoder is a graph, `HLG.fst` is written, too. A special token (<unk>), which sbkit leaves out
of a text, is written by its name.

Encoders of waveforms for sherpa-onnx, in the form of its `omnilingual` models.

Legend: B clips, S samples, U frames, V vocabulary.

sherpa-onnx gives such a model whole clips, one by one, without lengths. It subtracts the mean of
each and divides by the root of its variance and 1e-5 (`offline-omnilingual-asr-ctc-model.cc`),
where the encoder was trained with 1e-7: the graph turns the one into the other.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sbkit.audio.fbank import Fbank
from sbkit.audio.io import FULL_SCALE
from sbkit.base.arrays import Counts, Float32s
from sbkit.base.errors import SbkitError
from sbkit.base.imports import require_package
from sbkit.base.units import SAMPLE_RATE, shift_samples
from sbkit.decoding.decoding_graph import MAX_ACTIVE_STATES
from sbkit.export.onnx_format import make_onnx, save_onnx
from sbkit.export.parity import Candidate, Run
from sbkit.export.sherpa_online import write_online
from sbkit.export.traced import EXAMPLE, TrainedModel, WaveformModel, trace
from sbkit.models.pretrained.features import LEAST_VARIANCE, NormalizedAudio
from sbkit.runtime.onnx_model import BatchLogProbs, OnnxModel
from sbkit.runtime.torch_model import TorchBundle
from sbkit.text.tokenizer import Tokenizer

TOKENS, GRAPH = "tokens.txt", "HLG.fst"
BLANK = "<blk>"  # the name by which it is looked for
N_MELS = 80  # features of the model type
MODEL, FIRE_RED = "model.onnx", "fire-red-asr-2-ctc"


class FeatureModel(WaveformModel):
    """Features from another program to log-probabilities: (B, T, M), (B,) -> (B, U, V), (B,)."""

    def forward(self, x: Tensor, x_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Score every token at every frame."""
        states, frames = self.model.encoder.encode_features(x, x_lens)
        return self.model.ctc_log_probs(states), frames


def write_sherpa(trained: TrainedModel, folder: Path) -> Sequence[Candidate]:
    """Write the model and its tokens, and the graph of the bundle's decoder if it has one.

    Raises SbkitError for a model of other features than 80 log-mel bins, or normalized audio, of 16
    kHz.
    """
    sherpa = require_package("sherpa_onnx", extra="export")
    bundle = trained.bundle
    if takes_waveforms(bundle.model.network.encoder.modules.get("compute_features")):
        model_type, make = OMNILINGUAL, sherpa.OfflineRecognizer.from_omnilingual_asr_ctc
        log_probs = write_waveform_model(trained, folder / MODEL)
    else:
        model_type, make = FIRE_RED, sherpa.OfflineRecognizer.from_fire_red_asr_ctc
        log_probs = _write_feature_model(bundle, folder / MODEL)
    (folder / TOKENS).write_text(_tokens(bundle.tokenizer), encoding="utf-8")
    recognizer = make(model=str(folder / MODEL), tokens=str(folder / TOKENS))
    plain = Candidate(
        name=model_type,
        files=(MODEL,),
        log_probs=log_probs,
        transcribe=partial(_transcribe, recognizer),
    )
    found = [plain]
    if bundle.model.chunks is not None:
        found.append(write_online(trained, folder, folder / TOKENS))
    decoder = bundle.decoder
    if decoder is None or decoder.decoder_type != "graph":
        return found
    decoder.graph_decoder.graph.write(str(folder / GRAPH))
    with_graph = replace(
        plain,
        name=f"{model_type}, {GRAPH}",
        files=(GRAPH,),
        transcribe=partial(_transcribe, load_with_graph(folder, model_type)),
        decoder="graph",
    )
    return [*found, with_graph]


def load_with_graph(folder: Path, model_type: str) -> Any:
    """Load the model with the graph, for which sherpa-onnx has no public method."""
    made = require_package("sherpa_onnx", extra="export").offline_recognizer
    model = made.OfflineModelConfig(tokens=str(folder / TOKENS))
    if model_type == OMNILINGUAL:
        model.omnilingual.model = str(folder / MODEL)
    else:
        model.fire_red_asr_ctc.model = str(folder / MODEL)
    graph = made.OfflineCtcFstDecoderConfig(graph=str(folder / GRAPH), max_active=MAX_ACTIVE_STATES)
    return made._Recognizer(
        made.OfflineRecognizerConfig(model_config=model, ctc_fst_decoder_config=graph)
    )


def _write_feature_model(bundle: TorchBundle, file: Path) -> Run:
    """Write a model of features, and return what runs it; raises SbkitError for other features."""
    _require_features(bundle)
    frames = 100 * EXAMPLE
    lengths = torch.tensor([frames, frames - 20, frames // 2])
    network = bundle.model.network
    program = trace(FeatureModel(network), torch.zeros(EXAMPLE, frames, N_MELS), lengths)
    graph = make_onnx(program, ["x", "x_lens"], ["log_probs", "log_probs_lens"])
    metadata = {
        "model_type": FIRE_RED,
        "vocab_size": bundle.tokenizer.vocab_size,
        "subsampling_factor": bundle.model.samples_per_frame // shift_samples(SAMPLE_RATE),
        "cmvn_mean": ",".join(["0"] * N_MELS),  # our graph normalizes by itself
        "cmvn_inv_stddev": ",".join(["1"] * N_MELS),
    }
    save_onnx(graph, file, metadata)
    return partial(_log_probs, network, OnnxModel(file.read_bytes()))


def _require_features(bundle: TorchBundle) -> None:
    features = bundle.config.parts.get("compute_features") or {}
    name, arguments = features.get("new"), features.get("arguments") or {}
    ours = name == f"{Fbank.__module__}.{Fbank.__qualname__}"
    mels = arguments.get("n_mels", N_MELS)
    if not ours or mels != N_MELS or bundle.config.sample_rate != SAMPLE_RATE:
        raise SbkitError(
            f"A model for sherpa-onnx must have sbkit's Fbank of {N_MELS} bins at {SAMPLE_RATE} "
            f"Hz, which sherpa-onnx computes itself, but has {name} of {mels} at "
            f"{bundle.config.sample_rate} Hz. Leave the format out."
        )


def _tokens(tokenizer: Tokenizer) -> str:
    names = dict(enumerate(tokenizer.pieces())) | {tokenizer.vocabulary.blank: BLANK}
    return "".join(f"{name} {label}\n" for label, name in names.items())


@torch.inference_mode()
def _log_probs(network: Any, model: OnnxModel, audio: Float32s, lengths: Counts) -> BatchLogProbs:
    """Run the graph with our own features."""
    scaled = torch.from_numpy(audio) * FULL_SCALE
    features, frames = network.encoder.features(scaled, torch.from_numpy(lengths))
    return model.log_probs(features.numpy(), frames.numpy())


def _transcribe(recognizer: Any, clips: Sequence[Float32s]) -> list[str]:
    texts = []
    for clip in clips:
        stream = recognizer.create_stream()
        stream.accept_waveform(SAMPLE_RATE, clip)
        recognizer.decode_stream(stream)
        texts.append(str(stream.result.text))
    return texts


OMNILINGUAL = "omnilingual-asr-ctc"
ADDED = 1e-5  # to the variance, by sherpa-onnx


class NormalizedModel(WaveformModel):
    """Clips that sherpa-onnx has normalized to log-probabilities: (B, S) -> (B, U, V)."""

    def forward(self, audio: Tensor) -> Tensor:  # type: ignore[override]
        """Score every token at every frame."""
        variance = audio.double().var(1, correction=0, keepdim=True)  # v / (v + ADDED), of its v
        share = LEAST_VARIANCE / ADDED
        audio = audio * (variance + share * (1 - variance)).rsqrt().float()
        lengths = torch.full_like(audio[:, 0], audio.shape[1], dtype=torch.int64)
        states, _ = self.model.encoder.encode_features(audio.unsqueeze(-1), lengths)
        log_probs: Tensor = self.model.ctc_log_probs(states)
        return log_probs


def takes_waveforms(features: Any) -> bool:
    """Check whether `compute_features` leaves the audio a waveform.

    Raises SbkitError for one that sherpa-onnx would normalize though the model was not trained so.
    """
    body = getattr(features, "body", None)
    if not isinstance(body, NormalizedAudio):
        return False
    if not body.do_normalize or features.sample_rate != SAMPLE_RATE:
        raise SbkitError(
            f"A model of waveforms for sherpa-onnx must have been trained on normalized audio of "
            f"{SAMPLE_RATE} Hz, as sherpa-onnx makes it, but this one has do_normalize: "
            f"{str(body.do_normalize).lower()} and {features.sample_rate} Hz. Leave the format out."
        )
    return True


def write_waveform_model(trained: TrainedModel, file: Path) -> Run:
    """Write the model, and return what runs it."""
    example = torch.randn(EXAMPLE, SAMPLE_RATE, generator=torch.Generator().manual_seed(0))
    program = trace(NormalizedModel(trained.bundle.model.network).eval(), example)
    save_onnx(make_onnx(program, ["audio"], ["log_probs"]), file, {"model_type": OMNILINGUAL})
    session = require_package("onnxruntime", extra="export").InferenceSession(file)
    return partial(_waveform_log_probs, session)


def _waveform_log_probs(session: Any, audio: Float32s, lengths: Counts) -> BatchLogProbs:
    """Run the graph on one clip after the other, normalized as sherpa-onnx does it."""
    rows = []
    for row, length in zip(audio, lengths, strict=True):
        clip = row[:length].astype(np.float64)
        clip = (clip - clip.mean()) / np.sqrt(clip.var() + ADDED)
        (found,) = session.run(None, {"audio": clip[None].astype(np.float32)})
        rows.append(torch.from_numpy(found[0]))
    return BatchLogProbs(pad_sequence(rows, batch_first=True).numpy(), np.array([*map(len, rows)]))
