"""Whether CTC can align every transcript: a frame for each label, one more between two equal ones.

The loss gives no weight to an utterance that has none, so training would never tell.
"""

from collections.abc import Iterator

import numpy as np

from sbkit.check.finding import Finding
from sbkit.check.subject import Subject
from sbkit.check.utterances import Rows, about, named, transcripts_of
from sbkit.data.sampler import fastest_percent
from sbkit.data.splits import LeftOut
from sbkit.nn.subsampling import Subsampling, measure_subsampling
from sbkit.values.errors import SbkitError
from sbkit.values.units import samples_to_seconds

CHECK = "alignment"
MANY = 0.05  # of all utterances; with more, training is not started

MENDS = {  # by the key that the frames are lacking for
    "speeds": "Lower the fastest of `speeds`: these are left out of training.",
    "CNN": "Let `CNN` keep twice as many frames: these are left out of training, and errors in "
    "dev and test.",
    "data_folder": "Correct these transcripts or clips, or take them out: they are left out of "
    "training, and errors in dev and test.",
}


def check_alignment(subject: Subject) -> Iterator[Finding]:
    """Name the utterances with fewer frames than labels, by what would mend them."""
    subsampling = subsampling_of(subject)
    if subsampling is None:
        return
    transcripts = transcripts_of(subject)
    lacking = _by_cause(subject, subsampling)
    utterances = sum(len(each.labels) for each in transcripts.values())
    impossible = sum(len(rows) for splits in lacking.values() for rows in splits.values())
    milliseconds = 1000 * samples_to_seconds(subsampling.stride)
    for key, mend in MENDS.items():
        found = [
            item
            for name, rows in lacking[key].items()
            for item in _name(subject, name, rows, subsampling, key)
        ]
        yield from about(
            subject,
            CHECK,
            key,
            found=found,
            declared=f"CTC aligns every transcript to frames of {milliseconds:g} ms",
            effect="have fewer frames than their labels need",
            mend=mend,
            stops=impossible > MANY * utterances,
        )


def subsampling_of(subject: Subject) -> Subsampling | None:
    """Measure the declared front-end; None where it does not even run, which others tell."""
    features, front_end = (subject.hparams.get(name) for name in ("compute_features", "CNN"))
    if features is None or front_end is None:
        return None
    try:
        return measure_subsampling(features, front_end)
    except SbkitError:
        return None


def impossible_rows(subject: Subject) -> dict[str, Rows]:
    """Find the rows of every split that CTC cannot align."""
    subsampling = subsampling_of(subject)
    return {
        name: np.zeros(0, dtype=np.int64)
        if subsampling is None
        else each.lacking(subsampling, _fastest(subject, name))
        for name, each in transcripts_of(subject).items()
    }


def _by_cause(subject: Subject, subsampling: Subsampling) -> dict[str, dict[str, Rows]]:
    """Sort the rows of every split by the first of the mends that would help."""
    causes: dict[str, dict[str, Rows]] = {key: {} for key in MENDS}
    for name, each in transcripts_of(subject).items():
        percent = _fastest(subject, name)
        lacking = each.lacking(subsampling, percent)
        naturally = np.intersect1d(lacking, each.lacking(subsampling))
        anyway = np.intersect1d(naturally, each.lacking(subsampling.halved(), percent))
        causes["speeds"][name] = np.setdiff1d(lacking, naturally)
        causes["CNN"][name] = np.setdiff1d(naturally, anyway)
        causes["data_folder"][name] = anyway
    if any(map(len, causes["CNN"].values())):  # what mends these mends those of speed too
        for name, rows in causes["speeds"].items():
            causes["CNN"][name] = np.union1d(causes["CNN"][name], rows)
        causes["speeds"].clear()
    return causes


def _fastest(subject: Subject, split: str) -> int:
    """Give the percent of its speed at which a split is played fastest."""
    return fastest_percent(subject.knobs.get("speeds") or [1.0]) if split == "train" else 100


def _name(
    subject: Subject, split: str, rows: Rows, subsampling: Subsampling, key: str
) -> Iterator[LeftOut]:
    transcripts = transcripts_of(subject)[split]
    frames = transcripts.frames(subsampling, _fastest(subject, split))[rows]
    pairs = zip(frames, transcripts.frames_needed[rows], strict=True)
    details = (f"{has} frames, {needed} needed" for has, needed in pairs)
    return named(subject, split, rows, f"too short for its transcript ({key})", details)
