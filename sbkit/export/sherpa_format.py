"""The folder that sherpa-onnx loads on servers, phones and in browsers, with three model types.

`fire-red-asr-2-ctc` (80 log-mel bins) and `omnilingual-asr-ctc` (a pretrained encoder of waveforms)
recognize whole clips; `wenet_ctc` recognizes chunk by chunk. A decoding graph of the bundle is
written as `HLG.fst`. sherpa-onnx computes features itself, with settings that depend on the model
type: `fire-red-asr-2-ctc` has sbkit's (no partial windows, filters up to half the sample rate, the
scale of int16). It writes the names of special tokens (<unk>) into texts; sbkit omits them.

Legend: B clips, S samples, T feature frames, M mel bins, U frames, V vocabulary. In a streaming
model: L frames of left context, N blocks, H heads, D model width, K frames of a convolution.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sbkit.audio.fbank import Fbank
from sbkit.audio.io import FULL_SCALE
from sbkit.base.arrays import Counts, Float32s
from sbkit.base.errors import BundleError
from sbkit.base.imports import require_package
from sbkit.base.units import SAMPLE_RATE, shift_samples
from sbkit.bundle.protocols import ChunkSizes
from sbkit.decoding.decoding_graph import MAX_ACTIVE_STATES
from sbkit.export.onnx_format import make_onnx, save_onnx
from sbkit.export.parity import Candidate, Case, RunBatch, join
from sbkit.export.traced import EXAMPLE_BATCH, TrainedModel, WaveformModel, trace
from sbkit.models.asr import AsrModel, StreamingAsrModel
from sbkit.models.frontend import PAST_FRAMES, STRIDE
from sbkit.models.pretrained.features import VARIANCE_EPS, NormalizedAudio
from sbkit.models.streaming import EncoderState, streaming_network
from sbkit.runtime.onnx_model import BatchLogProbs, OnnxModel
from sbkit.runtime.torch_model import TorchBundle

MODEL_FILE, ONLINE_FILE = "model.onnx", "online.onnx"
TOKENS_FILE, GRAPH_FILE = "tokens.txt", "HLG.fst"
FIRE_RED, OMNILINGUAL, WENET = "fire-red-asr-2-ctc", "omnilingual-asr-ctc", "wenet_ctc"
BLANK = "<blk>"  # sherpa-onnx finds the blank by this name
N_MELS = 80  # of FIRE_RED
VARIANCE_EPSILON = 1e-5  # sherpa-onnx adds it to the variance of a clip
SUBSAMPLING = STRIDE**2
WENET_INPUTS = ("x", "offset", "required_cache_size", "attn_cache", "conv_cache", "attn_mask")
WENET_OUTPUTS = ("log_probs", "next_attn_cache", "next_conv_cache")


def write_sherpa(trained: TrainedModel, folder: Path) -> Sequence[Candidate]:
    """Write the model and its tokens, and the decoding graph of the bundle, if it has one.

    Raises:
        BundleError: sherpa-onnx cannot compute the model's features, which must be 80 log-mel bins
            or normalized audio, at 16 kHz.
    """
    sherpa = require_package("sherpa_onnx", extra="export")
    bundle = trained.bundle
    if takes_waveforms(bundle.model.network.encoder.modules.get("compute_features")):
        model_type, load = OMNILINGUAL, sherpa.OfflineRecognizer.from_omnilingual_asr_ctc
        log_probs = _write_waveform_model(trained, folder / MODEL_FILE)
    else:
        model_type, load = FIRE_RED, sherpa.OfflineRecognizer.from_fire_red_asr_ctc
        log_probs = _write_feature_model(bundle, folder / MODEL_FILE)
    names = dict(enumerate(bundle.tokenizer.pieces())) | {bundle.blank: BLANK}
    tokens = "".join(f"{name} {id}\n" for id, name in names.items())
    (folder / TOKENS_FILE).write_text(tokens, encoding="utf-8")
    recognizer = load(model=str(folder / MODEL_FILE), tokens=str(folder / TOKENS_FILE))
    greedy = Candidate(
        name=model_type,
        files=(MODEL_FILE,),
        log_probs=log_probs,
        transcribe=partial(_transcribe, recognizer),
    )
    candidates = [greedy]
    if bundle.model.chunks is not None:
        candidates.append(_write_online(trained, folder))
    decoder = bundle.decoder
    if decoder is None or decoder.decoder_type != "graph":
        return candidates
    decoder.graph_decoder.graph.write(str(folder / GRAPH_FILE))
    with_graph = replace(
        greedy,
        name=f"{model_type}, {GRAPH_FILE}",
        files=(GRAPH_FILE,),
        transcribe=partial(_transcribe, load_with_graph(folder, model_type)),
        decoder="graph",
    )
    return [*candidates, with_graph]


def _transcribe(recognizer: Any, clips: Sequence[Float32s]) -> list[str]:
    texts = []
    for clip in clips:
        stream = recognizer.create_stream()
        stream.accept_waveform(SAMPLE_RATE, clip)
        recognizer.decode_stream(stream)
        texts.append(str(stream.result.text))
    return texts


def load_with_graph(folder: Path, model_type: str) -> Any:
    """Load the whole-clip model with the decoding graph."""
    sherpa = require_package("sherpa_onnx", extra="export").offline_recognizer
    model = sherpa.OfflineModelConfig(tokens=str(folder / TOKENS_FILE))
    if model_type == OMNILINGUAL:
        model.omnilingual.model = str(folder / MODEL_FILE)
    else:
        model.fire_red_asr_ctc.model = str(folder / MODEL_FILE)
    graph = sherpa.OfflineCtcFstDecoderConfig(
        graph=str(folder / GRAPH_FILE), max_active=MAX_ACTIVE_STATES
    )
    config = sherpa.OfflineRecognizerConfig(model_config=model, ctc_fst_decoder_config=graph)
    return _build_recognizer(sherpa, config)


def load_online(model: Path, tokens: Path, *, chunk: int = 16, left_chunks: int = 4) -> Any:
    """Load the streaming model with the settings of sbkit's features."""
    sherpa = require_package("sherpa_onnx", extra="export").online_recognizer
    wenet = sherpa.OnlineWenetCtcModelConfig(
        model=str(model), chunk_size=chunk, num_left_chunks=left_chunks
    )
    # By default, filters end at 7600 Hz, and windows reach beyond both ends of the audio.
    features = sherpa.FeatureExtractorConfig(high_freq=0, snip_edges=True)
    config = sherpa.OnlineRecognizerConfig(
        feat_config=features,
        model_config=sherpa.OnlineModelConfig(wenet_ctc=wenet, tokens=str(tokens), num_threads=1),
        enable_endpoint=False,
        decoding_method="greedy_search",
    )
    return _build_recognizer(sherpa, config)


