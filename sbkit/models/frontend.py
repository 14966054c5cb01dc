"""The CNN before the encoder: it turns features into a quarter or an eighth as many frames.

Legend: B utterances, T features of 10 ms, U = ceil(T / 4) frames of 40 ms or ceil(T / 8) of 80 ms,
M mel bins, C channels, D model width, N convolutions.
"""

from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor, nn

from sbkit.audio.lengths import Subsampling, length_mask
from sbkit.base.ranges import OneOf, PositiveCount, require_in_range
from sbkit.models.layers import FrameConv, GlobalNorm
from sbkit.models.streaming import State, Streaming, last_frames

KERNEL = 5  # frames; two layers see 13 frames, 145 ms of audio, and three 29 frames, 305 ms
STRIDE = 2
NUM_CONVS = {4: 2, 8: 3}  # for each subsampling
ConvSubsampling = Annotated[int, OneOf(values=(*NUM_CONVS,), advice="4 suits characters.")]
PAST_FRAMES = KERNEL - STRIDE  # a causal convolution sees these before the STRIDE new frames


class ConvFrontEnd(nn.Module):
    """Subsample with strided convolutions: (B, T, M), (B,) -> (B, U, D), (B,).

    It masks the padding before every convolution, so an utterance does not depend on its batch
    (SpeechBrain issue #924: WER 2.8 at batch 1, 20.3 at batch 8).

    subsampling: features of a frame: 4 with two convolutions, or 8 with three. With 8, attention
        has half as many frames, and CTC can write half as many tokens per second.
    streaming: the encoder's option. Unless it is null, a frame sees no features after its own,
        for any chunk size: each convolution is padded by three frames before and one after,
        instead of two and two.

    >>> norm = GlobalNorm(n_mels=80)
    >>> front_end = ConvFrontEnd(normalize=norm, n_mels=80, channels=64, d_model=144)
    >>> x, lengths = front_end(torch.rand(1, 100, 80), torch.tensor([100]))
    >>> x.shape, lengths
    (torch.Size([1, 25, 144]), tensor([25]))
    """

    def __init__(
        self,
        *,
        normalize: GlobalNorm,
        n_mels: PositiveCount,
        channels: PositiveCount,
        d_model: PositiveCount,
        subsampling: ConvSubsampling = 4,
        streaming: Streaming = None,
    ) -> None:
        require_in_range("subsampling", subsampling, ConvSubsampling)
        super().__init__()
        self.subsampling = Subsampling(subsampling, offset=subsampling - 1)  # rounds up
        self.normalize = normalize
        self.is_causal = streaming is not None
        padding = 0 if self.is_causal else KERNEL // 2
        channel_counts = [n_mels, *[channels] * (NUM_CONVS[subsampling] - 1), d_model]
        for number, (inputs, outputs) in enumerate(pairwise(channel_counts), 1):
            conv = FrameConv(inputs, outputs, KERNEL, STRIDE, padding=padding)
            self.add_module(f"conv{number}", conv)
        self.norm = nn.LayerNorm(d_model)

    @property
    def convs(self) -> list[FrameConv]:
        return [layer for layer in self.children() if isinstance(layer, FrameConv)]

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        past_inputs: list[Tensor] | None = None
        if self.is_causal:
            batch_size = features.shape[0]
            past_inputs = [past.expand(batch_size, -1, -1) for past in self._first_inputs()]
        x, lengths, _ = self._convolve(features, lengths, past_inputs)
        return x, lengths

    def start(self) -> State:
        """Return the last frames before each convolution, which are zeros."""
        features, *hidden = self._first_inputs()
        return {"features": features, "hidden": torch.cat(hidden, 1)}

    def forward_chunk(
        self, features: Tensor, lengths: Tensor, state: State
    ) -> tuple[Tensor, Tensor, State]:
        """Subsample a chunk of each session: (B, T, M), (B,) -> (B, U, D), (B,), state.

        lengths: features of each chunk. Only in the last chunk of a session they may be fewer than
            T, or not a multiple of the subsampling.
        """
        past_inputs = [state["features"], *torch.split(state["hidden"], PAST_FRAMES, 1)]
        x, lengths, (past_features, *hidden) = self._convolve(features, lengths, past_inputs)
        return x, lengths, {"features": past_features, "hidden": torch.cat(hidden, 1)}

    def _first_inputs(self) -> list[Tensor]:
        """Return each convolution's inputs before the first chunk: N x (1, PAST_FRAMES, ...)."""
        zeros = self.norm.weight.new_zeros
        return [zeros(1, PAST_FRAMES, conv.in_channels) for conv in self.convs]

    def _convolve(
        self, features: Tensor, lengths: Tensor, past_inputs: list[Tensor] | None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Convolve, causally if there are past inputs, N x (B, PAST_FRAMES, ...).

        Returns frames (B, U, D), their lengths, and the past inputs of the next chunk.
        """
        new_past: list[Tensor] = []
        x = self.normalize(features)
        for index, conv in enumerate(self.convs):
            x = nn.functional.silu(x) if index else x
            x = x * length_mask(lengths, x.shape[1], x.device).unsqueeze(-1)
            if past_inputs is not None:
                x = torch.cat([past_inputs[index], x], 1)
                new_past.append(last_frames(x, PAST_FRAMES))
                x = nn.functional.pad(x, (0, 0, 0, 1))
            x = conv(x)
            lengths = (lengths + STRIDE - 1) // STRIDE  # rounds up, as the padded convolution does
        return self.norm(x), lengths, new_past
