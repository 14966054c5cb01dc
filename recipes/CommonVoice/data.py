"""The recipe's data: from a release folder to loaders, by way of the stores and the tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from torch.utils.data import DataLoader

from recipes.AsteriskPrompts.prepare import prepare_prompts
from recipes.CommonVoice.prepare import prepare, select_train
from sbkit.base.errors import SbkitError
from sbkit.base.units import samples_to_seconds
from sbkit.data.batch import make_loader
from sbkit.data.sampler import EvalSampler, TrainSampler, fastest_percent
from sbkit.data.splits import SPLITS, Excluded, Splits, report_left_out
from sbkit.data.store import default_cache, open_store, sample_counts, take_columns
from sbkit.data.transcripts import Transcripts, read_transcripts
from sbkit.distributed.device import Placement
from sbkit.distributed.ranks import rank, world_size
from sbkit.logs.log import say
from sbkit.models.subsampling import Subsampling, measure_subsampling
from sbkit.text.tokenizer import Tokenizer, ensure_tokenizer


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
    if not len(stores["train"]) + len(outside):
        empty = sum(item.split == "train" for item in prepared.left_out)
        raise SbkitError(
            f"Sentences of train must hold text that `language: {knobs['language']}` can write, "
            f"but all {empty} are empty. Look at the column `sentence`, and at `language`."
        )
    if not len(stores["train"]):
        raise SbkitError(
            f"`min_seconds` and `max_seconds` must leave something to train on, but none of the "
            f"{len(outside)} utterances is between {limits['min_seconds']:g} and "
            f"{limits['max_seconds']:g} s long. Widen them."
        )
    return Splits(**stores, left_out=prepared.left_out, outside=outside)


def prepare_tokenizer(knobs: Mapping[str, Any], splits: Splits) -> Tokenizer:
    """Train the tokenizer on the training text, unless the run folder has it; check it."""
    return ensure_tokenizer(
        model_file=_run_folder(knobs) / "tokenizer.model",
        kind=knobs["token_type"],
        vocab_size=knobs["vocab_size"],
        texts=lambda: take_columns(splits.train, "text")["text"].to_pylist(),
    )


def make_loaders(
    hparams: Mapping[str, Any], splits: Splits, tokenizer: Tokenizer, placement: Placement
) -> Loaders:
    """Leave out of train what CTC cannot learn, say all that is left out, and plan the batches."""
    subsampling = measure_subsampling(hparams["compute_features"], hparams["CNN"])
    splits = leave_out_impossible(splits, tokenizer, subsampling, hparams["speeds"])
    if rank() == 0:
        _tell(splits, tokenizer, subsampling, _run_folder(hparams))
    ranks = {"rank": rank(), "world_size": world_size()}
    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "num_workers": hparams["num_workers"],
        "pin_memory": placement.device.type == "cuda",
    }
    train = TrainSampler(
        samples=sample_counts(splits.train),
        batch_seconds=hparams["batch_seconds"],
        seed=hparams["seed"],
        concat_prob=hparams["concat_prob"],
        speeds=hparams["speeds"],
        accumulation=hparams["grad_accumulation_factor"],
        **ranks,
    )

    def in_order(split: datasets.Dataset) -> DataLoader[dict[str, Any]]:
        seconds = hparams["eval_batch_seconds"]
        sampler = EvalSampler(samples=sample_counts(split), batch_seconds=seconds, **ranks)
        return make_loader(split, sampler=sampler, **options)

    return Loaders(
        train=make_loader(splits.train, sampler=train, **options),
        dev=in_order(splits.dev),
        test=in_order(splits.test),
        measure=in_order(splits.train),
    )


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


def leave_out_impossible(
    splits: Splits, tokenizer: Tokenizer, subsampling: Subsampling, speeds: Sequence[float]
) -> Splits:
    """Leave out of train what has fewer frames, at its fastest, than CTC needs for its labels."""
    transcripts = read_transcripts(splits.train, tokenizer)
    fastest = fastest_percent(speeds)
    lacking = transcripts.lacking(subsampling, fastest)
    frames, needed = transcripts.frames(subsampling, fastest), transcripts.frames_needed
    left_out = [
        Excluded(
            "train",
            utterance,
            "too short for its transcript",
            f"{frames[row]} frames, {needed[row]} needed",
        )
        for row, utterance in zip(lacking, splits.train.select(lacking)["id"], strict=True)
    ]
    kept = np.setdiff1d(np.arange(len(splits.train)), lacking)
    return replace(splits, train=splits.train.select(kept), left_out=[*splits.left_out, *left_out])


def _tell(splits: Splits, tokenizer: Tokenizer, subsampling: Subsampling, folder: Path) -> None:
    for name in SPLITS:
        split = getattr(splits, name)
        minutes = samples_to_seconds(int(sample_counts(split).sum())) / 60
        say(f"{name}: {len(split)} utterances, {minutes:.1f} min")
    listing = folder / "left_out.tsv"
    left_out = [*splits.left_out, *splits.outside]
    for (name, reason), count in report_left_out(left_out, listing).items():
        say(f"{name}: {count} left out, {reason} (listed in {listing})")
    for name in ("dev", "test"):
        _tell_unwritable(name, read_transcripts(getattr(splits, name), tokenizer), subsampling)


def _tell_unwritable(name: str, transcripts: Transcripts, subsampling: Subsampling) -> None:
    """Say how many transcripts no model could write; they are kept, and count as errors."""
    reasons = {
        "hold characters that the training text never showed": transcripts.unknown.sum(),
        "need more frames than their audio has": len(transcripts.lacking(subsampling)),
    }
    for reason, count in reasons.items():
        if count:
            say(
                f"{name}: {count} transcripts {reason}; the model cannot write them in full, and "
                "they count as errors"
            )
