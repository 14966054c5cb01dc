"""Whisper's encoder and decoder, with the tensor names of its files.

Legend: B utterances, T features of 10 ms, U frames of 20 ms, M mel bins, D width, L new tokens, P
earlier ones, H heads, V vocabulary.

Source: Radford et al. 2022. Whisper pads every clip to 30 s. Here a clip keeps its length, and its
padding in a batch is masked from the first convolution on: a training step on clips of 5 s takes
about an eighth of the time. A clip that is padded to 30 s by zeros has the states that Whisper
gives it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sbkit.audio.lengths import Subsampling, length_mask
from sbkit.models.layers import Dropout, FrameConv
from sbkit.models.pretrained.blocks import ACTIVATIONS, Attention, Config, layer_norm
from sbkit.models.transformer import attend

WHISPER_KERNEL, WHISPER_STRIDE = 3, 2  # of the second convolution
SINUSOID_BASE = 10_000.0


class WhisperConvs(nn.Module):
    """Convolve twice, and halve the frames: (B, T, M), (B,) -> (B, U, D), (B,)."""

    subsampling = Subsampling(WHISPER_STRIDE, 2 - WHISPER_KERNEL + WHISPER_STRIDE)

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.conv1 = FrameConv(config["num_mel_bins"], width, WHISPER_KERNEL, padding=1)
        self.conv2 = FrameConv(width, width, WHISPER_KERNEL, WHISPER_STRIDE, padding=1)
        self.activation = ACTIVATIONS[config["hidden_act"]]

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        mask = length_mask(lengths, features.shape[1], features.device).unsqueeze(-1)
        x = self.activation(self.conv1(features)) * mask
        return self.activation(self.conv2(x)), self.subsampling.count(lengths)


class WhisperBody(nn.Module):
    """Attention blocks over frames, with the methods of `Wav2Vec2`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_positions = StoredPositions(config)
        depth = config["num_hidden_layers"]
        self.layers = nn.ModuleList(WhisperLayer(config) for _ in range(depth))
        self.layer_norm = layer_norm(config)

    def project(self, x: Tensor) -> Tensor:
        return x

    def normalize_output(self, x: Tensor) -> Tensor:
        return self.layer_norm(x)


class StoredPositions(nn.Module):
    """Add the positions of the file, which are sinusoids and not trained: (B, U, D) -> same."""

    weight: Tensor  # (positions, D)

    def __init__(self, config: Config) -> None:
        super().__init__()
        count = config["max_source_positions"]
        self.register_buffer("weight", sinusoids(count, config["hidden_size"]))
        self.dropout = Dropout(config["hidden_dropout"])

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, None]:
        # Frames after the last position share it: a padded batch may be longer. `check_positions`
        # refuses such utterances of a run, and the transcriber cuts them; `score` does not.
        positions = torch.arange(x.shape[1], device=x.device).clamp(max=len(self.weight) - 1)
        return self.dropout(x + self.weight[positions]), None  # in float32, also with autocast


def sinusoids(count: int, width: int) -> Tensor:
    """Return the positions that every Whisper has: (count, D)."""
    half = width // 2
    rates = SINUSOID_BASE ** (-torch.arange(half) / (half - 1))
    angles = torch.arange(count).unsqueeze(1) * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


