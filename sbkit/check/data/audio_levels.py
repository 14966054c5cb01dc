"""Whether clips are silent or clipped, by the levels of some of them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sbkit.audio.io import FULL_SCALE, Samples
from sbkit.check.data.utterances import Rows, named, notice
from sbkit.check.finding import Finding
from sbkit.check.planned_run import PlannedRun
from sbkit.data.storage.audio_store import read_clips

SAMPLED = 500  # utterances of a split, evenly spread over it
WHICH = f"up to {SAMPLED} clips of each split were looked at"
AT_ONCE = 50  # of them in memory; about 8 MB
SILENT = FULL_SCALE * 10 ** (-50 / 20)  # loudest sample, 50 dB below full scale
TOP = 0.99 * FULL_SCALE
CLIPPED = 0.001  # share of samples at the top; the default corpus has none there


@dataclass(frozen=True)
class Audio:
    """Levels of a clip: its loudest sample, and the share of samples at full scale."""

    peak: float
    at_top: float


def check_levels(planned: PlannedRun) -> Iterator[Finding]:
    """Find silent clips, and clips that are cut at full scale."""
    silent: dict[str, Rows] = {}
    clipped: dict[str, Rows] = {}
    for name, split in planned.splits.named().items():
        rows = sampled_rows(len(split))
        levels = [*map(measure_audio, read_clips(split, rows.tolist(), AT_ONCE))]
        silent[name] = rows[np.array([each.peak < SILENT for each in levels], dtype=np.bool_)]
        clipped[name] = rows[np.array([each.at_top > CLIPPED for each in levels], dtype=np.bool_)]
    yield from notice(
        planned,
        found=named(planned, silent, "silent audio"),
        declared="every clip must hold sound",
        effect=f"are silent ({WHICH})",
        fix="Record them again, or take them out.",
    )
    yield from notice(
        planned,
        found=named(planned, clipped, "clipped audio"),
        declared="every clip must stay below full scale",
        effect=f"are clipped ({WHICH})",
        fix="Record them again at a lower level, or take them out.",
    )


def sampled_rows(count: int) -> Rows:
    """Choose rows evenly spread over a split, always the same."""
    return np.unique(np.linspace(0, count - 1, min(count, SAMPLED)).astype(np.int64))


def measure_audio(samples: Samples) -> Audio:
    """Measure the levels of a clip."""
    levels = np.abs(samples.astype(np.int32))
    return Audio(float(levels.max(initial=0)), float((levels >= TOP).sum() / max(1, len(levels))))
