"""The Transformer: an encoder of Conformer or Transformer blocks, and a decoder that may be absent.

Legend: B utterances, U frames of 40 ms, L tokens, D model width, H heads, V vocabulary.

Written from plain parts (Linear, scaled_dot_product_attention with rotary positions, a depthwise
Conv1d, LayerNorm) so that it exports and compiles; every block knows the lengths, so the output for
an utterance does not depend on what it is padded or batched with.
Sources: Gulati et al. 2020 (Conformer), Su et al. 2021 (rotary positions).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

from sbkit.audio.lengths import length_mask
from sbkit.base.errors import SbkitError
from sbkit.config.ranges import AT_LEAST_NONE, AT_LEAST_ONE, SHARE
from sbkit.models.attention import CrossAttention, SelfAttention
from sbkit.models.chunks import BlockState, Chunks, Streaming, StreamState, last_frames
from sbkit.models.layers import Dropout, FrameConv


class Transformer(nn.Module):
    """Encode frames and, when there are decoder layers, decode tokens against them.

    With ``gradient_checkpointing`` the backward pass computes the activations of each block of the
    encoder again, with the same random numbers: less memory, a third more time.
    ``streaming``, as {chunk_ms: 640, left_ms: 2560}, cuts what frames see: into
    chunks of random sizes in training, of this size after it. `forward_chunk` computes the same
    chunk by chunk.
    """

    RANGES: ClassVar = {
        **dict.fromkeys(("d_model", "nhead", "d_ffn", "kernel_size"), AT_LEAST_ONE),
        "num_encoder_layers": AT_LEAST_ONE,
        "num_decoder_layers": AT_LEAST_NONE,
        "dropout": SHARE,
    }

    def __init__(
        self,
        *,
        d_model: int,
        nhead: int,
        d_ffn: int,
        num_encoder_layers: int,
        num_decoder_layers: int = 0,
        encoder_module: str = "conformer",
        kernel_size: int = 15,
        dropout: float = 0.1,
        vocab_size: int | None = None,
        gradient_checkpointing: bool = False,
        streaming: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        if encoder_module not in ("conformer", "transformer"):
            raise SbkitError(
                f"`encoder_module` must be conformer or transformer, but is {encoder_module!r}. "
                "Choose one of the two."
            )
        width = {"d_model": d_model, "nhead": nhead, "d_ffn": d_ffn}
        block: Callable[[], nn.Module] = {
            "conformer": lambda: ConformerBlock(**width, kernel_size=kernel_size, dropout=dropout),
            "transformer": lambda: TransformerBlock(**width, dropout=dropout),
        }[encoder_module]
        self.d_model, self.nhead = d_model, nhead
        self.reach = kernel_size // 2 if encoder_module == "conformer" else 0  # of a convolution
        self.gradient_checkpointing = gradient_checkpointing
        self.streaming = None if streaming is None else Streaming.of(streaming)
        self.dropout = Dropout(dropout)
        self.encoder = nn.ModuleList(block() for _ in range(num_encoder_layers))
        self.encoder_norm = nn.LayerNorm(d_model)
        self.decoder = nn.ModuleList(
            DecoderBlock(**width, dropout=dropout) for _ in range(num_decoder_layers)
        )
        if num_decoder_layers:
            if vocab_size is None:
                raise SbkitError(
                    "`vocab_size` of the Transformer must be given when num_decoder_layers is "
                    f"{num_decoder_layers}, but is null. Use !ref <tokenizer.vocab_size>."
                )
            self.embedding = nn.Embedding(vocab_size, d_model)
            self.decoder_norm = nn.LayerNorm(d_model)

    def encode(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Encode frames: (B, U, D), (B,) -> (B, U, D)."""
        *_, last = self._encoded(x, lengths)
        normed: Tensor = self.encoder_norm(last)
        return normed

    def encode_with_intermediate(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encode, and return first the states after half of the blocks: -> 2 x (B, U, D).

        Both through the same norm, so that one head can read either (Lee and Watanabe 2021).
        """
        after = list(self._encoded(x, lengths))
        return self.encoder_norm(after[len(self.encoder) // 2]), self.encoder_norm(after[-1])

    def _encoded(self, x: Tensor, lengths: Tensor) -> Iterator[Tensor]:
        """Run the blocks, and yield the input and the output of each."""
        again = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        mask = length_mask(lengths, x.shape[1], x.device)  # (B, U)
        chunks: Chunks | None = None
        if self.streaming is not None:
            chunks = (self.streaming.draw() if self.training else self.streaming).cut(mask)
        x = self.dropout(x)
        yield x
        for block in self.encoder:
            given = (x, mask, chunks)
            x = checkpoint(block, *given, use_reentrant=False) if again else block(*given)
            yield x

    def start(self) -> dict[str, Tensor]:
        """Return what it keeps before the first chunk of one session, by names of StreamState."""
        assert self.streaming is not None
        zeros, blocks = self.encoder_norm.weight.new_zeros, len(self.encoder)
        heads = (self.nhead, self.d_model // self.nhead)
        return {
            "frames": zeros(1, dtype=torch.int64),
            "attention": zeros(1, blocks, self.streaming.left, 2, *heads),
            "convolution": zeros(1, blocks, self.reach, self.d_model),
        }

    def forward_chunk(
        self, x: Tensor, lengths: Tensor, state: StreamState
    ) -> tuple[Tensor, StreamState]:
        """Encode a chunk of each session, (B, U, D), after all that its state has seen.

        lengths (B,): of a session that goes on, they are the whole chunk.
        """
        left, device = state.attention.shape[2], x.device
        mask = length_mask(lengths, x.shape[1], device)  # (B, U)
        was_seen = torch.arange(left, device=device) >= left - state.frames.unsqueeze(1)  # (B, L)
        visible = torch.cat([was_seen, mask], 1)[:, None, None]  # (B, 1, 1, L + U)
        after, blocks = list[BlockState](), cast("Any", self.encoder)
        for number, block in enumerate(blocks):
            past = BlockState(state.attention[:, number], state.convolution[:, number])
            x, kept = block.forward_chunk(x, Chunks(visible, x.shape[1]), mask, past)
            after.append(kept)
        attention, convolution = (torch.stack(each, 1) for each in zip(*after, strict=True))
        frames = state.frames + lengths.to(device)
        more = {"attention": attention, "convolution": convolution, "frames": frames}
        return self.encoder_norm(x), StreamState(**{**vars(state), **more})

    def decode(self, tokens: Tensor, states: Tensor, lengths: Tensor) -> Tensor:
        """Decode with teacher forcing: (B, L) tokens, (B, U, D), (B,) frames -> (B, L, D).

        What lies past the end of a row of tokens cannot be seen by what lies before it.
        Raises SbkitError when there are no decoder layers.
        """
        if not self.decoder:
            raise SbkitError(
                "`num_decoder_layers` must be at least 1 while ctc_weight is below 1.0, but is 0. "
                "Raise it, or set --ctc_weight=1.0 to train CTC alone."
            )
        mask = length_mask(lengths, states.shape[1], states.device)
        x = self.dropout(self.embedding(tokens))
        for block in self.decoder:
            x = block(x, states, mask)
        normed: Tensor = self.decoder_norm(x)
        return normed


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

    def forward(self, x: Tensor, mask: Tensor, chunks: Chunks | None = None) -> Tensor:
        """Apply the parts in their order; ``mask`` (B, U) is true within an utterance."""
        x = self.feed_forward1(x, weight=0.5)
        x = self.attention(x, mask if chunks is None else chunks.visible)
        x = self.convolution(x, mask, None if chunks is None else chunks.size)
        added: Tensor = self.feed_forward2(x, weight=0.5)
        return added

    def forward_chunk(
        self, x: Tensor, chunk: Chunks, mask: Tensor, past: BlockState
    ) -> tuple[Tensor, BlockState]:
        """Apply the parts to the frames of a chunk, after those that ``past`` keeps."""
        x = self.feed_forward1(x, weight=0.5)
        x, attention = self.attention.forward_chunk(x, chunk.visible, past.attention)
        x, convolution = self.convolution.forward_chunk(x, mask, past.convolution)
        return self.feed_forward2(x, weight=0.5), BlockState(attention, convolution)


class TransformerBlock(nn.Module):
    """Attention, feed-forward: (B, U, D) -> (B, U, D)."""

    def __init__(self, *, d_model: int, nhead: int, d_ffn: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(d_model=d_model, nhead=nhead, dropout=dropout)
        self.feed_forward = FeedForward(d_model=d_model, d_ffn=d_ffn, dropout=dropout)

    def forward(self, x: Tensor, mask: Tensor, chunks: Chunks | None = None) -> Tensor:
        """Apply the parts in their order; ``mask`` (B, U) is true within an utterance."""
        x = self.attention(x, mask if chunks is None else chunks.visible)
        added: Tensor = self.feed_forward(x)
        return added

    def forward_chunk(
        self, x: Tensor, chunk: Chunks, mask: Tensor, past: BlockState
    ) -> tuple[Tensor, BlockState]:
        """Apply the parts to the frames of a chunk, after those that ``past`` keeps."""
        x, attention = self.attention.forward_chunk(x, chunk.visible, past.attention)
        return self.feed_forward(x), BlockState(attention, past.convolution)


class DecoderBlock(nn.Module):
    """Attention to earlier tokens, to the frames, feed-forward: (B, L, D) -> (B, L, D)."""

    def __init__(self, *, d_model: int, nhead: int, d_ffn: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(d_model=d_model, nhead=nhead, dropout=dropout)
        self.cross_attention = CrossAttention(d_model=d_model, nhead=nhead, dropout=dropout)
        self.feed_forward = FeedForward(d_model=d_model, d_ffn=d_ffn, dropout=dropout)

    def forward(self, x: Tensor, states: Tensor, mask: Tensor) -> Tensor:
        """Apply the parts in their order; ``mask`` (B, U) is true at the frames of an utterance."""
        x = self.attention(x, None)
        x = self.cross_attention(x, states, mask)
        added: Tensor = self.feed_forward(x)
        return added


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
        """Return x and ``weight`` times what the layers make of it."""
        *layers, last = self
        y = x
        for layer in layers:
            y = layer(y)
        assert isinstance(last, Dropout)
        return last.add(x, y, weight)


class Convolution(nn.Module):
    """Mix neighbouring frames, each channel by itself, and add: (B, U, D) -> (B, U, D).

    Gate, depthwise convolution, LayerNorm (BatchNorm would let an utterance see its batch).
    """

    def __init__(self, *, d_model: int, kernel_size: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.pointwise_conv1 = nn.Linear(d_model, 2 * d_model)
        self.depthwise_conv = FrameConv(
            d_model, d_model, kernel_size, padding=kernel_size // 2, groups=d_model
        )
        self.depthwise_norm = nn.LayerNorm(d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor, chunk: int | None = None) -> Tensor:
        """Convolve; frames where ``mask`` (B, U) is false count as zero.

        So do, for a frame, those after its ``chunk`` of so many frames.
        """
        y = nn.functional.glu(self.pointwise_conv1(self.norm(x))) * mask.unsqueeze(-1)
        y = self.depthwise_conv(y) if chunk is None else self._convolve_chunks(y, chunk)
        return self._add(x, y)

    def forward_chunk(self, x: Tensor, mask: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve a chunk after the frames that are kept, (B, K, D)."""
        y = nn.functional.glu(self.pointwise_conv1(self.norm(x))) * mask.unsqueeze(-1)
        seen, left = torch.cat([past, y], 1), past.shape[1]
        return self._add(x, self.depthwise_conv(seen)[:, left:]), last_frames(seen, left)

    def _convolve_chunks(self, y: Tensor, chunk: int) -> Tensor:
        """Convolve, and take back what came from after the end of a chunk: (B, U, D) -> same.

        Windows of each chunk and the K frames before it took 1.5 times as long as this.
        """
        convolve, frames = self.depthwise_conv, y.shape[1]
        width = convolve.kernel_size[0] // 2
        convolved: Tensor = convolve(y)
        left = chunk - torch.arange(frames, device=y.device) % chunk  # frames to the end: (U,)
        padded = nn.functional.pad(y, (0, 0, 0, width))
        for ahead in range(1, width + 1):
            beyond = padded[:, ahead : ahead + frames] * (left <= ahead).unsqueeze(1)
            weight = convolve.weight[:, 0, width + ahead]
            convolved = torch.addcmul(convolved, beyond, weight, value=-1)
        return convolved

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        y = silu(self.depthwise_norm(y))
        return self.dropout.add(x, self.out_proj(y))
