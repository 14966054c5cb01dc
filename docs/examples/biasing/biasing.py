"""Biasing by phrases: part, task. B utterances, U frames, D width, N phrases, L tokens."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from sbkit.audio.lengths import length_mask
from sbkit.bundle.task import SideField
from sbkit.tasks.asr.task import AsrTask

MAX_TOKENS = 16  # of a phrase


class Biasing(nn.Module):
    """Let the states attend to phrases, of which the first is empty: (B, U, D) -> (B, U, D)."""

    def __init__(self, d_model: int, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.attention = nn.MultiheadAttention(d_model, num_heads=2, batch_first=True)

    def forward(self, x: Tensor, phrases: Tensor, phrases_lengths: Tensor) -> Tensor:
        """Take phrases (B, N, L) as well, filled with token 0, and their numbers (B,)."""
        keys = self.embedding(phrases).mean(2)
        is_padding = ~length_mask(phrases_lengths, keys.shape[1], x.device)
        heard: Tensor = self.attention(x, keys, keys, key_padding_mask=is_padding)[0]
        return x + heard


class BiasedTask(AsrTask):
    """Speech recognition that expects phrases, which commas separate."""

    decodes_frames = True
    side_fields: ClassVar = {"phrases": SideField(default="")}

    def side_inputs(self, fields: Mapping[str, Any], labels: Any) -> dict[str, Any]:
        tokens = [labels.encode(phrase.strip()) for phrase in ["", *fields["phrases"].split(",")]]
        padded = [(ids + [0] * MAX_TOKENS)[:MAX_TOKENS] for ids in tokens]
        return {"phrases": np.array(padded, np.int64)}
