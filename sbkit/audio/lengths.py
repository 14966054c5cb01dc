"""Absolute lengths and masks.

In sbkit a length is a whole number of samples, frames or tokens in an int64 tensor (B,), which
stays on the CPU in training: the host has to know it for CTC, and need not ask the device.
SpeechBrain's relative lengths (a fraction of the longest in the batch) are made at its border only.
"""

import torch
from torch import Tensor


def length_mask(lengths: Tensor, max_length: int, device: torch.device) -> Tensor:
    """Return the mask of lengths: (B,) -> (B, T) of bool on a device, true within."""
    positions = torch.arange(max_length, device=device)
    # Lengths travel, not masks: of more than 64 kB that is not pinned, CUDA makes the host wait.
    return positions < lengths.to(device, non_blocking=True).unsqueeze(1)


def to_relative(lengths: Tensor, max_length: int) -> Tensor:
    """Convert absolute lengths into SpeechBrain's fractions of the padded length: (B,) -> (B,)."""
    return lengths / max_length
