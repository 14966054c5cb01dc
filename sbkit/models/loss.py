"""Losses as sums and counts, never as means: they are added, reduced over ranks, divided once.

The CTC of one utterance comes of the kernel that is right on the device at hand.

Legend: B utterances, U frames of 40 ms, L tokens, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, ctc_loss

from sbkit.audio.lengths import length_mask
from sbkit.logs.log import say

TOLERANCE = 1e-4  # of two float32 kernels; they differ by 1e-6 on the question asked below


# (B, U, V) log-probabilities in float32, (B, L) tokens, 2 x (B,) lengths, blank= -> (B,)
Kernel = Callable[..., Tensor]


@dataclass(frozen=True)
class Loss:
    """The loss of each utterance and what it is divided by.

    sums (B,): negative log-likelihood; counts (B,): tokens that it is spread over, zero for an
    utterance that takes no part.
    """

    sums: Tensor
    counts: Tensor

    def detach(self) -> "Loss":
        """Return it without gradients, as a tensor does."""
        return Loss(self.sums.detach(), self.counts)

    def cpu(self) -> "Loss":
        """Return it on the CPU, as a tensor does."""
        return Loss(self.sums.cpu(), self.counts.cpu())

    def interpolate(self, other: "Loss", weight: float) -> "Loss":
        """Add this loss and another of the same utterances with weights; the counts stay.

        An utterance that takes no part here takes none in the sum.
        """
        sums = weight * self.sums + (1 - weight) * other.sums
        return Loss(sums * (self.counts > 0), self.counts)


def ctc(
    log_probs: Tensor, frame_lengths: Tensor, tokens: Tensor, token_lengths: Tensor, blank: int
) -> Loss:
    """Sum over all alignments: (B, U, V), (B,), (B, L), (B,) -> Loss.

    In float32. An utterance with fewer frames than its tokens need (one each, and one more between
    two that are equal) has no alignment: it weighs nothing here.
    Source: Graves et al. 2006.
    """
    kernel = kernel_of(log_probs.device)
    per_utterance = kernel(log_probs.float(), tokens, frame_lengths, token_lengths, blank=blank)
    needed, counts, available = (
        each.to(log_probs.device, non_blocking=True)
        for each in (frames_needed(tokens, token_lengths), token_lengths, frame_lengths)
    )
    possible = available >= needed
    return Loss(per_utterance.where(possible, 0), counts * possible)


def frames_needed(tokens: Tensor, token_lengths: Tensor) -> Tensor:
    """Count the frames that CTC needs at least: (B, L), (B,) -> (B,)."""
    mask = length_mask(token_lengths, tokens.shape[1], tokens.device)[:, 1:]
    repeats = (tokens[:, 1:] == tokens[:, :-1]) & mask
    return token_lengths.to(tokens.device, non_blocking=True) + repeats.sum(1)


def attention_loss(
    logits: Tensor, tokens: Tensor, token_lengths: Tensor, eos: int, label_smoothing: float
) -> Loss:
    """Predict each token and the end: (B, L + 1, V), (B, L), (B,) -> Loss, in float32."""
    counts = token_lengths.to(tokens.device, non_blocking=True)
    wanted = torch.nn.functional.pad(tokens, (0, 1))
    wanted = wanted.scatter(1, counts.unsqueeze(1), eos)  # (B, L + 1)
    each = cross_entropy(
        logits.float().transpose(1, 2), wanted, reduction="none", label_smoothing=label_smoothing
    )  # (B, L + 1)
    mask = length_mask(counts + 1, wanted.shape[1], wanted.device)
    return Loss((each * mask).sum(1), counts)


def ctc_of_torch(
    log_probs: Tensor, tokens: Tensor, frame_lengths: Tensor, counts: Tensor, *, blank: int
) -> Tensor:
    """Compute the negative log-likelihood of each utterance, zero where it has no alignment."""
    return ctc_loss(
        log_probs.transpose(0, 1),  # (U, B, V)
        tokens,
        frame_lengths,  # read on the host, where lengths are in training
        counts,
        blank=blank,
        reduction="none",
        zero_infinity=True,
    )


@lru_cache
def kernel_of(device: torch.device) -> Kernel:
    """Return the kernel of a device: PyTorch's, but on CUDA our own where it is right.

    PyTorch's makes the host wait for a GPU in every step, and adds up in no fixed order there. Both
    are not timed: another rank, or a run that goes on, might take the other one.
    """
    if device.type != "cuda":
        return ctc_of_torch
    try:
        own: Kernel = import_module("sbkit.models.ctc_triton").ctc_on_gpu
        difference = compare(own, ctc_of_torch, device)
        if difference > TOLERANCE:
            raise ArithmeticError(f"its gradient is off by {difference:.2g}")
    except Exception as error:  # no Triton, no compiler, no kernel for this GPU: all the same
        reason = f"{type(error).__name__}: {error}"
        say(f"CTC runs PyTorch's kernel, since sbkit's own does not run here: {reason}")
        return ctc_of_torch
    return own


@torch.enable_grad()
def compare(one: Kernel, other: Kernel, device: torch.device) -> float:
    """Return the largest difference of two kernels, in loss or gradient, on one small batch."""
    scores = torch.arange(3 * 12 * 7, device=device).sin().reshape(3, 12, 7).requires_grad_()
    tokens = torch.tensor([[1, 2, 2, 6], [5, 5, 5, 0], [3, 0, 0, 0]], device=device)
    frame_lengths, counts = torch.tensor([12, 7, 1]), torch.tensor([4, 3, 1])
    answers = []
    for kernel in (one, other):
        losses = kernel(scores.log_softmax(-1), tokens, frame_lengths, counts, blank=0)
        (gradient,) = torch.autograd.grad(losses.sum(), scores)
        answers.append(torch.cat([losses.detach(), gradient.flatten()]))
    return float((answers[0] - answers[1]).abs().nan_to_num(torch.inf).max())
