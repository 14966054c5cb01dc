"""The CNN: features in, a quarter of their frames out.

Legend: B utterances, T frames of 10 ms, U = ceil(T / 4) frames of 40 ms, M mel bins, C channels, D
model width.
"""

from collections.abc import Mapping, Sequence
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
PAST_FRAMES = KERNEL - STRIDE  # that a causal convolution sees before the STRIDE new ones


class ConvFrontEnd(nn.Module):
    """Subsample by four with two strided convolutions: (B, T, M), (B,) -> (B, U, D), (B,).

    It masks the padding before every convolution, so an utterance does not depend on its batch
    (SpeechBrain issue #924: WER 2.8 at batch 1, 20.3 at batch 8).
    With ``streaming``, whatever the chunk, a frame sees no features after its own four: each
    convolution is padded by three frames before and one after, not by two and two.

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
        self.normalize, self.is_causal = normalize, streaming is not None
        padding = 0 if self.is_causal else KERNEL // 2
        self.conv1 = FrameConv(n_mels, channels, KERNEL, STRIDE, padding=padding)
        self.conv2 = FrameConv(channels, d_model, KERNEL, STRIDE, padding=padding)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        past = self.start().values() if self.is_causal else ()
        past_rows = [frames.expand(features.shape[0], -1, -1) for frames in past]
        x, lengths, _ = self._convolve(features, lengths, past_rows)
        return x, lengths

    def start(self) -> dict[str, Tensor]:
        """Return the front-end's fields of a session's `EncoderState` before the first chunk."""
        zeros = self.norm.weight.new_zeros
        sizes = {"features": self.conv1.in_channels, "hidden": self.conv2.in_channels}
        return {name: zeros(1, PAST_FRAMES, size) for name, size in sizes.items()}

    def forward_chunk(
        self, features: Tensor, lengths: Tensor, state: EncoderState
    ) -> tuple[Tensor, Tensor, EncoderState]:
        """Subsample a chunk of each session: (B, T, M), (B,) -> (B, U, D), (B,), state.

        lengths: the whole chunk, a multiple of four, for a session that continues.
        """
        past = (state.features, state.hidden)
        x, lengths, convolved = self._convolve(features, lengths, past)
        features, hidden = (last_frames(frames, PAST_FRAMES) for frames in convolved)
        return x, lengths, replace(state, features=features, hidden=hidden)

    def _convolve(
        self, features: Tensor, lengths: Tensor, past: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Convolve twice, if causal after the frames of ``past``.

        Also returns the inputs of causal convolutions.
        """
        x, inputs = self.normalize(features), []
        for index, convolve in enumerate((self.conv1, self.conv2)):
            if index:
                x = nn.functional.silu(x)  # (B, ceil(T/2), C)
            x = x * length_mask(lengths, x.shape[1], x.device).unsqueeze(-1)
            if past:
                inputs.append(torch.cat([past[index], x], 1))
                x = nn.functional.pad(inputs[index], (0, 0, 0, 1))
            x, lengths = convolve(x), _halve(lengths)
        return self.norm(x), lengths, inputs  # (B, U, D)

    def frame_lengths(self, lengths: Tensor) -> Tensor:
        return _halve(_halve(lengths))


def _halve(lengths: Tensor) -> Tensor:
    return (lengths + STRIDE - 1) // STRIDE  # rounds up, as the padded convolution does
