"""Whether an utterance's loss depends on what else is in its batch.

Where it does, other processes, another `batch_seconds` and another order give other results.

Legend: B utterances.
"""

from collections.abc import Iterator

import torch
from speechbrain import Stage

from sbkit.check.finding import Finding
from sbkit.check.model.dry_run import dry_run, losses_of, small_batch
from sbkit.check.planned_run import PlannedRun
from sbkit.data.batches.batch import Batch
from sbkit.train.buffers import unchanged

# Of a loss. That of hparams/ctc.yaml differs by rounding, that of ctc_speechbrain.yaml, whose
# convolutions see a frame of padding, by 0.003, and with a mean that takes padding along by 0.03.
MOST = 0.01


def check_padding(planned: PlannedRun) -> Iterator[Finding]:
    """Find that an evaluation's loss of an utterance is another one beside a longer utterance."""
    done = dry_run(planned)
    batch, brain = small_batch(planned), planned.brain
    if done.broken or not isinstance(batch, Batch):
        return
    with unchanged(brain.modules, brain.device):
        brain.modules.eval()
        brain.on_stage_start(Stage.VALID, 1)
        together = losses_of(brain, batch)  # (B,)
        alone = torch.cat(
            [losses_of(brain, batch.take(slice(at, at + 1))) for at in range(len(batch))]
        )
    if together.shape != alone.shape:
        return  # a mean of the batch
    change = float(((together - alone).abs() / alone.abs().clamp(min=1)).max())
    if change > MOST:
        yield planned.finding(
            "padding",
            "model",
            declared="the loss of an utterance must not depend on what else is in its batch",
            effect=f"it changes by {change:.1%} beside a longer one, and so would results, with "
            "the number of processes and `batch_seconds`",
            fix="Let parts take lengths, and leave padding out of means, norms and attention.",
            stops=False,
        )
