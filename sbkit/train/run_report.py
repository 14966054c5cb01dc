"""The page of a tested run, ``report.html``, with the audio and the words of its own data."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow.compute as pc

from sbkit.base.version import __version__
from sbkit.data.columns import take_columns
from sbkit.data.players import encode_clips
from sbkit.logs.report import LONGEST, REPORT, Known, write_report
from sbkit.logs.run_results import read_results


def report_run(
    brain: Any, folder: Path, test: Mapping[str, Mapping[str, Any]], *, weights: str
) -> None:
    """Write the report of a test; ``test`` holds the figures, and the other files are there.

    A Brain that no Run made knows no data: its report has no audio and no unknown words.
    """
    results = read_results(folder, test)
    parameters = sum(each.numel() for each in brain.modules.parameters())
    splits = None if brain.loaders is None else brain.loaders.splits
    write_report(
        folder / REPORT,
        [results],
        clips=partial(clips_of, splits.test, brain.hparams.sample_rate) if splits else _no_clips,
        metrics=brain.metrics,
        known=_known_words(splits.train) if splits and results.utterances else None,
        notes=[f"{parameters / 1e6:.1f} M parameters, {weights}, sbkit {__version__}"],
    )


def _no_clips(name: str, ids: list[str], most: int) -> dict[str, str]:
    return {}


def clips_of(
    splits: Mapping[str, datasets.Dataset], sample_rate: int, name: str, ids: list[str], most: int
) -> dict[str, str]:
    """Return the clips of a test set in base64, by id, in at most so many bytes."""
    if name not in splits:
        return {}
    return encode_clips(splits[name], ids, sample_rate=sample_rate, longest=LONGEST, budget=most)


def _known_words(train: datasets.Dataset) -> Known:
    texts = take_columns(train, "text")["text"].combine_chunks()
    words = pc.unique(pc.list_flatten(pc.utf8_split_whitespace(texts)))
    return Known(words=frozenset(words.to_pylist()), source="the words of the training transcripts")
