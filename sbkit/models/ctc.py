"""The CTC of one utterance, by the kernel that is right and fast on the device at hand.

Legend: B utterances, U frames, V vocabulary, L tokens.
"""

from functools import lru_cache
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import ctc_loss

from sbkit.logs.log import say

TOLERANCE = 1e-4  # of two float32 kernels; they differ by 1e-6 on the question asked below


class Kernel(Protocol):
    """(B, U, V) log-probabilities in float32, (B, L) tokens, (B,) frames, (B,) counts -> (B,)."""

    def __call__(
        self, log_probs: Tensor, tokens: Tensor, frames: Tensor, counts: Tensor, *, blank: int
    ) -> Tensor:
        """Give what each utterance loses."""


def ctc_of_torch(
    log_probs: Tensor, tokens: Tensor, frames: Tensor, counts: Tensor, *, blank: int
) -> Tensor:
    """Give what each utterance loses, zero where its labels have no alignment."""
    return ctc_loss(
        log_probs.transpose(0, 1),  # (U, B, V)
        tokens,
        frames,  # read on the host, where lengths are in training
        counts,
        blank=blank,
        reduction="none",
        zero_infinity=True,
    )


@lru_cache
def kernel_of(device: torch.device) -> Kernel:
    """Choose the kernel of a device: PyTorch's, but on CUDA our own where it agrees with that.

    PyTorch's makes the host wait for a GPU in every step, and adds up in no fixed order there.
    """
    if device.type != "cuda":
        return ctc_of_torch
    try:
        own: Kernel = import_module("sbkit.models.ctc_triton").ctc_on_gpu
        difference = compare(own, ctc_of_torch, device)
        if difference <= TOLERANCE:
            return own
        reason = f"its gradient is off by {difference:.2g}"
    except Exception as error:  # no Triton, no compiler, no kernel for this GPU: all the same
        reason = f"{type(error).__name__}: {error}"
    say(f"CTC waits for the device in every step, since sbkit's own kernel does not run: {reason}")
    return ctc_of_torch


@torch.enable_grad()
def compare(one: Kernel, other: Kernel, device: torch.device) -> float:
    """Tell by how much two kernels differ at most, in loss or gradient, on one small question."""
    scores = torch.arange(3 * 12 * 7, device=device).sin().reshape(3, 12, 7).requires_grad_()
    tokens = torch.tensor([[1, 2, 2, 6], [5, 5, 5, 0], [3, 0, 0, 0]], device=device)
    frames, counts = torch.tensor([12, 7, 1]), torch.tensor([4, 3, 1])
    answers = []
    for kernel in (one, other):
        losses = kernel(scores.log_softmax(-1), tokens, frames, counts, blank=0)
        (gradient,) = torch.autograd.grad(losses.sum(), scores)
        answers.append(torch.cat([losses.detach(), gradient.flatten()]))
    return float((answers[0] - answers[1]).abs().nan_to_num(torch.inf).max())
