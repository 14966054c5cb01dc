"""Whisper's attention decoder in onnxruntime, which generates texts token by token.

Legend: B clips, U frames, V vocabulary, D width, H heads, N texts, L tokens.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from sbkit.base.arrays import Array, Float32s, Float64s, Int64s
from sbkit.base.files import parsing_errors
from sbkit.decoding.generate import generate
from sbkit.runtime.onnx_model import SETTINGS_JSON, OnnxModel, read_graph
from sbkit.text.decoder_tokenizer import GenerationSettings

# A decoder's memory of frames and of the tokens that it has read: keys and values of frames,
# (layers, B, H, U, D/H), and of tokens, (layers, B, H, L, D/H).
Memories = tuple[Array, ...]


class OnnxDecoder:
    """An attention decoder with its own tokens: one graph reads frames, a second reads tokens.

    Each call of the second graph returns the memories of all tokens so far, so that the next call
    only reads new tokens.
    """

    files: ClassVar = {
        "fp32": ("decoder_frames.onnx", "decoder.onnx"),
        "int8": ("decoder_frames.int8.onnx", "decoder.int8.onnx"),
    }

    def __init__(self, frames: OnnxModel, tokens: OnnxModel) -> None:
        self.graphs = (frames, tokens)
        fix = "Export it again."
        with parsing_errors("An ONNX model", "hold its settings", fix=fix, is_json=True):
            self._settings = GenerationSettings(**json.loads(tokens.metadata[SETTINGS_JSON]))

    @classmethod
    def load(cls, bundle: Path, *, device: str = "cpu", precision: str = "fp32") -> Self:
        """Load the graphs from ``onnx/`` of a bundle."""
        contents = (read_graph(bundle, file) for file in cls.files[precision])
        return cls(*(OnnxModel(content, device=device) for content in contents))

    def remember(self, states: Float32s) -> Memories:
        """Begin to decode the frames of a clip: (U, D)."""
        keys, values = self.graphs[0].run(states[None])
        return keys, values, keys[:, :, :, :0], values[:, :, :, :0]

    def read(self, tokens: Int64s, memories: Memories) -> tuple[Float32s, Memories]:
        """Read tokens (B, L); return the logits of each next token, (B, L, V), and memories."""
        logits, *token_memories = self.graphs[1].run(tokens, *memories)
        return logits, (*memories[:2], *token_memories)

    def log_probs(self, text: Sequence[int], memories: Memories) -> Float32s:
        """Compute the log-probabilities of every next token of a text: (L,) -> (L + 1, V)."""
        start = self._settings.start
        logits, _ = self.read(np.array([[*start, *text]]), memories)
        logits = logits[0, len(start) - 1 :]
        logits = logits - logits.max(1, keepdims=True)
        log_probs: Float32s = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        return log_probs

    def score_texts(self, states: Float32s, texts: Int64s) -> Float64s:
        """Score texts of a clip, one by one, since they share its frames: (U, D), (N, L) -> (N,).

        texts: padded with the end token; each has at least one.
        """
        memories = self.remember(states)
        scores: list[float] = []
        end = self._settings.end
        for text in self._settings.cut(texts):
            tokens = text[: (text == end).argmax()].tolist()
            log_probs = self.log_probs(tokens, memories)
            token_log_probs = log_probs[range(len(tokens) + 1), [*tokens, end]]
            scores.append(float(token_log_probs.sum(dtype=np.float64)))
        return np.array(scores)

    def generate(self, states: Float32s) -> list[int]:
        """Decode a clip greedily: (U, D)."""

        def read(tokens: Int64s, memories: Memories, is_first: bool) -> tuple[Int64s, Memories]:
            logits, memories = self.read(tokens, memories)
            logits = logits[:, -1]
            logits[:, self._settings.suppressed] = -np.inf
            if is_first:
                logits[:, self._settings.suppressed_first] = -np.inf
            return logits.argmax(1), memories

        frames = np.array([len(states)])
        (text,) = generate(read, self.remember(states), frames, self._settings)
        return text
