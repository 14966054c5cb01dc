"""The graphs of a Whisper's decoder as ONNX: its state is among the inputs and outputs.

Legend: B clips, S samples, L tokens, U frames, D width, H heads, V vocabulary.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from sbkit.audio.io import FULL_SCALE
from sbkit.base.arrays import Counts, Float32s
from sbkit.export.onnx_graph import WRITERS, make_onnx
from sbkit.export.parity import Candidate, pad_frames
from sbkit.export.recognizer_texts import PARITY_TEXT, greedy_texts
from sbkit.export.trace import EXAMPLE_BATCH, NetworkModule, trace
from sbkit.models.pretrained.whisper import DecoderState, Memory
from sbkit.runtime.onnx_model import MODEL_FILES, SETTINGS_JSON, BatchLogProbs, OnnxModel
from sbkit.runtime.onnx_whisper import OnnxDecoder
from sbkit.runtime.torch_model import TorchModel
from sbkit.tasks.asr.bundle import AsrBundle


class DecoderFrames(NetworkModule):
    """Compute the decoder's memories of frames: (B, U, D) -> 2 x (layers, B, H, U, D/H)."""

    def forward(self, states: Tensor) -> tuple[Tensor, ...]:
        layers = self.network.encoder.backbone.module.decoder.layers
        return _stacked([layer.encoder_attn.remember(states) for layer in layers])


class DecoderTokens(NetworkModule):
    """Decode tokens (B, L) of clips without padding: memories -> (B, L, V), token memories."""

    def forward(self, tokens: Tensor, *memories: Tensor) -> tuple[Tensor, ...]:
        keys, values, *token_memories = memories
        frame_state, token_state = (
            tuple(map(Memory, *map(torch.unbind, pair)))
            for pair in ((keys, values), token_memories)
        )
        visible = torch.ones(1, 1, 1, keys.shape[3], dtype=torch.bool)
        decoder: Any = self.network.encoder.backbone.module.decoder
        decoded, state = decoder(tokens, DecoderState(visible, frame_state, token_state))
        return self.network.seq_lin(decoded), *_stacked(state.tokens)


def _stacked(memories: Sequence[Memory]) -> tuple[Tensor, ...]:
    return tuple(torch.stack(tensors) for tensors in zip(*memories, strict=True))


def write_decoder(
    bundle: AsrBundle[TorchModel], folder: Path, metadata: Mapping[str, object]
) -> Iterator[Candidate]:
    """Write the graphs of the decoder, which decode from the states of ``model.onnx``."""
    network = bundle.model.network
    metadata = {**metadata, SETTINGS_JSON: json.dumps(asdict(network.generation))}
    tokens = torch.zeros(EXAMPLE_BATCH, 4, dtype=torch.int64)
    width = network.encoder.backbone.module.decoder.embed_tokens.embedding_dim
    states = torch.zeros(EXAMPLE_BATCH, 9, width)
    frames = DecoderFrames(network).eval()
    memories = frames(states)
    example = (tokens, *memories, *(memory[:, :, :, :5] for memory in memories))
    memory_shape = {1: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    shapes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, (memory_shape,) * 4)
    frame_names = ["frame_keys", "frame_values"]
    token_names = ["token_keys", "token_values"]
    program = trace(DecoderTokens(network).eval(), *example, dynamic_shapes=shapes)
    outputs = ["logits", *(f"next_{name}" for name in token_names)]
    graphs = [
        make_onnx(trace(frames, states), ["states"], frame_names),
        make_onnx(program, ["tokens", *frame_names, *token_names], outputs),
    ]
    assert bundle.decoder_tokenizer is not None
    text = bundle.decoder_tokenizer.encode(PARITY_TEXT)
    for precision, files in OnnxDecoder.files.items():
        for file, graph in zip(files, graphs, strict=True):
            WRITERS[precision](graph, folder / file, metadata)
        model = OnnxModel((folder / MODEL_FILES[precision]).read_bytes())
        decoder = OnnxDecoder(*(OnnxModel((folder / file).read_bytes()) for file in files))
        model.decoder = decoder
        yield Candidate(
            name=f"decoder, {precision}",
            files=files,
            is_exact=precision == "fp32",
            run=partial(_decoder_log_probs, model, decoder, text),
            run_trained=partial(_trained_decoder_log_probs, network, text),
            texts=partial(greedy_texts, bundle.with_model(model)),
            trained_texts=partial(greedy_texts, bundle),
        )


def _decoder_log_probs(
    model: OnnxModel, decoder: OnnxDecoder, text: Sequence[int], audio: Float32s, lengths: Counts
) -> BatchLogProbs:
    """Compute log-probabilities of a text's tokens in every clip: -> (B, L + 1, V), (B,)."""
    _, frames, states = model.run(audio, lengths)
    clips = (clip[:count] for clip, count in zip(states, frames, strict=True))
    return pad_frames([decoder.log_probs(text, decoder.remember(clip)) for clip in clips])


@torch.inference_mode()
def _trained_decoder_log_probs(
    network: Any, text: Sequence[int], audio: Float32s, lengths: Counts
) -> BatchLogProbs:
    """Compute the same log-probabilities with the trained model."""
    states, frames = network.encode(FULL_SCALE * torch.from_numpy(audio), torch.from_numpy(lengths))
    tokens = torch.tensor([[*text]]).expand(len(audio), -1)
    return pad_frames([*network.decoder_log_probs(tokens, states, frames).numpy()])
