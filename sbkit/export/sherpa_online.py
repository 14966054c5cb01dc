"""The model that sherpa-onnx's `OnlineRecognizer.from_wenet_ctc` loads, chunk by chunk.

Legend: L frames of left context, N blocks, H heads, D model width, K frames of a convolution, M mel
bins, C channels of the front-end; U frames of a chunk.

Its caches are WeNet's, of N + 1 blocks: keys before rotation and values, (N + 1, H, L, 2 D/H), and
what each convolution keeps, (N + 1, 1, D, K); the last of the second has what the front-end keeps.
sherpa-onnx decodes whole chunks alone, and a chunk only once a frame more has come, so audio must
end with silence (sherpa #411); and its features are sbkit's only as `load_online` sets them.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sbkit.audio.io import FULL_SCALE
from sbkit.base.arrays import Counts, Float32s
from sbkit.base.errors import SbkitError
from sbkit.base.imports import require_package
from sbkit.base.units import SAMPLE_RATE, shift_samples
from sbkit.bundle.protocols import ChunkSizes
from sbkit.export.onnx_format import make_onnx, save_onnx
from sbkit.export.parity import Candidate, Case
from sbkit.export.traced import TrainedModel, trace
from sbkit.models.asr import AsrModel, StreamingAsrModel
from sbkit.models.frontend import KEPT, STRIDE
from sbkit.models.streaming import EncoderState, streaming_network
from sbkit.runtime.onnx_model import BatchLogProbs

SUBSAMPLING = STRIDE**2
ONLINE, WENET = "online.onnx", "wenet_ctc"
INPUTS = ("x", "offset", "required_cache_size", "attn_cache", "conv_cache", "attn_mask")
OUTPUTS = ("log_probs", "next_attn_cache", "next_conv_cache")


class OnlineModel(nn.Module):
    """A chunk with WeNet's inputs and outputs."""

    def __init__(self, model: AsrModel, stream: StreamingAsrModel) -> None:
        super().__init__()
        self.parts, self.stream = model.model, stream  # the first owns every parameter
        self.start = stream.start()

    @property
    def fits(self) -> bool:
        """Check whether what the front-end keeps fits into a block's cache."""
        kept = self.start.features.numel() + self.start.hidden.numel()
        return self.start.convolution[0, 0].numel() >= kept

    def metadata(self) -> dict[str, Any]:
        """Return what sherpa-onnx must know of the caches."""
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
        """Return the inputs of a first chunk, of zeros, where everything is seen."""
        left = self.start.attention.shape[2]
        frames = self.stream.step // shift_samples(SAMPLE_RATE)
        mask = torch.ones(1, 1, left + frames // SUBSAMPLING, dtype=torch.bool)
        count, x = torch.tensor([left]), torch.zeros(1, frames, self.start.features.shape[2])
        return x, count, count, *self._pack(self.start), mask

    def forward(
        self,
        x: Tensor,
        offset: Tensor,
        required_cache_size: Tensor,
        attn_cache: Tensor,
        conv_cache: Tensor,
        attn_mask: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Score every token at every frame: (1, T, M) -> (1, U, V)."""
        state = self._unpack(attn_cache, conv_cache, attn_mask)
        lengths = torch.full((1,), x.shape[1])
        log_probs, _, state = self.stream.forward_features(x, lengths, state)
        return log_probs, *self._pack(state)

    def _unpack(self, attention: Tensor, convolution: Tensor, mask: Tensor) -> EncoderState:
        mels, channels = self.start.features.shape[2], self.start.hidden.shape[2]
        kept = convolution[-1].flatten()[: KEPT * (mels + channels)].view(1, KEPT, -1)
        _, blocks, left, _, heads, size = self.start.attention.shape
        keys = attention[:-1].reshape(blocks, heads, left, 2, size)
        return EncoderState(
            frames=mask[:, 0, : attention.shape[2]].sum(-1),
            features=kept[..., :mels],
            hidden=kept[..., mels:],
            attention=keys.permute(0, 2, 3, 1, 4).unsqueeze(0),
            convolution=convolution[:-1, 0].transpose(1, 2).unsqueeze(0),
        )

    def _pack(self, state: EncoderState) -> tuple[Tensor, Tensor]:
        keys = state.attention[0].permute(0, 3, 1, 2, 4).flatten(3)  # (N, H, L, 2 D/H)
        blocks = state.convolution[0].transpose(1, 2).unsqueeze(1)  # (N, 1, D, K)
        kept = torch.cat([state.features, state.hidden], 2).flatten()
        kept = nn.functional.pad(kept, (0, blocks[0].numel() - kept.shape[0]))
        last = kept.view(1, *blocks.shape[1:])
        return torch.cat([keys, torch.zeros_like(keys[:1])]), torch.cat([blocks, last])


def write_online(trained: TrainedModel, folder: Path, tokens: Path) -> Candidate:
    """Write the model; raises SbkitError where WeNet's caches cannot hold its state."""
    network, bundle = trained.bundle.model.network, trained.bundle
    stream = streaming_network(network)
    assert isinstance(stream, StreamingAsrModel)
    module, sizes = OnlineModel(network, stream).eval(), bundle.model.chunks
    assert sizes is not None
    chunk, left = stream.step // bundle.model.samples_per_frame, module.start.attention.shape[2]
    if not module.fits or left % chunk:
        raise SbkitError(
            "A model for sherpa-onnx's online recognizer must have a left_ms of whole chunks, and "
            "kernel_size // 2 * d_model numbers for what the front-end keeps, 3 * (n_mels + "
            "cnn_channels), but has not. Raise these, or leave the format out."
        )
    program = trace(module, *module.example(), free=({},) * len(INPUTS))
    graph = make_onnx(program, INPUTS, OUTPUTS)
    save_onnx(
        graph, folder / ONLINE, module.metadata() | {"vocab_size": bundle.tokenizer.vocab_size}
    )
    recognizer = load_online(folder / ONLINE, tokens, chunk=chunk, left_chunks=left // chunk)
    session = require_package("onnxruntime", extra="export").InferenceSession(folder / ONLINE)
    return Candidate(
        name=f"{WENET}, online",
        files=(ONLINE,),
        log_probs=partial(_run_clips, network, module, session),
        transcribe=partial(_transcribe, recognizer, sizes.shortest),
        prepare=partial(_with_silence, sizes),
    )


def load_online(model: Path, tokens: Path, *, chunk: int = 16, left_chunks: int = 4) -> Any:
    """Load the model with sbkit's features, for which sherpa-onnx has no public method."""
    made = require_package("sherpa_onnx", extra="export").online_recognizer
    wenet = made.OnlineWenetCtcModelConfig(
        model=str(model), chunk_size=chunk, num_left_chunks=left_chunks
    )
    # By itself: filters up to 7600 Hz, and windows that reach beyond both ends.
    features = made.FeatureExtractorConfig(high_freq=0, snip_edges=True)
    config = made.OnlineRecognizerConfig(
        feat_config=features,
        model_config=made.OnlineModelConfig(wenet_ctc=wenet, tokens=str(tokens), num_threads=1),
        enable_endpoint=False,
        decoding_method="greedy_search",
    )
    return made._Recognizer(config)


def _with_silence(sizes: ChunkSizes, case: Case) -> Case:
    """Let silence follow each clip, so that its last chunk is whole."""
    missing = sizes.window - case.lengths
    lengths = case.lengths + np.maximum(missing, missing % sizes.step)
    more = max(0, int(lengths.max()) - case.audio.shape[1])
    return replace(case, audio=np.pad(case.audio, ((0, 0), (0, more))), lengths=lengths)


def _transcribe(recognizer: Any, frame: int, clips: Sequence[Float32s]) -> list[str]:
    texts = []
    for clip in clips:
        stream = recognizer.create_stream()
        # A chunk is decoded once there is a frame more.
        stream.accept_waveform(SAMPLE_RATE, np.pad(clip, (0, frame)))
        while recognizer.is_ready(stream):
            recognizer.decode_stream(stream)
        texts.append(str(recognizer.get_result(stream).text))
    return texts


@torch.inference_mode()
def _run_clips(
    network: AsrModel,
    module: OnlineModel,
    session: Any,
    audio: Float32s,
    lengths: Counts,
) -> BatchLogProbs:
    """Run the graph on whole clips with our own features: (B, S), (B,) -> (B, U, V), (B,)."""
    counts = network.encoder.subsampling.count(lengths)
    found = list[Float32s]()
    for row, count in zip(audio, lengths.tolist(), strict=True):
        clip = torch.from_numpy(row[:count]).unsqueeze(0) * FULL_SCALE
        features, _ = module.stream.features(clip, torch.tensor([clip.shape[1]]))
        x, *rest, mask = (each.numpy() for each in module.example())
        chunk, left, parts = x.shape[1], int(rest[1][0]), list[Float32s]()
        for number, first in enumerate(range(0, features.shape[1], chunk)):
            seen = number * (mask.shape[2] - left)
            mask[..., :left] = np.arange(left) >= left - seen
            inputs = (features[:, first : first + chunk].numpy(), *rest, mask)
            scores, *caches = session.run(None, dict(zip(INPUTS, inputs, strict=True)))
            rest[2:] = caches
            parts.append(scores[0])
        found.append(np.concatenate(parts))
    longest = max(map(len, found))
    padded = [np.pad(each, ((0, longest - len(each)), (0, 0))) for each in found]
    return BatchLogProbs(np.stack(padded), counts)
