"""Absolute lengths and masks.

In sbkit a length is a whole number of samples, frames or tokens in an int64 tensor (B,), which
stays on the CPU in training: the host has to know it for CTC, and need not ask the device.
SpeechBrain's relative lengths (a fraction of the longest in the batch) are made at its border only.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

BUCKETS = 32  # padded lengths from one power of two to the next


def length_mask(lengths: Tensor, max_length: int, device: torch.device) -> Tensor:
    """Return the mask of lengths: (B,) -> (B, T) of bool on a device, true within."""
    positions = torch.arange(max_length, device=device)
    # Lengths travel, not masks: of more than 64 kB that is not pinned, CUDA makes the host wait.
    return positions < lengths.to(device, non_blocking=True).unsqueeze(1)


def count_windows(lengths: Tensor, size: int, shift: int) -> Tensor:
    """Count the windows of a size, one every shift, that lie within lengths: (B,) -> (B,)."""
    # Clamped first: division of whole numbers rounds to zero in ONNX, and down in torch.
    return (lengths - size + shift).clamp(min=0) // shift


def to_relative(lengths: Tensor, max_length: int) -> Tensor:
    """Convert absolute lengths into SpeechBrain's fractions of the padded length: (B,) -> (B,)."""
    return lengths / max_length


def bucket_of(frames: int) -> int:
    """Return the smallest of a few lengths that holds so many frames: 32 of them in an octave.

    What is compiled, tuned or allocated for a shape then serves many batches: three epochs of
    8,000 clips of 1.5 to 10.5 s, joined and at three speeds, in batches of 32 s have 125 shapes in
    the place of 1,279, for 1.1 % more padding.
    """
    step = max(1, (1 << max(0, frames - 1).bit_length() >> 1) // BUCKETS)
    return -(-frames // step) * step


def pad_to_bucket(x: Tensor) -> Tensor:
    """Pad (B, T, D) with zeros to one of few lengths; not on the CPU, where all are as fast."""
    if x.device.type == "cpu":
        return x
    return pad(x, (0, 0, 0, bucket_of(x.shape[1]) - x.shape[1]))
