"""The recipe's data: from a release folder to loaders, by way of the stores and the tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from torch.utils.data import DataLoader

from recipes.AsteriskPrompts.prepare import prepare_prompts
from recipes.CommonVoice.prepare import SPLITS, LeftOut, prepare, report_left_out, select_train
from sbkit.data.batch import make_loader
from sbkit.data.sampler import EvalSampler, TrainSampler
from sbkit.data.store import default_cache, open_store
from sbkit.nn.frontend import ConvFrontEnd
from sbkit.tensors.device import Placement
from sbkit.tensors.distributed import rank, world_size
from sbkit.tensors.log import say
from sbkit.tensors.tokenizer import Tokenizer, ensure_tokenizer
from sbkit.values.errors import SbkitError
from sbkit.values.units import samples_to_frames, samples_to_seconds


@dataclass(frozen=True)
class Splits:
    """The utterances of a run; train is what is left of it within the limits."""

    train: datasets.Dataset
    dev: datasets.Dataset
    test: datasets.Dataset
    left_out: list[LeftOut] = field(default_factory=list)


@dataclass(frozen=True)
class Loaders:
    """Batches of each split, and the training set once more without shuffling, to measure it."""

    train: DataLoader[dict[str, Any]]
    dev: DataLoader[dict[str, Any]]
    test: DataLoader[dict[str, Any]]
    measure: DataLoader[dict[str, Any]]


def prepare_splits(knobs: Mapping[str, Any]) -> Splits:
    """Prepare what is not prepared yet, and limit train."""
    cache = default_cache()
    folder = knobs["data_folder"] or prepare_prompts(language=knobs["language"], cache_folder=cache)
    prepared = prepare(data_folder=folder, language=knobs["language"], cache_folder=cache)
    stores = {split: open_store(path) for split, path in prepared.stores.items()}
    limits = {name: knobs[name] for name in ("min_seconds", "max_seconds")}
    stores["train"], outside = select_train(stores["train"], **limits)
    if not len(stores["train"]):
        raise SbkitError(
            f"`min_seconds` and `max_seconds` must leave something to train on, but none of the "
            f"{len(outside)} utterances is between {limits['min_seconds']:g} and "
            f"{limits['max_seconds']:g} s long. Widen them."
        )
    return Splits(**stores, left_out=[*prepared.left_out, *outside])


def prepare_tokenizer(knobs: Mapping[str, Any], splits: Splits) -> Tokenizer:
    """Train the tokenizer on the training text, unless the run folder has it; check it."""
    return ensure_tokenizer(
        model_file=_run_folder(knobs) / "tokenizer.model",
        kind=knobs["token_type"],
        vocab_size=knobs["vocab_size"],
        texts=lambda: splits.train["text"],
    )


def make_loaders(
    knobs: Mapping[str, Any], splits: Splits, tokenizer: Tokenizer, placement: Placement
) -> Loaders:
    """Leave out of train what CTC cannot learn, say all that is left out, and plan the batches."""
    splits = leave_out_impossible(splits, tokenizer, fastest=max([1.0, *knobs["speeds"]]))
    if rank() == 0:
        _tell(splits, tokenizer, _run_folder(knobs))
    ranks = {"rank": rank(), "world_size": world_size()}
    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "num_workers": knobs["num_workers"],
        "pin_memory": placement.device.type == "cuda",
    }
    train = TrainSampler(
        samples=_samples(splits.train),
        batch_seconds=knobs["batch_seconds"],
        seed=knobs["seed"],
        join_share=knobs["join_share"],
        speeds=knobs["speeds"],
        accumulation=knobs["grad_accumulation_factor"],
        **ranks,
    )

    def in_order(split: datasets.Dataset) -> DataLoader[dict[str, Any]]:
        seconds = knobs["eval_batch_seconds"]
        sampler = EvalSampler(samples=_samples(split), batch_seconds=seconds, **ranks)
        return make_loader(split, sampler=sampler, **options)

    return Loaders(
        train=make_loader(splits.train, sampler=train, **options),
        dev=in_order(splits.dev),
        test=in_order(splits.test),
        measure=in_order(splits.train),
    )


def _samples(split: datasets.Dataset) -> np.ndarray[Any, Any]:
    return np.asarray(split.with_format("numpy")["samples"][:])


def _run_folder(knobs: Mapping[str, Any]) -> Path:
    folder = Path(knobs["output_folder"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SbkitError(
            f"`output_folder` must be a folder to write to, but {folder} is not "
            f"({error.strerror}). Choose another one."
        ) from error
    return folder


def leave_out_impossible(splits: Splits, tokenizer: Tokenizer, *, fastest: float) -> Splits:
    """Leave out of train what has fewer frames, at its fastest, than CTC needs for its labels."""
    lacking = _lacking_frames(splits.train, tokenizer, speed=fastest)
    ids = splits.train["id"][:]
    left_out = [
        LeftOut("train", ids[row], "too short for its transcript", detail)
        for row, detail in lacking.items()
    ]
    kept = [row for row in range(len(splits.train)) if row not in lacking]
    return replace(splits, train=splits.train.select(kept), left_out=[*splits.left_out, *left_out])


def _lacking_frames(
    split: datasets.Dataset, tokenizer: Tokenizer, *, speed: float = 1.0
) -> dict[int, str]:
    """Find the rows with too few frames: one for each label, one more between two equal ones.

    For a front-end that subsamples by four, as all of hparams/ do. With another one the loss still
    gives no weight to what has no alignment; only this list is not exact.
    """
    lacking = {}
    for row, (samples, text) in enumerate(zip(_samples(split), split["text"][:], strict=True)):
        frames = -(-samples_to_frames(int(samples / speed)) // ConvFrontEnd.subsampling)
        labels = tokenizer.encode(text)
        needed = len(labels) + sum(before == after for before, after in pairwise(labels))
        if frames < needed:
            lacking[row] = f"{frames} frames of 40 ms, {needed} needed"
    return lacking


def _tell(splits: Splits, tokenizer: Tokenizer, folder: Path) -> None:
    for name in SPLITS:
        split = getattr(splits, name)
        minutes = samples_to_seconds(int(_samples(split).sum())) / 60
        say(f"{name}: {len(split)} utterances, {minutes:.1f} min")
    listing = folder / "left_out.tsv"
    for (name, reason), count in report_left_out(splits.left_out, listing).items():
        say(f"{name}: {count} left out, {reason} (listed in {listing})")
    for name in ("dev", "test"):
        _tell_unwritable(name, getattr(splits, name), tokenizer)


def _tell_unwritable(name: str, split: datasets.Dataset, tokenizer: Tokenizer) -> None:
    """Say how many transcripts no model could write; they are kept, and count as errors."""
    unk = tokenizer.labels.unk
    unseen = sum(unk in tokenizer.encode(text) for text in split["text"])
    reasons = {
        "hold characters that the training text never showed": unseen,
        "need more frames than their audio has": len(_lacking_frames(split, tokenizer)),
    }
    for reason, count in reasons.items():
        if count:
            say(
                f"{name}: {count} transcripts {reason}; the model cannot write them in full, and "
                "they count as errors"
            )