def _build_recognizer(sherpa: Any, config: Any) -> Any:
    """Call a private class, since no public function takes the config; tested with 2.0.1."""
    return sherpa._Recognizer(config)


# Models of log-mel features: FIRE_RED


class FeatureModel(WaveformModel):
    """Features from another program to log-probabilities: (B, T, M), (B,) -> (B, U, V), (B,)."""

    def forward(self, x: Tensor, x_lens: Tensor) -> tuple[Tensor, Tensor]:
        states, frames = self.model.encoder.encode_features(x, x_lens)
        return self.model.ctc_log_probs(states), frames


def _write_feature_model(bundle: TorchBundle, file: Path) -> RunBatch:
    _require_fbank(bundle)
    frames = 100 * EXAMPLE_BATCH
    lengths = torch.tensor([frames, frames - 20, frames // 2])
    network = bundle.model.network
    program = trace(FeatureModel(network), torch.zeros(EXAMPLE_BATCH, frames, N_MELS), lengths)
    graph = make_onnx(program, ["x", "x_lens"], ["log_probs", "log_probs_lens"])
    metadata = {
        "model_type": FIRE_RED,
        "vocab_size": bundle.tokenizer.vocab_size,
        "subsampling_factor": bundle.model.samples_per_frame // shift_samples(SAMPLE_RATE),
        "cmvn_mean": ",".join(["0"] * N_MELS),  # the graph itself normalizes
        "cmvn_inv_stddev": ",".join(["1"] * N_MELS),
    }
    save_onnx(graph, file, metadata)
    return partial(_feature_log_probs, network, OnnxModel(file.read_bytes()))


def _require_fbank(bundle: TorchBundle) -> None:
    features = bundle.config.parts.get("compute_features") or {}
    name, arguments = features.get("new"), features.get("arguments") or {}
    is_fbank = name == f"{Fbank.__module__}.{Fbank.__qualname__}"
    mels = arguments.get("n_mels", N_MELS)
    if not is_fbank or mels != N_MELS or bundle.config.sample_rate != SAMPLE_RATE:
        raise BundleError(
            f"sherpa-onnx can only compute sbkit's Fbank with {N_MELS} bins at {SAMPLE_RATE} Hz, "
            f"but this model has {name} with {mels} bins at {bundle.config.sample_rate} Hz. Leave "
            "the format out."
        )


@torch.inference_mode()
def _feature_log_probs(
    network: Any, model: OnnxModel, audio: Float32s, lengths: Counts
) -> BatchLogProbs:
    """Run the graph with sbkit's features."""
    scaled = torch.from_numpy(audio) * FULL_SCALE
    features, frames = network.encoder.features(scaled, torch.from_numpy(lengths))
    return model.log_probs(features.numpy(), frames.numpy())


# Models of waveforms: OMNILINGUAL. sherpa-onnx passes whole clips, one by one, without lengths. It
# subtracts the mean of each clip, and divides by the root of its variance plus 1e-5
# (`offline-omnilingual-asr-ctc-model.cc`). The encoder was trained with 1e-7, so the graph first
# rescales the audio.


class NormalizedModel(WaveformModel):
    """A recognizer of clips that sherpa-onnx has normalized: (B, S) -> (B, U, V)."""

    def forward(self, audio: Tensor) -> Tensor:  # type: ignore[override]
        # A clip whose variance was v has variance v / (v + VARIANCE_EPSILON) here.
        variance = audio.double().var(1, correction=0, keepdim=True)
        ratio = VARIANCE_EPS / VARIANCE_EPSILON
        audio = audio * (variance + ratio * (1 - variance)).rsqrt().float()
        lengths = torch.full_like(audio[:, 0], audio.shape[1], dtype=torch.int64)
        states, _ = self.model.encoder.encode_features(audio.unsqueeze(-1), lengths)
        log_probs: Tensor = self.model.ctc_log_probs(states)
        return log_probs


def takes_waveforms(features: Any) -> bool:
    """Return whether the part `compute_features` passes on the waveform.

    Raises:
        BundleError: the model was not trained on normalized audio, which sherpa-onnx passes.
    """
    body = getattr(features, "body", None)
    if not isinstance(body, NormalizedAudio):
        return False
    if not body.do_normalize or features.sample_rate != SAMPLE_RATE:
        raise BundleError(
            f"sherpa-onnx normalizes waveforms and needs {SAMPLE_RATE} Hz, but this model was "
            f"trained with do_normalize: {str(body.do_normalize).lower()} at "
            f"{features.sample_rate} Hz. Leave the format out."
        )
    return True


def _write_waveform_model(trained: TrainedModel, file: Path) -> RunBatch:
    example = torch.randn(EXAMPLE_BATCH, SAMPLE_RATE, generator=torch.Generator().manual_seed(0))
    program = trace(NormalizedModel(trained.bundle.model.network).eval(), example)
    save_onnx(make_onnx(program, ["audio"], ["log_probs"]), file, {"model_type": OMNILINGUAL})
    session = require_package("onnxruntime", extra="export").InferenceSession(file)
    return partial(_waveform_log_probs, session)


def _waveform_log_probs(session: Any, audio: Float32s, lengths: Counts) -> BatchLogProbs:
    """Normalize clips as sherpa-onnx does, and run the graph on one after the other."""
    outputs = []
    for samples, length in zip(audio, lengths, strict=True):
        clip = samples[:length].astype(np.float64)
        clip = (clip - clip.mean()) / np.sqrt(clip.var() + VARIANCE_EPSILON)
        (output,) = session.run(None, {"audio": clip[None].astype(np.float32)})
        outputs.append(output[0])
    return join(outputs)


# Streaming models: WENET. The caches are WeNet's and have N + 1 blocks: keys before rotation and
# values, (N + 1, H, L, 2 D/H), and the frames that each convolution keeps, (N + 1, 1, D, K). The
# last block of the second cache has the frames that the front-end keeps. sherpa-onnx decodes only
# whole chunks, and a chunk only once one more frame is available, so audio must end with silence
# (sherpa #411). Its features equal sbkit's only with the settings of `load_online`.


class OnlineModel(nn.Module):
    """A chunk with WeNet's inputs and outputs."""

    def __init__(self, model: AsrModel, stream: StreamingAsrModel) -> None:
        super().__init__()
        self.parts, self.stream = model.model, stream  # parts own every parameter
        self.start = stream.start()

    def metadata(self) -> dict[str, object]:
        """Return the sizes of the caches, which sherpa-onnx reads."""
        _, blocks, width, size = self.start.convolution.shape
        return {
            "model_type": WENET,
            "head": self.start.attention.shape[4],
            "num_blocks": blocks + 1,
            "output_size": size,
            "cnn_module_kernel": width + 1,
            "right_context": SUBSAMPLING - 1,  # so that chunks share no frame
            "subsampling_factor": SUBSAMPLING,
        }

    def example(self) -> tuple[Tensor, ...]:
        """Return the inputs for a first chunk of zeros, with the whole context visible."""
        left = self.start.attention.shape[2]
        frames = self.stream.chunk_shift_samples // shift_samples(SAMPLE_RATE)
        mask = torch.ones(1, 1, left + frames // SUBSAMPLING, dtype=torch.bool)
        offset, x = torch.tensor([left]), torch.zeros(1, frames, self.start.features.shape[2])
        return x, offset, offset, *self._pack(self.start), mask

    def forward(
        self,
        x: Tensor,
        offset: Tensor,
        required_cache_size: Tensor,
        attn_cache: Tensor,
        conv_cache: Tensor,
        attn_mask: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Score the tokens: (1, T, M) -> (1, U, V)."""
        state = self._unpack(attn_cache, conv_cache, attn_mask)
        lengths = torch.full((1,), x.shape[1])
        log_probs, _, state = self.stream.forward_features(x, lengths, state)
        return log_probs, *self._pack(state)

    def _unpack(self, attention: Tensor, convolution: Tensor, mask: Tensor) -> EncoderState:
        """Read the encoder's state from WeNet's caches."""
        mels, channels = self.start.features.shape[2], self.start.hidden.shape[2]
        cached = (
            convolution[-1].flatten()[: PAST_FRAMES * (mels + channels)].view(1, PAST_FRAMES, -1)
        )
        _, blocks, left, _, heads, size = self.start.attention.shape
        keys = attention[:-1].reshape(blocks, heads, left, 2, size)
        return EncoderState(
            frames=mask[:, 0, : attention.shape[2]].sum(-1),
            features=cached[..., :mels],
            hidden=cached[..., mels:],
            attention=keys.permute(0, 2, 3, 1, 4).unsqueeze(0),
            convolution=convolution[:-1, 0].transpose(1, 2).unsqueeze(0),
        )

    def _pack(self, state: EncoderState) -> tuple[Tensor, Tensor]:
        """Write the encoder's state into WeNet's caches."""
        keys = state.attention[0].permute(0, 3, 1, 2, 4).flatten(3)  # (N, H, L, 2 D/H)
        blocks = state.convolution[0].transpose(1, 2).unsqueeze(1)  # (N, 1, D, K)
        cached = torch.cat([state.features, state.hidden], 2).flatten()
        cached = nn.functional.pad(cached, (0, blocks[0].numel() - cached.shape[0]))
        last = cached.view(1, *blocks.shape[1:])
        return torch.cat([keys, torch.zeros_like(keys[:1])]), torch.cat([blocks, last])


def _write_online(trained: TrainedModel, folder: Path) -> Candidate:
    """Write the streaming model; raises BundleError if WeNet's caches cannot hold its state."""
    network, bundle = trained.bundle.model.network, trained.bundle
    stream, sizes = streaming_network(network), bundle.model.chunks
    assert isinstance(stream, StreamingAsrModel) and sizes is not None
    module = OnlineModel(network, stream).eval()
    start, tokens = module.start, folder / TOKENS_FILE
    chunk = stream.chunk_shift_samples // bundle.model.samples_per_frame
    left = start.attention.shape[2]
    front_end_size = start.features.numel() + start.hidden.numel()
    if left % chunk or front_end_size > start.convolution[0, 0].numel():
        raise BundleError(
            "sherpa-onnx's online recognizer needs left_ms to be a multiple of chunk_ms, and "
            "kernel_size // 2 * d_model to be at least 3 * (n_mels + cnn_channels), the size of "
            "the front-end's state. Change these, or leave the format out."
        )
    program = trace(module, *module.example(), dynamic_shapes=({},) * len(WENET_INPUTS))
    graph = make_onnx(program, WENET_INPUTS, WENET_OUTPUTS)
    metadata = module.metadata() | {"vocab_size": bundle.tokenizer.vocab_size}
    save_onnx(graph, folder / ONLINE_FILE, metadata)
    recognizer = load_online(folder / ONLINE_FILE, tokens, chunk=chunk, left_chunks=left // chunk)
    session = require_package("onnxruntime", extra="export").InferenceSession(folder / ONLINE_FILE)
    return Candidate(
        name=f"{WENET}, online",
        files=(ONLINE_FILE,),
        log_probs=partial(_run_online, network, module, session),
        transcribe=partial(_transcribe_online, recognizer, sizes.shortest),
        prepare=partial(_append_silence, sizes),
    )


def _append_silence(sizes: ChunkSizes, case: Case) -> Case:
    """Append silence to each clip to fill its last chunk."""
    missing = sizes.window - case.lengths
    lengths = case.lengths + np.maximum(missing, missing % sizes.step)
    padding = max(0, int(lengths.max()) - case.audio.shape[1])
    return replace(case, audio=np.pad(case.audio, ((0, 0), (0, padding))), lengths=lengths)


def _transcribe_online(recognizer: Any, frame: int, clips: Sequence[Float32s]) -> list[str]:
    texts = []
    for clip in clips:
        stream = recognizer.create_stream()
        # The last chunk is decoded only once one more frame is available.
        stream.accept_waveform(SAMPLE_RATE, np.pad(clip, (0, frame)))
        while recognizer.is_ready(stream):
            recognizer.decode_stream(stream)
        texts.append(str(recognizer.get_result(stream).text))
    return texts


@torch.inference_mode()
def _run_online(
    network: AsrModel,
    module: OnlineModel,
    session: Any,
    audio: Float32s,
    lengths: Counts,
) -> BatchLogProbs:
    """Run the graph on whole clips with sbkit's features: (B, S), (B,) -> (B, U, V), (B,)."""
    counts = network.encoder.subsampling.count(lengths)
    outputs: list[Float32s] = []
    for samples, length in zip(audio, lengths.tolist(), strict=True):
        clip = torch.from_numpy(samples[:length]).unsqueeze(0) * FULL_SCALE
        features, _ = module.stream.features(clip, torch.tensor([clip.shape[1]]))
        x, *state, mask = (tensor.numpy() for tensor in module.example())
        chunk, left = x.shape[1], int(state[1][0])
        log_probs: list[Float32s] = []
        for index, first in enumerate(range(0, features.shape[1], chunk)):
            visible = index * (mask.shape[2] - left)
            mask[..., :left] = np.arange(left) >= left - visible
            inputs = (features[:, first : first + chunk].numpy(), *state, mask)
            scores, *caches = session.run(None, dict(zip(WENET_INPUTS, inputs, strict=True)))
            state[2:] = caches
            log_probs.append(scores[0])
        outputs.append(np.concatenate(log_probs))
    return BatchLogProbs(join(outputs).log_probs, counts)
