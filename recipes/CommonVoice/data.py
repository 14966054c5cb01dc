"""The recipe's data: from a release folder to loaders, by way of the stores and the tokenizer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from torch.utils.data import DataLoader

from recipes.AsteriskPrompts.prepare import prepare_prompts
from recipes.CommonVoice.prepare import LeftOut, prepare, report_left_out, select_train
from sbkit.data.batch import make_loader
from sbkit.data.sampler import EvalSampler, TrainSampler
from sbkit.data.store import default_cache, open_store
from sbkit.tensors.device import Placement
from sbkit.tensors.distributed import rank, world_size
from sbkit.tensors.log import say
from sbkit.tensors.tokenizer import Tokenizer, ensure_tokenizer
from sbkit.values.units import samples_to_seconds


@dataclass(frozen=True)
class Splits:
    """The utterances of a run; train is what is left of it within the limits."""

    train: datasets.Dataset
    dev: datasets.Dataset
    test: datasets.Dataset


@dataclass(frozen=True)
class Loaders:
    """Batches of each split, and the training set once more without shuffling, to measure it."""

    train: DataLoader[dict[str, Any]]
    dev: DataLoader[dict[str, Any]]
    test: DataLoader[dict[str, Any]]
    measure: DataLoader[dict[str, Any]]


def prepare_splits(knobs: Mapping[str, Any]) -> Splits:
    """Prepare what is not prepared yet, and say what the run does without."""
    cache = default_cache()
    folder = knobs["data_folder"] or prepare_prompts(language=knobs["language"], cache_folder=cache)
    prepared = prepare(data_folder=folder, language=knobs["language"], cache_folder=cache)
    stores = {split: open_store(path) for split, path in prepared.stores.items()}
    limits = {name: knobs[name] for name in ("min_seconds", "max_seconds")}
    stores["train"], outside = select_train(stores["train"], **limits)
    if rank() == 0:
        _tell(stores, [*prepared.left_out, *outside], Path(knobs["output_folder"]))
    return Splits(**stores)


def prepare_tokenizer(knobs: Mapping[str, Any], splits: Splits) -> Tokenizer:
    """Train the tokenizer on the training text, unless the run folder has it; check it."""
    tokenizer = ensure_tokenizer(
        model_file=Path(knobs["output_folder"]) / "tokenizer.model",
        kind=knobs["token_type"],
        vocab_size=knobs["vocab_size"],
        texts=lambda: splits.train["text"],
    )
    for split in ("dev", "test"):
        _tell_unseen(split, getattr(splits, split)["text"], tokenizer)
    return tokenizer


def make_loaders(
    knobs: Mapping[str, Any], splits: Splits, tokenizer: Tokenizer, placement: Placement
) -> Loaders:
    """Plan the batches of this rank."""
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


def _tell(stores: Mapping[str, datasets.Dataset], left_out: list[LeftOut], folder: Path) -> None:
    for split, store in stores.items():
        minutes = samples_to_seconds(int(_samples(store).sum())) / 60
        say(f"{split}: {len(store)} utterances, {minutes:.1f} min")
    listing = folder / "left_out.tsv"
    for (split, reason), count in report_left_out(left_out, listing).items():
        say(f"{split}: {count} left out, {reason} (listed in {listing})")


def _tell_unseen(split: str, texts: Iterable[str], tokenizer: Tokenizer) -> None:
    """Say how many transcripts hold characters that the training text never showed."""
    unk = tokenizer.labels.unk
    count = sum(unk in tokenizer.encode(text) for text in texts)
    if count:
        say(
            f"{split}: {count} transcripts hold characters that the training text never showed; "
            "the model cannot write them, and they count as errors"
        )
