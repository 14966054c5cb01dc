"""The Transformer: an encoder of Conformer or Transformer blocks, and an optional decoder.

Legend: B utterances, N tokens, H heads, U frames of 40 or 80 ms, L frames of left context, C frames
on each side that a convolution sees, K keys (frames or tokens that are attended to), D model width.

The Transformer consists of plain parts (Linear, scaled_dot_product_attention with rotary positions,
a depthwise Conv1d, LayerNorm), so that it exports and compiles. Every block masks the padding, so
the output for an utterance does not depend on its batch.
Sources: Gulati et al. 2020 (Conformer), Su et al. 2021 (rotary positions).
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Annotated, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from sbkit.audio.lengths import length_mask
from sbkit.base.errors import ConfigError
from sbkit.base.ranges import Count, PositiveCount
from sbkit.base.ranges import Dropout as DropoutRate
from sbkit.base.units import SHIFT_MS
from sbkit.models.layers import Dropout, FrameConv
from sbkit.models.streaming import BlockState, State, Streaming, StreamingConfig, last_frames

ROTARY_BASE = 10_000.0
NON_CUDNN_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

Rotation = tuple[Tensor, Tensor]  # cosine and sine of the positions, from `rotary_cos_sin`


class FrameContext(NamedTuple):
    """The facts about the frames of a batch that all blocks of an encoder need, computed once."""

    mask: Tensor  # true within an utterance: (B, U)
    # What each frame attends to, from `additive_mask`: (B, 1, 1, K) or (B, 1, U, U)
    visible: Tensor | None
    rotation: Rotation
    chunk_frames: int | None = None  # no frame sees past the end of its chunk


class Transformer(nn.Module):
    """Encode frames and, if there are decoder layers, decode tokens against them.

    encoder_module: conformer or transformer.
    kernel_size: frames that a Conformer's convolution covers.
    subsampling: the front-end's, from which the frames of `streaming` are counted.
    gradient_checkpointing: recompute the activations of each encoder block in the backward pass,
        with the same random numbers: less memory, a third more time.
    streaming: {chunk_ms: 640, left_ms: 2560} limits each frame to its chunk and the left context.
        In training, each step draws a chunk size. `forward_chunk` computes the output of `forward`
        chunk by chunk.

    >>> encoder = Transformer(d_model=16, nhead=2, d_ffn=32, num_encoder_layers=2)
    >>> states, _ = encoder(torch.rand(1, 25, 16), torch.tensor([25]))
    >>> states.shape
    torch.Size([1, 25, 16])
    """

    decoding_modules = ("embedding", "decoder", "decoder_norm")

    def __init__(
        self,
        *,
        d_model: PositiveCount,
        nhead: PositiveCount,
        d_ffn: PositiveCount,
        num_encoder_layers: PositiveCount,
        num_decoder_layers: Count = 0,
        encoder_module: Annotated[
            Literal["conformer", "transformer"], "conformer is usual."
        ] = "conformer",
        kernel_size: PositiveCount = 15,
        dropout: DropoutRate = 0.1,
        vocab_size: int | None = None,
        gradient_checkpointing: bool = False,
        subsampling: PositiveCount = 4,
        streaming: Streaming = None,
    ) -> None:
        super().__init__()
        sizes = {"d_model": d_model, "nhead": nhead, "d_ffn": d_ffn}
        self.d_model = d_model
        self.nhead = nhead
        self.conv_context = kernel_size // 2 if encoder_module == "conformer" else 0
        self.gradient_checkpointing = gradient_checkpointing
        self.frame_ms = SHIFT_MS * subsampling
        self.streaming: StreamingConfig | None = None
        if streaming is not None:
            self.streaming = StreamingConfig.parse(streaming, frame_ms=self.frame_ms)
        self.dropout = Dropout(dropout)
        self.encoder = nn.ModuleList(
            make_block(encoder_module, sizes, kernel_size=kernel_size, dropout=dropout)
            for _ in range(num_encoder_layers)
        )
        self.encoder_norm = nn.LayerNorm(d_model)
        self.decoder = nn.ModuleList(
            DecoderBlock(**sizes, dropout=dropout) for _ in range(num_decoder_layers)
        )
        if num_decoder_layers:
            if vocab_size is None:
                raise ConfigError(
                    f"{num_decoder_layers} decoder layers need `vocab_size`. "
                    "Write `vocab_size: !ref <tokenizer.vocab_size>`."
                )
            self.embedding = nn.Embedding(vocab_size, d_model)
            self.decoder_norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encode frames: (B, U, D), (B,) -> (B, U, D), (B,)."""
        frames = self._frames(x, lengths)
        *_, last_output = self._layer_outputs(x, frames)
        return self.encoder_norm(last_output), lengths

    def encode_with_intermediate(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states after half of the blocks, and after all: -> 2 x (B, U, D).

        Both pass the same norm, so that one head can read either (Lee and Watanabe 2021).
        """
        frames = self._frames(x, lengths)
        outputs = list(self._layer_outputs(x, frames))
        halfway = outputs[len(self.encoder) // 2]
        return self.encoder_norm(halfway), self.encoder_norm(outputs[-1])

    def _frames(self, x: Tensor, lengths: Tensor) -> FrameContext:
        num_frames = x.shape[1]
        streaming = self.streaming
        rotation = rotary_cos_sin(num_frames, self.d_model // self.nhead, x.device)
        mask = length_mask(lengths, num_frames, x.device)  # (B, U)
        if streaming is not None and self.training:
            streaming = streaming.draw()
        visible = mask[:, None, None] if streaming is None else streaming.visible(mask)
        chunk_frames = None if streaming is None else streaming.chunk_frames
        return FrameContext(mask, additive_mask(visible, x), rotation, chunk_frames)

    def _layer_outputs(self, x: Tensor, frames: FrameContext) -> Iterator[Tensor]:
        """Yield the input of the first block, then the output of each block."""
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        x = self.dropout(x)
        yield x
        for block in self.encoder:
            run = partial(checkpoint, block, use_reentrant=False) if recompute else block
            x = run(x, frames)
            yield x

    @property
    def chunk_frames(self) -> int | None:
        """The frames of a chunk; None if the encoder sees whole clips."""
        return None if self.streaming is None else self.streaming.chunk_frames

    def start(self) -> State:
        """Return the number of frames so far, and what each block keeps of the last ones.

        attention: keys before rotation, and values, (1, N, L, 2, H, D/H). convolution: the last
        inputs of the convolutions, (1, N, K, D).
        """
        assert self.streaming is not None
        zeros = self.encoder_norm.weight.new_zeros
        num_blocks = len(self.encoder)
        left_frames = self.streaming.left_frames
        head_size = self.d_model // self.nhead
        return {
            "frames": zeros(1, dtype=torch.int64),
            "attention": zeros(1, num_blocks, left_frames, 2, self.nhead, head_size),
            "convolution": zeros(1, num_blocks, self.conv_context, self.d_model),
        }

    def forward_chunk(
        self, x: Tensor, lengths: Tensor, state: State
    ) -> tuple[Tensor, Tensor, State]:
        """Encode a chunk of each session: (B, U, D), (B,) -> (B, U, D), (B,), state.

        lengths: frames of each chunk; fewer than U only in the last chunk of a session.
        """
        device = x.device
        mask = length_mask(lengths, x.shape[1], device)  # (B, U)
        left_frames = state["attention"].shape[2]
        num_missing = left_frames - state["frames"].unsqueeze(1)  # at the start of a session
        has_past = torch.arange(left_frames, device=device) >= num_missing  # (B, L)
        visible = torch.cat([has_past, mask], 1)[:, None, None]  # (B, 1, 1, L + U)
        rotation = rotary_cos_sin(visible.shape[-1], self.d_model // self.nhead, device)
        frames = FrameContext(mask, additive_mask(visible, x), rotation)
        block_states: list[BlockState] = []
        encoder = cast("Iterable[EncoderBlock]", self.encoder)
        for index, block in enumerate(encoder):
            past = BlockState(state["attention"][:, index], state["convolution"][:, index])
            x, block_state = block.forward_chunk(x, frames, past)
            block_states.append(block_state)
        next_state = {
            "frames": state["frames"] + lengths.to(device),
            "attention": torch.stack([block.attention for block in block_states], 1),
            "convolution": torch.stack([block.convolution for block in block_states], 1),
        }
        return self.encoder_norm(x), lengths, next_state

    def decode(self, tokens: Tensor, states: Tensor, lengths: Tensor) -> Tensor:
        """Decode with teacher forcing: (B, N) tokens, (B, U, D), (B,) frames -> (B, N, D).

        Attention is causal, so no token sees the padding after it.
        """
        if not self.decoder:
            raise ConfigError(
                "The Transformer has no decoder: `num_decoder_layers` is 0. Raise it, or train "
                "with `ctc_weight: 1.0` and decode with `attention_rescoring: False`.",
                keys=("num_decoder_layers",),
            )
        mask = length_mask(lengths, states.shape[1], states.device)
        visible = additive_mask(mask[:, None, None], states)
        rotation = rotary_cos_sin(tokens.shape[1], self.d_model // self.nhead, tokens.device)
        x = self.dropout(self.embedding(tokens))
        for block in self.decoder:
            x = block(x, states, visible, rotation)
        return self.decoder_norm(x)


class ConformerBlock(nn.Module):
    """Half a feed-forward, attention, convolution, half a feed-forward: (B, U, D) -> (B, U, D)."""

    def __init__(
        self, *, d_model: int, nhead: int, d_ffn: int, kernel_size: int, dropout: float
    ) -> None:
        super().__init__()
        self.feed_forward1 = FeedForward(d_model=d_model, d_ffn=d_ffn, dropout=dropout)
        self.attention = SelfAttention(d_model=d_model, nhead=nhead, dropout=dropout)
        self.convolution = Convolution(d_model=d_model, kernel_size=kernel_size, dropout=dropout)
        self.feed_forward2 = FeedForward(d_model=d_model, d_ffn=d_ffn, dropout=dropout)

    def forward(self, x: Tensor, frames: FrameContext) -> Tensor:
        x = self.feed_forward1(x, weight=0.5)
        x = self.attention(x, frames.visible, frames.rotation)
        x = self.convolution(x, frames)
        return self.feed_forward2(x, weight=0.5)

    def forward_chunk(
        self, x: Tensor, frames: FrameContext, past: BlockState
    ) -> tuple[Tensor, BlockState]:
        x = self.feed_forward1(x, weight=0.5)
        x, keys = self.attention.forward_chunk(x, frames.visible, frames.rotation, past.attention)
        x, convolution = self.convolution.forward_chunk(x, frames.mask, past.convolution)
        return self.feed_forward2(x, weight=0.5), BlockState(keys, convolution)


class TransformerBlock(nn.Module):
    """Attention, feed-forward: (B, U, D) -> (B, U, D)."""

    def __init__(self, *, d_model: int, nhead: int, d_ffn: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(d_model=d_model, nhead=nhead, dropout=dropout)
        self.feed_forward = FeedForward(d_model=d_model, d_ffn=d_ffn, dropout=dropout)

    def forward(self, x: Tensor, frames: FrameContext) -> Tensor:
        return self.feed_forward(self.attention(x, frames.visible, frames.rotation))

    def forward_chunk(
        self, x: Tensor, frames: FrameContext, past: BlockState
    ) -> tuple[Tensor, BlockState]:
        x, keys = self.attention.forward_chunk(x, frames.visible, frames.rotation, past.attention)
        return self.feed_forward(x), BlockState(keys, past.convolution)


EncoderBlock = ConformerBlock | TransformerBlock


def make_block(
    encoder_module: str, sizes: Mapping[str, int], *, kernel_size: int, dropout: float
) -> EncoderBlock:
    """Make a block of the encoder; raises ConfigError for an unknown `encoder_module`."""
    if encoder_module == "transformer":
        return TransformerBlock(**sizes, dropout=dropout)
    if encoder_module == "conformer":
        return ConformerBlock(**sizes, kernel_size=kernel_size, dropout=dropout)
    raise ConfigError(
        f"`encoder_module` must be conformer or transformer, but is {encoder_module!r}."
    )


class DecoderBlock(nn.Module):
    """Attention to earlier tokens, attention to the frames, feed-forward: (B, N, D) -> same."""

    def __init__(self, *, d_model: int, nhead: int, d_ffn: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(d_model=d_model, nhead=nhead, dropout=dropout)
        self.cross_attention = CrossAttention(d_model=d_model, nhead=nhead, dropout=dropout)
        self.feed_forward = FeedForward(d_model=d_model, d_ffn=d_ffn, dropout=dropout)

    def forward(self, x: Tensor, states: Tensor, visible: Tensor, rotation: Rotation) -> Tensor:
        x = self.attention(x, None, rotation)
        x = self.cross_attention(x, states, visible)
        return self.feed_forward(x)


class FeedForward(nn.Sequential):
    """Project up, apply SiLU, project down, and add: (..., D) -> (..., D)."""

    def __init__(self, *, d_model: int, d_ffn: int, dropout: float) -> None:
        super().__init__(
            nn.LayerNorm(d_model),
            nn.Linear(d_model, d_ffn),
            nn.SiLU(),
            Dropout(dropout),
            nn.Linear(d_ffn, d_model),
            Dropout(dropout),
        )

    def forward(self, x: Tensor, weight: float = 1.0) -> Tensor:
        *layers, dropout = self
        y = x
        for layer in layers:
            y = layer(y)
        return cast("Dropout", dropout).add(x, y, weight)  # x + weight * dropout(y)


class Convolution(nn.Module):
    """Mix neighboring frames per channel, and add: (B, U, D) -> (B, U, D).

    Gate, depthwise convolution, LayerNorm (BatchNorm would let an utterance see its batch).
    """

    def __init__(self, *, d_model: int, kernel_size: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.pointwise_conv1 = nn.Linear(d_model, 2 * d_model)
        self.depthwise_conv = DepthwiseConv(d_model, kernel_size)
        self.depthwise_norm = nn.LayerNorm(d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, frames: FrameContext) -> Tensor:
        """Convolve; frames in the padding count as zero."""
        gated = self._gate(x, frames.mask)
        return self._add(x, self.depthwise_conv(gated, frames.chunk_frames))

    def forward_chunk(self, x: Tensor, mask: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve a chunk after the frames of ``past``, (B, C, D)."""
        y, past = self.depthwise_conv.forward_chunk(self._gate(x, mask), past)
        return self._add(x, y), past

    def _gate(self, x: Tensor, mask: Tensor) -> Tensor:
        return nn.functional.glu(self.pointwise_conv1(self.norm(x))) * mask.unsqueeze(-1)

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        return self.dropout.add(x, self.out_proj(silu(self.depthwise_norm(y))))


class DepthwiseConv(FrameConv):
    """Convolve each channel over neighboring frames: (B, U, D) -> same."""

    def __init__(self, channels: int, kernel_size: PositiveCount) -> None:
        if kernel_size % 2 == 0:
            raise ConfigError(f"`kernel_size` must be odd, but is {kernel_size}.")
        super().__init__(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels)

    def forward(self, x: Tensor, chunk_frames: int | None = None) -> Tensor:
        """Convolve; with ``chunk_frames``, no frame sees past the end of its chunk.

        It convolves all frames at once, then subtracts what leaked in from later chunks. Convolving
        each chunk with the C frames before it took 1.5 times as long.
        """
        convolved = super().forward(x)
        if chunk_frames is None:
            return convolved
        num_frames = x.shape[1]
        half_kernel = self.kernel_size[0] // 2
        frames_into_chunk = torch.arange(num_frames, device=x.device) % chunk_frames
        frames_left_in_chunk = chunk_frames - frames_into_chunk  # with the frame itself: (U,)
        padded = nn.functional.pad(x, (0, 0, 0, half_kernel))
        for ahead in range(1, half_kernel + 1):
            is_past_chunk = (frames_left_in_chunk <= ahead).unsqueeze(1)
            leaked = padded[:, ahead : ahead + num_frames] * is_past_chunk
            weight = self.weight[:, 0, half_kernel + ahead]
            convolved = torch.addcmul(convolved, leaked, weight, value=-1)
        return convolved

    def forward_chunk(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve a chunk after the frames of ``past``, (B, C, D)."""
        frames = torch.cat([past, x], 1)
        num_past = past.shape[1]
        return self(frames)[:, num_past:], last_frames(frames, num_past)


class SelfAttention(nn.Module):
    """Attend with rotary positions, and add: (B, U, D) -> (B, U, D); causal without a mask."""

    def __init__(self, *, d_model: int, nhead: int, dropout: float) -> None:
        if d_model % (2 * nhead) != 0:
            raise ConfigError(
                "`d_model` must be a multiple of twice `nhead`, but `d_model` is "
                f"{d_model} and `nhead` is {nhead}."
            )
        super().__init__()
        self.nhead = nhead
        self.norm = nn.LayerNorm(d_model)
        self.qkv_proj = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None, rotation: Rotation) -> Tensor:
        """Attend where ``mask``, from `additive_mask`, allows: (B, 1, 1, U) or (B, 1, U, U).

        Without a mask, each frame attends to itself and the frames before it.
        """
        heads = self.qkv_proj(self.norm(x)).unflatten(-1, (3, self.nhead, -1))  # (B, U, 3, H, D/H)
        query_key, value = heads.split((2, 1), dim=-3)  # its backward pass makes only one copy
        query, key = rotate(query_key, *rotation).unbind(-3)
        return self._attend(x, query, key, value.squeeze(-3), mask)

    def forward_chunk(
        self, x: Tensor, mask: Tensor | None, rotation: Rotation, past: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attend to the past, (B, L, 2, H, D/H), and the chunk, where ``mask`` allows.

        The past holds keys that are not rotated yet. Each chunk counts positions from the start of
        its past, because attention depends on distances only.

        mask: (B, 1, 1, L + U).
        """
        heads = self.qkv_proj(self.norm(x)).unflatten(-1, (3, self.nhead, -1))  # (B, U, 3, H, D/H)
        query = heads[:, :, :1]  # (B, U, 1, H, D/H)
        key_value = torch.cat([past, heads[:, :, 1:]], 1)
        key = key_value[:, :, :1]  # (B, L + U, 1, H, D/H)
        value = key_value[:, :, 1:]
        num_past = past.shape[1]
        cosine, sine = rotation  # of L + U positions
        query = rotate(query, cosine[num_past:], sine[num_past:])
        key = rotate(key, cosine, sine)
        y = self._attend(x, query.squeeze(2), key.squeeze(2), value.squeeze(2), mask)
        return y, last_frames(key_value, num_past)

    def _attend(
        self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Attend, and add: query (B, U, H, D/H), key and value (B, K, H, D/H) -> (B, U, D)."""
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        return self.dropout.add(x, self.out_proj(attend(query, key, value, mask)))


class CrossAttention(nn.Module):
    """Attend from tokens to frames, and add: (B, N, D), (B, U, D) -> (B, N, D)."""

    def __init__(self, *, d_model: int, nhead: int, dropout: float) -> None:
        super().__init__()
        self.nhead = nhead
        self.norm = nn.LayerNorm(d_model)
        self.q_proj = nn.Linear(d_model, d_model)
        self.kv_proj = nn.Linear(d_model, 2 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, states: Tensor, mask: Tensor) -> Tensor:
        """Attend to the frames that a mask of `additive_mask` allows, (B, 1, 1, U)."""
        query = self.q_proj(self.norm(x)).unflatten(-1, (self.nhead, -1)).transpose(1, 2)
        heads = self.kv_proj(states).unflatten(-1, (2, self.nhead, -1))
        key, value = heads.permute(2, 0, 3, 1, 4)  # 2 x (B, H, U, D/H)
        attended = attend(query, key, value, mask)
        return self.dropout.add(x, self.out_proj(attended))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend where ``mask`` allows: (B, H, U, D/H), 2 x (B, H, K, D/H) -> (B, U, D).

    mask: true where it attends, or from `additive_mask`; of any shape that broadcasts to
        (B, H, U, K); None: causal attention.
    bias: added to products of queries and keys, (B, H, U, K); only with a mask of bool.
    """
    if mask is not None and mask.dtype == torch.bool:
        mask = additive_mask(mask, query, bias)
    if mask is not None and torch.compiler.is_exporting():
        # In ONNX, scaled_dot_product_attention would check for rows without frames, which takes 8 %
        # of the time.
        scores = torch.matmul(query, key.transpose(-1, -2)) * query.shape[-1] ** -0.5
        out = torch.matmul((scores + mask).softmax(-1), value)
    else:
        # On a GPU, PyTorch would choose cuDNN's attention, which takes 2 ms of the host's time to
        # plan each new shape: a third of a step (H200, torch 2.11, bf16).
        with sdpa_kernel(NON_CUDNN_BACKENDS) if query.is_cuda else nullcontext():
            out = scaled_dot_product_attention(
                query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None
            )
    return out.transpose(1, 2).flatten(2)


def additive_mask(visible: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the additive mask of attention: bias or 0 where ``visible``, else the lowest number.

    PyTorch would compute it in each layer from a mask of bool.

    x: has the dtype of the products, unless autocast sets it.
    """
    device_type = x.device.type
    is_autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if is_autocast else x.dtype
    visible_scores = x.new_zeros((), dtype=dtype) if bias is None else bias.to(dtype)
    return torch.where(visible, visible_scores, torch.finfo(dtype).min)


def rotary_cos_sin(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of position times frequency, for `rotate`: 2 x (U, 1, 1, D/H).

    A pair consists of a channel of the first half and one of the second half. The sine of the first
    half is negative.
    """
    angles = torch.arange(length, device=device).unsqueeze(1) * _frequencies(size, device)
    cosine = angles.cos()
    sine = angles.sin()
    cosine = torch.cat([cosine, cosine], -1)
    sine = torch.cat([-sine, sine], -1)
    return cosine[:, None, None], sine[:, None, None]


# A cached tensor becomes a constant of an exported graph. Computed in the graph, it would differ:
# other runtimes round powers differently, which at frame 950 was four times the error of all other
# operations (7e-5 of a log-probability).
_cached_frequencies: dict[tuple[int, torch.device], Tensor] = {}


def _frequencies(size: int, device: torch.device) -> Tensor:
    is_compiling = torch.compiler.is_dynamo_compiling()
    if not is_compiling and (size, device) in _cached_frequencies:
        return _cached_frequencies[size, device]
    frequencies = ROTARY_BASE ** (-torch.arange(0, size, 2, device=device) / size)
    # The FakeTensor of an export must not outlive it.
    if not is_compiling and type(frequencies) is Tensor:
        _cached_frequencies[size, device] = frequencies
    return frequencies


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate each pair of channels by the angle of its position: (B, U, ..., D/H) -> same.

    It multiplies whole rows. Four products of half rows, and their gradients, took twice as long.
    """
    return (x * cosine + x.roll(x.shape[-1] // 2, -1) * sine).to(x.dtype)
