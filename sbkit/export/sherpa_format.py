"""Write models for sherpa-onnx, which recognizes speech on servers, phones and in browsers.

A model is written as one of sherpa-onnx's own model types, which it knows how to run:

fire-red-asr-2-ctc   whole clips, from 80 log-mel bins
omnilingual-asr-ctc  whole clips, from waveforms, for a pretrained encoder
wenet_ctc            chunk by chunk, in addition, if the model is a streaming model

sherpa-onnx computes the features itself, with settings of the model type. Those of
fire-red-asr-2-ctc are sbkit's: no partial windows, filters up to half the sample rate, the scale of
int16. A decoding graph of the bundle is written as `HLG.fst`. Texts of sherpa-onnx contain special
tokens such as <unk>, which sbkit omits.

Legend: B clips, S samples, T feature frames, M mel bins, U frames, V vocabulary. In a streaming
model: L frames of left context, N blocks, H heads, D model width, C columns of conv_cache.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from sbkit.export.traced import EXAMPLE_BATCH, TrainedModel, trace
from sbkit.models.asr import AsrModel, StreamingAsrModel
from sbkit.models.pretrained.features import VARIANCE_EPS as MODEL_EPS
from sbkit.models.pretrained.features import NormalizedAudio
from sbkit.models.streaming import EncoderState, streaming_network
from sbkit.runtime.onnx_model import BatchLogProbs, OnnxModel
from sbkit.runtime.torch_model import TorchBundle

MODEL_FILE = "model.onnx"
ONLINE_FILE = "online.onnx"
TOKENS_FILE = "tokens.txt"
GRAPH_FILE = "HLG.fst"
FIRE_RED = "fire-red-asr-2-ctc"
OMNILINGUAL = "omnilingual-asr-ctc"
WENET = "wenet_ctc"
BLANK = "<blk>"  # sherpa-onnx finds the blank by this name
N_MELS = 80  # of FIRE_RED
SHERPA_EPS = 1e-5  # what sherpa-onnx adds to the variance of a clip; the encoder adds MODEL_EPS
WENET_INPUTS = ("x", "offset", "required_cache_size", "attn_cache", "conv_cache", "attn_mask")
WENET_OUTPUTS = ("log_probs", "next_attn_cache", "next_conv_cache")


@dataclass(frozen=True)
class ClipFormat:
    """A model type of sherpa-onnx for whole clips.

    model_type: its name in sherpa-onnx.
    factory: the method of `sherpa_onnx.OfflineRecognizer` that loads it.
    write: writes the model into a file; returns a function that runs the file.
    """

    model_type: str
    factory: str
    write: Callable[[TrainedModel, Path], RunBatch]


def write_sherpa(trained: TrainedModel, folder: Path) -> Sequence[Candidate]:
    """Write the model and its tokens, and the decoding graph of the bundle, if it has one.

    Raises:
        BundleError: sherpa-onnx cannot compute the features of the model, or cannot run the chunks
            of the streaming model.
    """
    sherpa = require_package("sherpa_onnx", extra="export")
    bundle = trained.bundle
    clip_format = _find_clip_format(bundle)
    # Built first, so that a model that does not fit fails before anything is written.
    wenet = None if bundle.model.chunks is None else make_wenet_model(bundle)
    log_probs = clip_format.write(trained, folder / MODEL_FILE)
    names = dict(enumerate(bundle.tokenizer.pieces())) | {bundle.blank: BLANK}
    tokens = "".join(f"{name} {id}\n" for id, name in names.items())
    (folder / TOKENS_FILE).write_text(tokens, encoding="utf-8")
    recognizer_factory = getattr(sherpa.OfflineRecognizer, clip_format.factory)
    recognizer = recognizer_factory(
        model=str(folder / MODEL_FILE), tokens=str(folder / TOKENS_FILE)
    )
    greedy = Candidate(
        name=clip_format.model_type,
        files=(MODEL_FILE,),
        log_probs=log_probs,
        transcribe=partial(_transcribe, recognizer),
    )
    candidates = [greedy]
    if wenet is not None:
        candidates.append(_write_wenet(trained, wenet, folder))
    decoder = bundle.decoder
    if decoder is not None and decoder.decoder_type == "graph":
        decoder.graph_decoder.graph.write(str(folder / GRAPH_FILE))
        with_graph = replace(
            greedy,
            name=f"{clip_format.model_type}, {GRAPH_FILE}",
            files=(GRAPH_FILE,),
            transcribe=partial(_transcribe, load_with_graph(folder, clip_format.model_type)),
            decoder="graph",
        )
        candidates.append(with_graph)
    return candidates


def _find_clip_format(bundle: TorchBundle) -> ClipFormat:
    """Return the model type whose features are those of the model, or raise BundleError."""
    features = bundle.model.network.encoder.modules.get("compute_features")
    if isinstance(getattr(features, "body", None), NormalizedAudio):
        require_normalized_audio(features)
        return ClipFormat(OMNILINGUAL, "from_omnilingual_asr_ctc", _write_omnilingual)
    _require_fbank(features, bundle.config.sample_rate)
    return ClipFormat(FIRE_RED, "from_fire_red_asr_ctc", _write_fire_red)


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
    """Build a recognizer from a config, which no public function takes; tested with 2.0.1."""
    return sherpa._Recognizer(config)


# Models of log-mel features: FIRE_RED


class FeatureModel(nn.Module):
    """Features from another program to log-probabilities: (B, T, M), (B,) -> (B, U, V), (B,)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.parts = model.model  # owns every parameter
        self.model = model

    def forward(self, x: Tensor, x_lens: Tensor) -> tuple[Tensor, Tensor]:
        states, frames = self.model.encoder.encode_features(x, x_lens)
        return self.model.ctc_log_probs(states), frames


