"""The CNN: features in, a quarter of their frames out.

Legend: B utterances, T frames of 10 ms, U = ceil(T / 4) frames of 40 ms, M mel bins, D model width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from sbkit.audio.lengths import length_mask
from sbkit.config.ranges import AT_LEAST_ONE
from sbkit.models.chunks import StreamState, last_frames
from sbkit.models.layers import FrameConv, GlobalNorm

KERNEL = 5  # frames; two layers see 13 frames, 145 ms of audio
STRIDE = 2
KEPT = KERNEL - STRIDE  # frames before a block of STRIDE that a causal convolution sees


class ConvFrontEnd(nn.Module):
    """Subsample by four with two strided convolutions: (B, T, M), (B,) -> (B, U, D), (B,).

    It knows the lengths: what lies past an utterance is zero before every convolution, just as the
    padding of the convolution itself, so an utterance does not depend on what it is batched with
    (SpeechBrain issue #924: WER 2.8 at batch 1, 20.3 at batch 8).
    With ``streaming``, whatever its chunks are, a frame sees no feature past its own four: each
    convolution is padded by three frames before and one after, not by two and two.
    """

    RANGES: ClassVar = dict.fromkeys(("n_mels", "channels", "d_model"), AT_LEAST_ONE)

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
        """Normalize and convolve twice."""
        x = _mask_padding(self.normalize(features), lengths)
        before = (self.start() if self.is_causal else {}).values()
        x, lengths, _ = self._convolve(
            x, lengths, [each.expand(x.shape[0], -1, -1) for each in before]
        )
        return x, lengths

    def start(self) -> dict[str, Tensor]:
        """Return what it keeps before the first chunk of one session, by names of StreamState."""
        zeros = self.norm.weight.new_zeros
        sizes = {"features": self.conv1.in_channels, "hidden": self.conv2.in_channels}
        return {name: zeros(1, KEPT, size) for name, size in sizes.items()}

    def forward_chunk(
        self, features: Tensor, lengths: Tensor, state: StreamState
    ) -> tuple[Tensor, Tensor, StreamState]:
        """Subsample a chunk of each session after what its state keeps: (B, T, M) -> (B, U, D).

        lengths (B,): of a session that goes on, they are the whole chunk, a multiple of four.
        """
        x = _mask_padding(self.normalize(features), lengths)
        x, lengths, kept = self._convolve(x, lengths, (state.features, state.hidden))
        features, hidden = (last_frames(each, KEPT) for each in kept)
        return x, lengths, replace(state, features=features, hidden=hidden)

    def _convolve(
        self, x: Tensor, lengths: Tensor, before: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Convolve twice, each time after the frames ``before`` if it is causal.

        Returns also what was convolved then.
        """
        seen = list[Tensor]()
        for number, convolve in enumerate((self.conv1, self.conv2)):
            if number:
                x = _mask_padding(nn.functional.silu(x), lengths)  # (B, ceil(T/2), C)
            if before:
                seen.append(torch.cat([before[number], x], 1))
                x = nn.functional.pad(seen[number], (0, 0, 0, 1))
            x, lengths = convolve(x), _halve(lengths)
        return self.norm(x), lengths, seen  # (B, U, D)

    def frame_lengths(self, lengths: Tensor) -> Tensor:
        """Count the frames that are left of lengths: (B,) -> (B,)."""
        return _halve(_halve(lengths))


def _halve(lengths: Tensor) -> Tensor:
    return (lengths + STRIDE - 1) // STRIDE  # rounds up, as the padded convolution does


def _mask_padding(x: Tensor, lengths: Tensor) -> Tensor:
    return x * length_mask(lengths, x.shape[1], x.device).unsqueeze(-1)
