"""What an output depends on: states on nothing else in the batch, scores on earlier tokens alone.

Legend: B utterances, U frames, D width, L tokens, V vocabulary.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from speechbrain import Stage
from torch import Tensor

from sbkit.check.dry_run import dry_run, losses_of, seeded_evaluation, small_batch
from sbkit.check.finding import Finding
from sbkit.check.planned_run import PlannedRun
from sbkit.checkpoint.rng import preserve_rng
from sbkit.data.batch import Batch, TextBatch
from sbkit.models.asr import Predictions

# Of the largest state. Those of hparams/ctc.yaml differ by 6e-7, those of ctc_speechbrain.yaml,
# whose convolutions see a frame of padding, by 0.2, where the losses differ by 0.003 alone.
MAX_CHANGE = 1e-3
TOLERANCE = 1e-4  # of the largest logit; sums may be taken in another order


def check_padding(planned: PlannedRun) -> Iterator[Finding]:
    """Find that an evaluation of an utterance has other states beside a longer utterance."""
    done, brain = dry_run(planned), planned.make_cpu_brain()
    batch = small_batch(planned)
    if done.broken or not isinstance(batch, Batch):
        return
    with _evaluating(brain):
        together = _states_of(brain, batch)
        clips = [batch.take(slice(at, at + 1)) for at in range(len(batch))]
        alone = [states for clip in clips for states in _states_of(brain, clip)]
    if len(together) != len(alone):
        return  # a mean of the batch
    change = max(map(_change, together, alone))
    if change > MAX_CHANGE:
        yield planned.finding(
            "padding",
            "model",
            declared="what a model computes of an utterance must not depend on the rest of its "
            "batch",
            effect=f"it changes by {change:.1%} beside a longer one, and so would results, with "
            "the number of processes and `batch_seconds`",
            fix="Let parts take lengths, and leave padding out of means, norms and attention, and "
            "where a recurrent layer that reads backward begins.",
            stops=False,
        )


@torch.no_grad()
def _states_of(brain: Any, batch: Batch) -> list[Tensor]:
    """Return the encoder's states of each utterance (U, D), or its loss where there are none."""
    with seeded_evaluation(batch):
        outputs = brain.compute_forward(batch, Stage.VALID)
    if isinstance(outputs, Predictions):
        rows = zip(outputs.states, outputs.frame_lengths.tolist(), strict=True)
        return [states[:frames] for states, frames in rows]
    return [*losses_of(brain, batch)]


def _change(value: Tensor, right: Tensor) -> float:
    """Return the largest difference of two tensors, as a share of the largest value."""
    if value.shape != right.shape or not right.numel():
        return math.inf if value.numel() else 0.0
    return float((value - right).abs().max() / right.abs().max().clamp(min=1e-3))


def check_causality(planned: PlannedRun) -> Iterator[Finding]:
    """Find a decoder whose scores of a token change with a later one: it learns to copy them."""
    done, batch = dry_run(planned), small_batch(planned)
    if done.broken or not isinstance(batch, TextBatch) or not batch.tokens.numel():
        return
    tokens, row = batch.tokens.clone(), int(batch.token_lengths.argmax())
    tokens[row, -1] = tokens[row, 0]
    before, after = (
        _logits(planned.make_cpu_brain(), b) for b in (batch, replace(batch, tokens=tokens))
    )
    if before is None or after is None:
        return
    earlier = batch.tokens.shape[1]  # (B, L + 1, V): the last scores follow the last token
    change = (before - after)[:, :earlier].abs().max() / before.abs().max()
    if change > TOLERANCE:
        yield planned.finding(
            "causality",
            "Transformer" if "Transformer" in planned.build_hparams() else "encoder",
            declared="the decoder must not see the tokens that it is to predict",
            effect="its scores of earlier tokens change with the last one",
            fix="Give its self-attention a causal mask.",
        )


@torch.no_grad()
def _logits(brain: Any, batch: TextBatch) -> Tensor | None:
    with _evaluating(brain):
        logits = getattr(brain.compute_forward(batch, Stage.VALID), "logits", None)
    return logits if isinstance(logits, Tensor) and logits.ndim == 3 else None


@contextmanager
def _evaluating(brain: Any) -> Iterator[None]:
    """Let a Brain evaluate, and put back the random numbers."""
    with preserve_rng(brain.device):
        brain.modules.eval()
        brain.on_stage_start(Stage.VALID, 1)
        yield
