"""The CNN before the encoder: it turns features into a quarter as many frames.

Legend: B utterances, T frames of 10 ms, U = ceil(T / 4) frames of 40 ms, M mel bins, C channels, D
model width.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from sbkit.audio.lengths import length_mask
from sbkit.config.ranges import POSITIVE_COUNT
from sbkit.models.layers import FrameConv, GlobalNorm
from sbkit.models.streaming import EncoderState, last_frames

KERNEL = 5  # frames; two layers see 13 frames, 145 ms of audio
STRIDE = 2
PAST_FRAMES = KERNEL - STRIDE  # a causal convolution sees these before the STRIDE new frames


class ConvFrontEnd(nn.Module):
    """Subsample by four with two strided convolutions: (B, T, M), (B,) -> (B, U, D), (B,).

    It masks the padding before every convolution, so an utterance does not depend on its batch
    (SpeechBrain issue #924: WER 2.8 at batch 1, 20.3 at batch 8).

    streaming: the encoder's option. Unless it is null, a frame sees no features after its own
        four, for any chunk size: each convolution is padded by three frames before and one after,
        instead of two and two.

    >>> norm = GlobalNorm(n_mels=80)
    >>> front_end = ConvFrontEnd(normalize=norm, n_mels=80, channels=64, d_model=144)
    >>> x, lengths = front_end(torch.rand(1, 100, 80), torch.tensor([100]))
    >>> x.shape, lengths
    (torch.Size([1, 25, 144]), tensor([25]))
    """

    RANGES: ClassVar = dict.fromkeys(("n_mels", "channels", "d_model"), POSITIVE_COUNT)

    def __init__(
        self,
        *,
        normalize: GlobalNorm,
        n_mels: int,
        channels: int,
        d_model: int,
        streaming: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.normalize = normalize
        self.is_causal = streaming is not None
        padding = 0 if self.is_causal else KERNEL // 2
        self.conv1 = FrameConv(n_mels, channels, KERNEL, STRIDE, padding=padding)
        self.conv2 = FrameConv(channels, d_model, KERNEL, STRIDE, padding=padding)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        if not self.is_causal:
            x = self.conv1(_mask_padding(self.normalize(features), lengths))
            lengths = _halve(lengths)
            x = self.conv2(_mask_padding(nn.functional.silu(x), lengths))
            return self.norm(x), _halve(lengths)
        start = self.start()
        batch_size = features.shape[0]
        past_features = start["features"].expand(batch_size, -1, -1)
        past_hidden = start["hidden"].expand(batch_size, -1, -1)
        x, lengths, _, _ = self._convolve_causally(features, lengths, past_features, past_hidden)
        return x, lengths

    def start(self) -> dict[str, Tensor]:
        """Return the front-end's fields of a session's `EncoderState` before the first chunk."""
        zeros = self.norm.weight.new_zeros
        return {
            "features": zeros(1, PAST_FRAMES, self.conv1.in_channels),
            "hidden": zeros(1, PAST_FRAMES, self.conv2.in_channels),
        }

    def forward_chunk(
        self, features: Tensor, lengths: Tensor, state: EncoderState
    ) -> tuple[Tensor, Tensor, EncoderState]:
        """Subsample a chunk of each session: (B, T, M), (B,) -> (B, U, D), (B,), state.

        lengths: features of each chunk. Only in the last chunk of a session they may be fewer than
            T, or not a multiple of four.
        """
        x, lengths, past_features, past_hidden = self._convolve_causally(
            features, lengths, state.features, state.hidden
        )
        return x, lengths, replace(state, features=past_features, hidden=past_hidden)

    def _convolve_causally(
        self, features: Tensor, lengths: Tensor, past_features: Tensor, past_hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Convolve after the past inputs of both convolutions, (B, PAST_FRAMES, M) and (..., C).

        Returns frames (B, U, D), their lengths, and the past inputs for the next chunk.
        """
        x = _mask_padding(self.normalize(features), lengths)
        inputs1 = torch.cat([past_features, x], 1)
        x = self.conv1(nn.functional.pad(inputs1, (0, 0, 0, 1)))  # (B, ceil(T/2), C)
        lengths = _halve(lengths)
        x = _mask_padding(nn.functional.silu(x), lengths)
        inputs2 = torch.cat([past_hidden, x], 1)
        x = self.conv2(nn.functional.pad(inputs2, (0, 0, 0, 1)))
        past_features = last_frames(inputs1, PAST_FRAMES)
        past_hidden = last_frames(inputs2, PAST_FRAMES)
        return self.norm(x), _halve(lengths), past_features, past_hidden

    def frame_lengths(self, lengths: Tensor) -> Tensor:
        return _halve(_halve(lengths))


def _mask_padding(x: Tensor, lengths: Tensor) -> Tensor:
    return x * length_mask(lengths, x.shape[1], x.device).unsqueeze(-1)


def _halve(lengths: Tensor) -> Tensor:
    return (lengths + STRIDE - 1) // STRIDE  # rounds up, as the padded convolution does
