"""Whether CTC can align every transcript: a frame for each label, one more between two equal ones.

The loss gives no weight to an utterance that has none, so training alone would not show it.
"""

from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from sbkit.base.units import samples_to_seconds
from sbkit.check.data.utterances import TRAIN, Rows, about, transcripts_of
from sbkit.check.finding import Finding
from sbkit.check.model.shapes import encoder_of
from sbkit.check.planned_run import PlannedRun
from sbkit.data.batches.sampler import fastest_percent
from sbkit.models.subsampling import Subsampling

CHECK = "alignment"
MANY = 0.05  # of all utterances; with more, training is not started

OUTCOME = "They are left out of training, and count as errors elsewhere."
FRAMES = "CNN"
FIXES = {  # by the key that the frames are most likely lacking for
    "speeds": "Lower the fastest of `speeds`. At that speed they are left out of training.",
    FRAMES: "See first whether each transcript belongs to its clip: so many do not fit. Let the "
    f"encoder keep twice as many frames. {OUTCOME}",
    "data_folder": f"Correct these transcripts or clips, or take them out. {OUTCOME}",
}


def check_alignment(planned: PlannedRun) -> Iterator[Finding]:
    """Find the utterances with fewer frames than labels."""
    subsampling = subsampling_of(planned)
    if subsampling is None:
        return
    transcripts = transcripts_of(planned)
    impossible = impossible_rows(planned)
    utterances = sum(len(each.labels) for each in transcripts.values())
    many = sum(map(len, impossible.values())) > MANY * utterances
    as_recorded = any(len(each.lacking(subsampling)) for each in transcripts.values())
    key = "speeds" if not as_recorded else FRAMES if many else "data_folder"
    milliseconds = 1000 * samples_to_seconds(subsampling.stride, planned.knobs["sample_rate"])
    frames = {n: t.frames(subsampling, _fastest(planned, n)) for n, t in transcripts.items()}
    needed = {name: each.frames_needed for name, each in transcripts.items()}

    def detail(split: str, row: int) -> str:
        return f"{frames[split][row]} frames, {needed[split][row]} needed"

    yield from about(
        planned,
        "encoder" if key == FRAMES and key not in planned.hparams else key,
        found=impossible,
        reason="too short for its transcript",
        detail=detail,
        check=CHECK,
        declared=f"CTC must have a frame of {milliseconds:g} ms for every label",
        effect="have too few",
        fix=FIXES[key],
        stops=many,
    )


def subsampling_of(planned: PlannedRun) -> Subsampling | None:
    """Return what the front-end leaves; None where it does not run, which other checks find."""
    _ = planned.hparams
    with suppress(Exception):  # a user's front-end may raise anything
        encoder = encoder_of(planned)
        return None if encoder is None else encoder.subsampling
    return None


def impossible_rows(planned: PlannedRun) -> dict[str, Rows]:
    """Find the rows of every split that CTC cannot align."""
    subsampling = subsampling_of(planned)
    return {
        name: np.zeros(0, dtype=np.int64)
        if subsampling is None
        else each.lacking(subsampling, _fastest(planned, name))
        for name, each in transcripts_of(planned).items()
    }


def _fastest(planned: PlannedRun, split: str) -> int:
    """Return the percent of its speed at which a split is played fastest."""
    return fastest_percent(planned.knobs.get("speeds") or [1.0]) if split == TRAIN else 100
