"""Whether masks of a pretrained encoder fit: what is shorter than one has none."""

from collections.abc import Iterator

import numpy as np

from sbkit.check.data.utterances import TRAIN, about
from sbkit.check.finding import Finding
from sbkit.check.planned_run import PlannedRun
from sbkit.data.corpora.columns import sample_counts
from sbkit.models.encoder import measure_subsampling
from sbkit.models.pretrained.parts import PretrainedEncoder

CHECK = "masks"


def check_masks(planned: PlannedRun) -> Iterator[Finding]:
    """Find what is shorter than a mask: utterances, or all channels of the encoder."""
    encoder = planned.hparams.get("Transformer")
    if not isinstance(encoder, PretrainedEncoder):
        return
    (share, length), (channels, width) = encoder.frame_masks, encoder.channel_masks
    if share > 0:
        frames = measure_subsampling(planned.hparams).count(sample_counts(planned.splits.train))
        yield from about(
            planned,
            CHECK,
            "mask_time_length",
            {TRAIN: np.flatnonzero(frames < length)},
            declared=f"every utterance must have the {length} frames of a mask to be masked",
            fix="Lower --mask_time_length, or leave it: they are trained on as they are.",
            stops=False,
        )
    hidden = planned.knobs["encoder_config"]["hidden_size"]
    if channels > 0 and width > hidden:
        yield planned.finding(
            CHECK,
            "mask_channel_length",
            declared=f"a mask must be at most as wide as the encoder ({hidden} channels)",
            effect=f"is {width} wide, so that no channel is masked",
            fix="Lower --mask_channel_length, or pass --mask_channel_prob=0.",
            stops=False,
        )