def _write_fire_red(trained: TrainedModel, file: Path) -> RunBatch:
    bundle = trained.bundle
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


def _require_fbank(features: object, sample_rate: int) -> None:
    """Raise BundleError unless a model takes the features that sherpa-onnx computes."""
    if type(features) is not Fbank:
        raise BundleError(
            f"sherpa-onnx can only compute the features of sbkit's Fbank, but this model has "
            f"{type(features).__qualname__}. Leave the format out."
        )
    if features.n_mels != N_MELS or sample_rate != SAMPLE_RATE:
        raise BundleError(
            f"sherpa-onnx can only compute {N_MELS} mel bins at {SAMPLE_RATE} Hz, but this model "
            f"has {features.n_mels} bins at {sample_rate} Hz. Leave the format out."
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
# subtracts the mean of each clip, and divides by the root of its variance plus SHERPA_EPS
# (`offline-omnilingual-asr-ctc-model.cc`). The encoder was trained with MODEL_EPS in its place, so
# the graph first rescales the audio.


class SherpaNormalizedModel(nn.Module):
    """A recognizer of clips that sherpa-onnx has normalized: (B, S) -> (B, U, V)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.parts = model.model  # owns every parameter
        self.model = model

    def forward(self, audio: Tensor) -> Tensor:
        # If the variance of a clip was v, sherpa-onnx has made it v / (v + SHERPA_EPS).
        variance = audio.double().var(1, correction=0, keepdim=True)
        ratio = MODEL_EPS / SHERPA_EPS
        audio = audio * (variance + ratio * (1 - variance)).rsqrt().float()
        lengths = torch.full_like(audio[:, 0], audio.shape[1], dtype=torch.int64)
        states, _ = self.model.encoder.encode_features(audio.unsqueeze(-1), lengths)
        log_probs: Tensor = self.model.ctc_log_probs(states)
        return log_probs


def require_normalized_audio(features: Any) -> None:
    """Raise BundleError if a model of waveforms was not trained on normalized audio at 16 kHz."""
    if not features.body.do_normalize:
        raise BundleError(
            "sherpa-onnx normalizes waveforms, but this model was trained with `do_normalize: "
            "false`. Leave the format out."
        )
    if features.sample_rate != SAMPLE_RATE:
        raise BundleError(
            f"sherpa-onnx needs waveforms at {SAMPLE_RATE} Hz, but this model was trained at "
            f"{features.sample_rate} Hz. Leave the format out."
        )


def _write_omnilingual(trained: TrainedModel, file: Path) -> RunBatch:
    example = torch.randn(EXAMPLE_BATCH, SAMPLE_RATE, generator=torch.Generator().manual_seed(0))
    program = trace(SherpaNormalizedModel(trained.bundle.model.network).eval(), example)
    save_onnx(make_onnx(program, ["audio"], ["log_probs"]), file, {"model_type": OMNILINGUAL})
    session = require_package("onnxruntime", extra="export").InferenceSession(file)
    return partial(_waveform_log_probs, session)


def _waveform_log_probs(session: Any, audio: Float32s, lengths: Counts) -> BatchLogProbs:
    """Normalize clips as sherpa-onnx does, and run the graph on one after the other."""
    outputs = []
    for samples, length in zip(audio, lengths, strict=True):
        clip = samples[:length].astype(np.float64)
        clip = (clip - clip.mean()) / np.sqrt(clip.var() + SHERPA_EPS)
        (output,) = session.run(None, {"audio": clip[None].astype(np.float32)})
        outputs.append(output[0])
    return join(outputs)


# Streaming models: WENET. WeNet's model has two caches of N + 1 blocks:
#
# attn_cache  (N + 1, H, L, 2 D/H)  keys before rotation, and values
# conv_cache  (N + 1, 1, D, C)      the last frames before the convolutions, as numbers in a row
#
# The last block of conv_cache holds the past frames of the front-end. C is as small as the numbers
# of a block allow; the rest of a block is zero. sherpa-onnx decodes only whole chunks, each only
# once one more frame is available, so audio must end with silence (sherpa #411). Its features equal
# sbkit's only with the settings of `load_online`.


class WenetModel(nn.Module):
    """A chunk with WeNet's inputs and outputs.

    initial_state: the encoder's state before the first chunk.
    """

    def __init__(self, model: AsrModel, stream: StreamingAsrModel) -> None:
        super().__init__()
        self.parts = model.model  # owns every parameter
        self.stream = stream
        self.initial_state = stream.start()
        shape = self.initial_state.attention.shape
        _, self.blocks, self.left_frames, _, self.heads, self.head_dim = shape
        self.d_model = self.heads * self.head_dim
        self.n_mels = self.initial_state.features.shape[2]
        self.subsampling = model.samples_per_frame // shift_samples(SAMPLE_RATE)
        self.feature_frames = stream.chunk_shift_samples // shift_samples(SAMPLE_RATE)
        self.chunk_frames = self.feature_frames // self.subsampling
        front_end = (self.initial_state.features, self.initial_state.hidden)
        block_numel = self.initial_state.convolution[0, 0].numel()
        cache_numel = max(block_numel, sum(state.numel() for state in front_end))
        self.columns = math.ceil(cache_numel / self.d_model)

    def metadata(self) -> dict[str, object]:
        """Return the sizes of the caches, which sherpa-onnx reads."""
        return {
            "model_type": WENET,
            "head": self.heads,
            "num_blocks": self.blocks + 1,
            "output_size": self.d_model,
            "cnn_module_kernel": self.columns + 1,
            "right_context": self.subsampling - 1,  # so that chunks share no frame
            "subsampling_factor": self.subsampling,
        }

    def example(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the inputs for a first chunk of zeros, with the whole context visible."""
        x = torch.zeros(1, self.feature_frames, self.n_mels)
        offset = torch.tensor([self.left_frames])
        attn_cache, conv_cache = self._pack(self.initial_state)
        attn_mask = torch.ones(1, 1, self.left_frames + self.chunk_frames, dtype=torch.bool)
        return x, offset, offset, attn_cache, conv_cache, attn_mask

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
        attn_cache, conv_cache = self._pack(state)
        return log_probs, attn_cache, conv_cache

    def _unpack(self, attn_cache: Tensor, conv_cache: Tensor, attn_mask: Tensor) -> EncoderState:
        """Read the encoder's state from WeNet's caches."""
        initial = self.initial_state
        *blocks, front_end = conv_cache.flatten(1)
        num_features = initial.features.numel()
        num_front_end = num_features + initial.hidden.numel()
        block_shape = initial.convolution.shape[2:]
        convolution = torch.stack([block[: block_shape.numel()] for block in blocks])
        attention = attn_cache[:-1].reshape(
            self.blocks, self.heads, self.left_frames, 2, self.head_dim
        )
        return EncoderState(
            frames=attn_mask[:, 0, : self.left_frames].sum(-1),
            features=front_end[:num_features].view(initial.features.shape),
            hidden=front_end[num_features:num_front_end].view(initial.hidden.shape),
            attention=attention.permute(0, 2, 3, 1, 4).unsqueeze(0),
            convolution=convolution.view(initial.convolution.shape),
        )

    def _pack(self, state: EncoderState) -> tuple[Tensor, Tensor]:
        """Write the encoder's state into WeNet's caches."""
        attention = state.attention[0].permute(0, 3, 1, 2, 4).flatten(3)  # (N, H, L, 2 D/H)
        front_end = torch.cat([state.features.flatten(), state.hidden.flatten()])
        cache_rows = [
            nn.functional.pad(numbers, (0, self.d_model * self.columns - numbers.shape[0]))
            for numbers in (*state.convolution[0].flatten(1), front_end)
        ]
        conv_cache = torch.stack(cache_rows).view(-1, 1, self.d_model, self.columns)
        return torch.cat([attention, torch.zeros_like(attention[:1])]), conv_cache


def make_wenet_model(bundle: TorchBundle) -> WenetModel:
    """Make the streaming model; raise BundleError if sherpa-onnx cannot run its chunks."""
    network = bundle.model.network
    stream = streaming_network(network)
    assert isinstance(stream, StreamingAsrModel)
    model = WenetModel(network, stream).eval()
    frame_ms = 1000 * bundle.model.samples_per_frame // SAMPLE_RATE
    if model.left_frames % model.chunk_frames:
        raise BundleError(
            "sherpa-onnx's online recognizer needs left_ms to be a multiple of chunk_ms, but they "
            f"are {model.left_frames * frame_ms} and {model.chunk_frames * frame_ms}. Change them, "
            "or leave the format out."
        )
    return model


def _write_wenet(trained: TrainedModel, model: WenetModel, folder: Path) -> Candidate:
    """Write the streaming model."""
    bundle = trained.bundle
    chunk_sizes = bundle.model.chunks
    assert chunk_sizes is not None
    program = trace(model, *model.example(), dynamic_shapes=({},) * len(WENET_INPUTS))
    graph = make_onnx(program, WENET_INPUTS, WENET_OUTPUTS)
    metadata = model.metadata() | {"vocab_size": bundle.tokenizer.vocab_size}
    save_onnx(graph, folder / ONLINE_FILE, metadata)
    recognizer = load_online(
        folder / ONLINE_FILE,
        folder / TOKENS_FILE,
        chunk=model.chunk_frames,
        left_chunks=model.left_frames // model.chunk_frames,
    )
    session = require_package("onnxruntime", extra="export").InferenceSession(folder / ONLINE_FILE)
    return Candidate(
        name=f"{WENET}, online",
        files=(ONLINE_FILE,),
        log_probs=partial(_run_online, bundle.model.network, model, session),
        transcribe=partial(_transcribe_online, recognizer, chunk_sizes.shortest),
        prepare=partial(_pad_to_whole_chunks, chunk_sizes),
    )


def _pad_to_whole_chunks(chunk_sizes: ChunkSizes, case: Case) -> Case:
    """Append silence to each clip, up to the end of its last chunk."""
    # The first chunk ends after a window, and each further one a step later.
    missing = chunk_sizes.window - case.lengths
    padding = np.where(missing > 0, missing, missing % chunk_sizes.step)
    lengths = case.lengths + padding
    num_columns = max(0, int(lengths.max()) - case.audio.shape[1])
    return replace(case, audio=np.pad(case.audio, ((0, 0), (0, num_columns))), lengths=lengths)


def _transcribe_online(recognizer: Any, extra_samples: int, clips: Sequence[Float32s]) -> list[str]:
    """Transcribe clips, each followed by ``extra_samples`` of silence, at least one frame."""
    texts = []
    for clip in clips:
        stream = recognizer.create_stream()
        # The last chunk is decoded only once one more frame is available.
        stream.accept_waveform(SAMPLE_RATE, np.pad(clip, (0, extra_samples)))
        while recognizer.is_ready(stream):
            recognizer.decode_stream(stream)
        texts.append(str(recognizer.get_result(stream).text))
    return texts


@torch.inference_mode()
def _run_online(
    network: AsrModel,
    model: WenetModel,
    session: Any,
    audio: Float32s,
    lengths: Counts,
) -> BatchLogProbs:
    """Run the graph on whole clips with sbkit's features: (B, S), (B,) -> (B, U, V), (B,)."""
    counts = network.encoder.subsampling.count(lengths)
    left_frames = model.left_frames
    outputs: list[Float32s] = []
    for samples, length in zip(audio, lengths.tolist(), strict=True):
        clip = torch.from_numpy(samples[:length]).unsqueeze(0) * FULL_SCALE
        features, _ = model.stream.features(clip, torch.tensor([clip.shape[1]]))
        inputs = {
            name: tensor.numpy() for name, tensor in zip(WENET_INPUTS, model.example(), strict=True)
        }
        log_probs: list[Float32s] = []
        for index, first in enumerate(range(0, features.shape[1], model.feature_frames)):
            inputs["x"] = features[:, first : first + model.feature_frames].numpy()
            num_past = index * model.chunk_frames
            inputs["attn_mask"][..., :left_frames] = (
                np.arange(left_frames) >= left_frames - num_past
            )
            scores, attn_cache, conv_cache = session.run(None, inputs)
            inputs["attn_cache"] = attn_cache
            inputs["conv_cache"] = conv_cache
            log_probs.append(scores[0])
        outputs.append(np.concatenate(log_probs))
    return BatchLogProbs(join(outputs).log_probs, counts)
