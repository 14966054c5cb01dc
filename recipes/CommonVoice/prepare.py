"""Prepare a Common Voice release folder, or any folder of the same form.

release folder: <split>.tsv + clips/ -> normalized text, 16 kHz audio -> one dataset per split
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from datasets import Dataset

from sbkit.base.errors import SbkitError
from sbkit.base.units import SAMPLE_RATE, samples_to_seconds, seconds_to_samples
from sbkit.data.manifest import read_manifest
from sbkit.data.prepare import prepare_split
from sbkit.data.splits import Excluded
from sbkit.data.store import sample_counts
from sbkit.text.normalize import normalize

SPLITS = ("train", "dev", "test")


@dataclass(frozen=True)
class Prepared:
    """The dataset of each split, and what is in none of them."""

    datasets: Mapping[str, Dataset]
    left_out: list[Excluded]


def prepare(
    *,
    data_folder: str | Path | None,
    language: str,
    cache_folder: str | Path,
    splits: Sequence[str] = SPLITS,
) -> Prepared:
    """Normalize the splits, and decode the clips that are not in the cache yet.

    Raises:
        SbkitError: the folder is no release, or too much of a split is unusable.
    """
    release = find_release(data_folder, language, splits)
    datasets: dict[str, Dataset] = {}
    left_out: list[Excluded] = []
    for split in splits:
        prepared = prepare_split(
            read_manifest(release / f"{split}.tsv"),
            split=split,
            normalize=partial(normalize, language=language),
            sample_rate=SAMPLE_RATE,
            cache_folder=Path(cache_folder),
            keep_empty=split != "train",
        )
        datasets[split] = prepared.dataset
        left_out += prepared.excluded
    return Prepared(datasets, left_out)


def find_release(
    data_folder: str | Path | None, language: str, splits: Sequence[str] = SPLITS
) -> Path:
    """Find the folder that holds the TSVs: the one named, or the language's folder inside it."""
    todo = (
        "Pass --data_folder=FOLDER of a Common Voice release, which holds "
        f"{', '.join(f'{split}.tsv' for split in splits)} and clips/."
    )
    if not data_folder:
        raise SbkitError(f"data_folder must name a folder, but is not set. {todo}")
    named = Path(data_folder).expanduser().absolute()
    if not named.is_dir():
        raise SbkitError(f"data_folder must be a folder, but {named} is not one. {todo}")
    release = named
    if not (named / f"{splits[0]}.tsv").is_file() and (named / language).is_dir():
        release = named / language
    missing = [f"{split}.tsv" for split in splits if not (release / f"{split}.tsv").is_file()]
    if not (release / "clips").is_dir():
        missing.append("clips/")
    if missing:
        raise SbkitError(
            f"data_folder must hold a release, but {release} has no {', '.join(missing)}. {todo}"
        )
    return release


def select_train(
    dataset: Dataset, *, min_seconds: float, max_seconds: float
) -> tuple[Dataset, list[Excluded]]:
    """Keep the utterances of a length to train on; looks at no audio."""
    samples = sample_counts(dataset)
    too_short = samples < seconds_to_samples(min_seconds)
    too_long = samples > seconds_to_samples(max_seconds)
    ids = dataset["id"][:]
    left_out = [
        Excluded("train", ids[row], reason, f"{samples_to_seconds(int(samples[row])):.2f} s")
        for rows, reason in (
            (too_short, f"shorter than {min_seconds:g} s"),
            (too_long, f"longer than {max_seconds:g} s"),
        )
        for row in np.flatnonzero(rows)
    ]
    return dataset.select(np.flatnonzero(~(too_short | too_long))), left_out
