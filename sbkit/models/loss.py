"""Losses as sums and counts, never as means: they are added, reduced over ranks, divided once.

Legend: B utterances, U frames of the encoder, L tokens, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, ctc_loss

from sbkit.audio.lengths import length_mask


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
    per_utterance = ctc_loss(
        log_probs.float().transpose(0, 1),  # (U, B, V)
        tokens,
        frame_lengths,  # read on the host, where lengths are in training
        token_lengths,
        blank=blank,
        reduction="none",
        zero_infinity=True,
    )
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
