"""What an output depends on: features on the audio, a loss on nothing else in the batch.

And a decoder's scores on earlier tokens alone: one that sees later ones learns to copy them.

Legend: B utterances, L tokens, V vocabulary, T frames, M values of a frame.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace

import torch
from speechbrain import Stage
from torch import Tensor, nn

from sbkit.base.text import listed, plural
from sbkit.check.finding import Finding
from sbkit.check.model.dry_run import dry_run, evaluating, losses_of, small_batch
from sbkit.check.planned_run import PlannedRun
from sbkit.data.batches.batch import Batch, TextBatch
from sbkit.models.encoder import require_rate
from sbkit.models.parts import FeatureExtractor

LOUDNESS = 1000.0  # of the noise, in the scale of int16
SECONDS = 2
TOLERANCE = 1e-4  # of the largest logit; sums may be taken in another order
# Of a loss. That of hparams/ctc.yaml differs by rounding, that of ctc_speechbrain.yaml, whose
# convolutions see a frame of padding, by 0.003, and with a mean that takes padding along by 0.03.
MOST = 0.01


def check_features(planned: PlannedRun) -> Iterator[Finding]:
    """Find parts for another sample rate, and values that are the same in every frame of noise.

    A mel filter that is narrower than the steps of the spectrum holds none of them: 160 of 400 at
    16 kHz do.
    """
    part = planned.hparams.get(FeatureExtractor.NAME)
    rate = planned.knobs.get("sample_rate")
    if not isinstance(part, nn.Module) or rate is None:
        return
    require_rate(planned.hparams, rate)
    features = _of_noise(part, rate)  # (T, M)
    still = (features.amax(0) == features.amin(0)).nonzero().flatten().tolist()
    if still:
        key = "n_mels" if "n_mels" in planned.document.root else FeatureExtractor.NAME
        yield planned.finding(
            "features",
            key,
            declared=f"each of the {plural(features.shape[1], 'value')} of a frame must depend on "
            "the audio",
            effect=f"{len(still)} of them ({listed(still)}) are the same in every frame of white "
            "noise, as those of mel filters that are narrower than the steps of the spectrum",
            fix="Lower the number of mel bins; 80 are usual at 16 kHz.",
            stops=False,
        )


@torch.no_grad()
def _of_noise(part: nn.Module, sample_rate: int) -> Tensor:
    """Compute the features of white noise: -> (T, M)."""
    samples = SECONDS * sample_rate
    noise = LOUDNESS * torch.randn(1, samples, generator=torch.Generator().manual_seed(0))
    extractor = FeatureExtractor(deepcopy(part).cpu().eval())
    features, lengths = extractor(noise, torch.tensor([samples]))
    return features[0, : int(lengths[0])]


def check_padding(planned: PlannedRun) -> Iterator[Finding]:
    """Find that an evaluation's loss of an utterance is another one beside a longer utterance."""
    done = dry_run(planned)
    batch, brain = small_batch(planned), planned.brain
    if done.broken or not isinstance(batch, Batch):
        return
    with evaluating(brain):
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
    with evaluating(planned.brain):
        logits = getattr(planned.brain.compute_forward(batch, Stage.VALID), "logits", None)
    return logits if isinstance(logits, Tensor) and logits.ndim == 3 else None
