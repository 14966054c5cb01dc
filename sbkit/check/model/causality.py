"""Whether the decoder sees only earlier tokens: one that sees later ones learns to copy them.

Legend: B utterances, L tokens, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from speechbrain import Stage
from torch import Tensor

from sbkit.check.finding import Finding
from sbkit.check.model.dry_run import dry_run, small_batch
from sbkit.check.planned_run import PlannedRun
from sbkit.data.batches.batch import TextBatch
from sbkit.train.buffers import unchanged

TOLERANCE = 1e-4  # of the largest logit; sums may be taken in another order


def check_causality(planned: PlannedRun) -> Iterator[Finding]:
    """Find a decoder whose scores of a token change with a later one."""
    done = dry_run(planned)
    if done.broken:
        return
    batch = small_batch(planned)
    if not isinstance(batch, TextBatch) or not batch.tokens.numel():
        return
    before, after = _logits(planned, batch), _logits(planned, _with_another_last_token(batch))
    if before is None or after is None:
        return
    earlier = batch.tokens.shape[1]  # (B, L + 1, V): the last scores follow the last token
    change = (before - after)[:, :earlier].abs().max() / before.abs().max()
    if change > TOLERANCE:
        yield planned.finding(
            "causality",
            "Transformer" if "Transformer" in planned.hparams else "encoder",
            declared="the decoder must not see the tokens that it is to predict",
            effect="its scores of earlier tokens change with the last one",
            fix="Give its self-attention a causal mask.",
        )


def _with_another_last_token(batch: TextBatch) -> TextBatch:
    """Change the last token of the longest transcript; both tokens are in use."""
    tokens = batch.tokens.clone()
    row = int(batch.token_lengths.argmax())
    last, other = tokens[row, -1], tokens[row][tokens[row] != tokens[row, -1]]
    tokens[row, -1] = other[0] if len(other) else last
    return replace(batch, tokens=tokens)


@torch.no_grad()
def _logits(planned: PlannedRun, batch: TextBatch) -> Tensor | None:
    brain = planned.brain
    with unchanged(brain.modules, brain.device):
        brain.modules.eval()
        brain.on_stage_start(Stage.VALID, 1)
        logits = getattr(brain.compute_forward(batch, Stage.VALID), "logits", None)
    return logits if isinstance(logits, Tensor) and logits.ndim == 3 else None
