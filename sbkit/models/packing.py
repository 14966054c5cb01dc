"""A batch without padding: the frames of its utterances one after the other.

Legend: B utterances, U frames of the padded batch, N frames of all utterances, C frames on each
side that a convolution sees, D width, H heads.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.attention import varlen
from torch.nn.functional import pad


@dataclass(frozen=True)
class Packing:
    """Where each frame is in a padded batch and in a packed one.

    positions: the index of a frame in its utterance, (N,).
    padded_rows: its row in a padded batch, of B * U rows, (N,).
    spaced_rows: its row where C zeros come between utterances, (N,).
    offsets: of the utterances, and their end: (B + 1,) of int32, as the kernel takes them.
    """

    batch_size: int
    padded_frames: int
    max_frames: int  # of an utterance
    num_spaced: int  # frames and the zeros between utterances
    positions: Tensor
    padded_rows: Tensor
    spaced_rows: Tensor
    offsets: Tensor

    @classmethod
    def of(
        cls, lengths: Tensor, padded_frames: int, conv_context: int, device: torch.device
    ) -> Self:
        """Lay out a batch; the host, which has the lengths (B,), does not wait for the device."""
        batch_size, total = len(lengths), int(lengths.sum())
        lengths_on_device = lengths.to(device, non_blocking=True)
        offsets = pad(lengths_on_device.cumsum(0), (1, 0))
        utterances = torch.repeat_interleave(
            torch.arange(batch_size, device=device), lengths_on_device, output_size=total
        )
        rows = torch.arange(total, device=device)
        positions = rows - offsets[utterances]
        return cls(
            batch_size=batch_size,
            padded_frames=padded_frames,
            max_frames=int(lengths.max()),
            num_spaced=total + conv_context * (batch_size - 1),
            positions=positions,
            padded_rows=utterances * padded_frames + positions,
            spaced_rows=rows + utterances * conv_context,
            offsets=offsets.int(),
        )

    def pack(self, x: Tensor) -> Tensor:
        """Leave out the padding: (B, U, D) -> (N, D)."""
        return x.flatten(0, 1).index_select(0, self.padded_rows)

    def unpack(self, x: Tensor) -> Tensor:
        """Pad with zeros: (N, D) -> (B, U, D)."""
        padded = x.new_zeros(self.batch_size * self.padded_frames, x.shape[1])
        padded.index_copy_(0, self.padded_rows, x)
        return padded.view(self.batch_size, self.padded_frames, -1)

    def convolve(self, convolution: nn.Module, x: Tensor) -> Tensor:
        """Convolve each utterance between zeros: (N, D) -> (N, D)."""
        spaced = x.new_zeros(self.num_spaced, x.shape[1]).index_copy_(0, self.spaced_rows, x)
        convolved: Tensor = convolution(spaced.unsqueeze(0))
        return convolved.squeeze(0).index_select(0, self.spaced_rows)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend within each utterance: 3 x (N, H, D/H) -> (N, D); half precision on CUDA only."""
        attended = varlen.varlen_attn(
            query, key, value, self.offsets, self.offsets, self.max_frames, self.max_frames
        )
        assert isinstance(attended, Tensor)
        return attended.flatten(1)
