"""Losses as sums and counts, never as means: they are added, reduced over ranks, divided once.

Legend: B utterances, U frames of the encoder, L tokens, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, ctc_loss

from sbkit.audio.lengths import length_mask

Amount = Tensor | float  # a tensor of any shape stands for its sum


@dataclass(frozen=True)
class Loss:
    """The loss of each utterance, as a sum and its divisor.

    sums: negative log-likelihood, (B,).
    counts: its tokens, (B,); zero excludes an utterance.
    parts: figures logged beside it, by name: a sum and its divisor, stored without gradients.

    >>> loss = Loss(torch.tensor([6.0, 2.0]), torch.tensor([3, 1]))
    >>> float(loss.sums.sum() / loss.counts.sum())
    2.0
    """

    sums: Tensor
    counts: Tensor
    parts: Mapping[str, tuple[Amount, Amount]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # DDP would wait for the gradient of a part that is in no loss.
        parts = {name: (_total(a), _total(b)) for name, (a, b) in self.parts.items()}
        object.__setattr__(self, "parts", parts)

    def detach(self) -> "Loss":
        return replace(self, sums=self.sums.detach())

    def cpu(self) -> "Loss":
        return replace(self, sums=self.sums.cpu(), counts=self.counts.cpu())

    def interpolate(self, other: "Loss", *, own_weight: float) -> "Loss":
        """Average two losses: this one with ``own_weight``, the other with the rest of 1.

        The counts of this loss are kept, so an utterance that it excludes stays excluded.
        The parts are those of both; parts of the same name are added up.
        """
        sums = own_weight * self.sums + (1 - own_weight) * other.sums
        parts = {**self.parts, **other.parts}
        for name in self.parts.keys() & other.parts.keys():
            (own_sum, own_count), (sum_, count) = self.parts[name], other.parts[name]
            parts[name] = own_sum + sum_, own_count + count
        return Loss(sums * (self.counts > 0), self.counts, parts)


def _total(amount: Amount) -> Amount:
    return amount.detach().sum() if isinstance(amount, Tensor) else amount


def ctc(
    log_probs: Tensor, frame_lengths: Tensor, tokens: Tensor, token_lengths: Tensor, blank: int
) -> Loss:
    """Sum over all alignments, in float32: (B, U, V), (B,), (B, L), (B,) -> Loss.

    An utterance with fewer frames than its tokens need (one each, and one more between two equal
    tokens) has no alignment and is excluded.
    Source: Graves et al. 2006.
    """
    per_utterance = ctc_loss(
        log_probs.float().transpose(0, 1),  # (U, B, V)
        tokens,
        frame_lengths,  # on the host in training
        token_lengths,
        blank=blank,
        reduction="none",
        zero_infinity=True,
    )
    needed, counts, available = (
        counts.to(log_probs.device, non_blocking=True)
        for counts in (frames_needed(tokens, token_lengths), token_lengths, frame_lengths)
    )
    is_possible = available >= needed
    return Loss(per_utterance.where(is_possible, 0), counts * is_possible)


def frames_needed(tokens: Tensor, token_lengths: Tensor) -> Tensor:
    """Count the fewest frames that CTC needs: (B, L), (B,) -> (B,)."""
    mask = length_mask(token_lengths, tokens.shape[1], tokens.device)[:, 1:]
    repeats = (tokens[:, 1:] == tokens[:, :-1]) & mask
    return token_lengths.to(tokens.device, non_blocking=True) + repeats.sum(1)


def attention_loss(
    logits: Tensor, tokens: Tensor, token_lengths: Tensor, eos: int, label_smoothing: float
) -> Loss:
    """Predict each token and then eos, in float32: (B, L + 1, V), (B, L), (B,) -> Loss."""
    counts = token_lengths.to(tokens.device, non_blocking=True)
    targets = torch.nn.functional.pad(tokens, (0, 1))
    targets = targets.scatter(1, counts.unsqueeze(1), eos)  # (B, L + 1)
    per_token = cross_entropy(
        logits.float().transpose(1, 2), targets, reduction="none", label_smoothing=label_smoothing
    )  # (B, L + 1)
    mask = length_mask(counts + 1, targets.shape[1], targets.device)
    return Loss((per_token * mask).sum(1), counts)