class WhisperLayer(nn.Module):
    """Attention and a feed-forward network, each after a norm: (B, U, D), (B, U) -> (B, U, D)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.self_attn = Attention(config)
        self.self_attn.k_proj = nn.Linear(width, width, bias=False)
        self.self_attn_layer_norm = layer_norm(config)
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)
        self.final_layer_norm = layer_norm(config)
        self.activation = ACTIVATIONS[config["hidden_act"]]
        self.dropout = Dropout(config["hidden_dropout"])
        self.activation_dropout = Dropout(config["activation_dropout"])

    def forward(self, x: Tensor, mask: Tensor, positions: None) -> Tensor:
        x = self.dropout.add(x, self.self_attn(self.self_attn_layer_norm(x), mask, positions))
        inner = self.activation(self.fc1(self.final_layer_norm(x)))
        return self.dropout.add(x, self.fc2(self.activation_dropout(inner)))


# ---- the decoder


class Memory(NamedTuple):
    """The keys and values that an attention reads: 2 x (B, H, K, D/H)."""

    keys: Tensor
    values: Tensor


class DecoderState(NamedTuple):
    """The decoder's state of an utterance: its frames, and the tokens that it has read.

    visible: which frames are no padding, (B, 1, 1, U).
    frames, tokens: the memories of each layer.
    """

    visible: Tensor
    frames: tuple[Memory, ...]
    tokens: tuple[Memory, ...]


class TokenAttention(nn.Module):
    """Attend to earlier tokens, or to frames: (B, L, D) -> (B, L, D)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.heads: int = config["decoder_attention_heads"]
        self.p: float = config["attention_dropout"]
        self.q_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.k_proj, self.v_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width)

    def remember(self, x: Tensor) -> Memory:
        """Compute the keys and values of tokens or frames: (B, K, D) -> Memory."""
        return Memory(self._by_head(self.k_proj(x)), self._by_head(self.v_proj(x)))

    def forward(self, x: Tensor, memory: Memory, visible: Tensor) -> Tensor:
        """visible: which of the memory each token may read, broadcast to (B, H, L, K)."""
        dropout = self.p if self.training else 0.0
        return self.out_proj(
            attend(self._by_head(self.q_proj(x)), *memory, visible, dropout=dropout)
        )

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class WhisperDecoderLayer(nn.Module):
    """Attend to tokens and to frames, and project, each after a norm: (B, L, D) -> (B, L, D)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["decoder_ffn_dim"]
        self.self_attn, self.encoder_attn = TokenAttention(config), TokenAttention(config)
        self.self_attn_layer_norm = layer_norm(config)
        self.encoder_attn_layer_norm = layer_norm(config)
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)
        self.final_layer_norm = layer_norm(config)
        self.activation = ACTIVATIONS[config["hidden_act"]]
        self.dropout = Dropout(config["hidden_dropout"])

    def forward(
        self, x: Tensor, earlier: Memory | None, frames: Memory, masks: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Memory]:
        """Return the output, and the memory of all tokens so far."""
        causal, visible = masks
        normed = self.self_attn_layer_norm(x)
        tokens = self.self_attn.remember(normed)
        if earlier is not None:
            tokens = Memory(*(torch.cat(pair, 2) for pair in zip(earlier, tokens, strict=True)))
        x = self.dropout.add(x, self.self_attn(normed, tokens, causal))
        x = self.dropout.add(x, self.encoder_attn(self.encoder_attn_layer_norm(x), frames, visible))
        inner = self.activation(self.fc1(self.final_layer_norm(x)))
        return self.dropout.add(x, self.fc2(inner)), tokens


class WhisperDecoder(nn.Module):
    """Read tokens after the frames of an utterance: (B, L) and a state -> (B, L, D) and a state."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], width)
        self.embed_positions = nn.Embedding(config["max_target_positions"], width)
        depth = config["decoder_layers"]
        self.layers = nn.ModuleList(WhisperDecoderLayer(config) for _ in range(depth))
        self.layer_norm = layer_norm(config)
        self.dropout = Dropout(config["hidden_dropout"])

    def start(self, states: Tensor, lengths: Tensor) -> DecoderState:
        """Begin to decode: (B, U, D), (B,)."""
        visible = length_mask(lengths, states.shape[1], states.device)[:, None, None, :]
        attentions: list[Any] = [layer.encoder_attn for layer in self.layers]
        frames = tuple(attention.remember(states) for attention in attentions)
        return DecoderState(visible, frames, ())

    def forward(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Read the next tokens."""
        read = state.tokens[0].keys.shape[2] if state.tokens else 0
        count = tokens.shape[1]
        positions = torch.arange(read, read + count, device=tokens.device)
        causal = positions[:, None] >= torch.arange(read + count, device=tokens.device)
        x = self.dropout(self.embed_tokens(tokens) + self.embed_positions(positions))
        memories: list[Memory] = []
        for index, layer in enumerate(self.layers):
            earlier = state.tokens[index] if state.tokens else None
            x, memory = layer(x, earlier, state.frames[index], (causal, state.visible))
            memories.append(memory)
        return self.layer_norm(x), state._replace(tokens=tuple(memories))
