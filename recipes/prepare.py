"""The data of every recipe: settings -> corpus -> manifests -> prepared splits -> loaders."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset, concatenate_datasets

from sbkit.base.errors import ConfigError, DataError
from sbkit.base.files import to_json
from sbkit.base.imports import user_digests
from sbkit.base.ranges import DAY, Range
from sbkit.config.hparams import Settings
from sbkit.config.keys import KEYS, Key, data_key, with_defaults
from sbkit.data.batch import Batch, Loaders, collate_audio, make_loaders
from sbkit.data.corpus import Corpus, SettingValues, corpus_of
from sbkit.data.manifest import MIX_SOURCE, to_texts
from sbkit.data.mix import parse_mix_shares
from sbkit.data.prepared import PreparedData, prepare, split_fingerprint
from sbkit.data.shard import Row
from sbkit.data.splits import (
    Splits,
    add_texts,
    cached_column,
    normalize_texts,
    read_column,
    select_by_length,
)
from sbkit.distributed.device import Placement
from sbkit.train.recipe import Recipe

# Prepared splits


def prepare_transcripts(settings: SettingValues) -> Splits:
    """Prepare audio and normalized transcripts; empty ones are excluded from training."""
    settings = with_defaults(settings)
    data, table = normalize_texts(settings, _prepare(settings))
    return replace(_assemble(settings, data), table=table)


def prepare_audio(settings: SettingValues) -> Splits:
    """Prepare audio and all columns of the manifest; transcripts may be empty."""
    settings = with_defaults(settings)
    data = _prepare(settings)
    splits = {
        name: add_texts(split, name, str, {}, keep_empty=True)
        for name, split in data.splits.items()
    }
    return _assemble(settings, data._replace(splits=splits))


def _prepare(settings: SettingValues) -> PreparedData:
    shortest, longest = settings["min_seconds"], settings["max_seconds"]
    if shortest > longest:
        raise ConfigError(
            f"`min_seconds` must be at most `max_seconds`, but is {shortest:g}, of {longest:g}.",
            keys=("min_seconds",),
        )
    corpus = corpus_of(settings)
    parse_mix_shares(settings["mix"] or {}, corpus.roles()["train"])  # before audio is decoded
    return prepare(settings, corpus)


def _assemble(settings: SettingValues, data: PreparedData) -> Splits:
    """Join the training splits, and exclude utterances that are too short or too long."""
    roles, splits = data
    mix = parse_mix_shares(settings["mix"] or {}, roles["train"])
    train_splits = [splits[name] for name in roles["train"]]
    train = concatenate_datasets([split.dataset for split in train_splits])
    if not len(train):
        excluded = [row for split in train_splits for row in split.excluded]
        reasons = {row.reason for row in excluded}
        raise DataError(
            f"The training set is empty: all {len(excluded)} rows are left out "
            f"({', '.join(sorted(reasons)) or 'there are none'})."
        )
    if mix:
        counts = [len(split.dataset) for split in train_splits]
        train = train.add_column(MIX_SOURCE, np.repeat(np.arange(len(counts)), counts))
    inside, out_of_range = select_by_length(
        train,
        min_seconds=settings["min_seconds"],
        max_seconds=settings["max_seconds"],
        sample_rate=settings["sample_rate"],
    )
    return Splits(
        inside,
        {name: splits[name].dataset for name in roles["valid"]},
        {name: splits[name].dataset for name in roles["test"]},
        excluded=[row for split in splits.values() for row in split.excluded],
        out_of_range=out_of_range,
        fingerprints={
            name: split_fingerprint(splits[name].digest, role, index)
            for role, names in roles.items()
            for index, name in enumerate(names)
        },
        mix=mix,
        filtered={name: split.filtered for name, split in splits.items()},
    )


def with_fingerprints(splits: Splits, column: str) -> Splits:
    """Fingerprint a column of the tables, so that a run is resumed with the same values only."""
    fingerprints = {**splits.fingerprints}
    for name, split in splits.named().items():
        if column in split.column_names:
            content = to_json(read_column(split, column)).encode()
            fingerprints[f"{name}, {column}"] = hashlib.sha256(content).hexdigest()
    return replace(splits, fingerprints=fingerprints)


def with_column(
    splits: Splits, column: str, compute: Callable[[Dataset], Iterable[str]], *, identity: object
) -> Splits:
    """Add a column to each split, computed once and cached; one of a table is replaced.

    identity: plain data that names what else than a split and the code of sbkit or of ``compute``
        decides the texts.
    """
    made_from = {"identity": identity, "modules": user_digests(compute.__module__)}
    named = splits.named()
    for name, split in named.items():
        texts = cached_column(split, column, made_from, partial(compute, split))
        kept = split.select_columns([other for other in split.column_names if other != column])
        named[name] = kept.add_column(column, to_texts(texts.table[column]))
    return with_fingerprints(splits.with_named(named), column)


# Loaders


def collate_clips(rows: Sequence[Row], *, sample_rate: int) -> Batch:
    """Pad utterances to a batch without labels."""
    return Batch(**collate_audio(rows, sample_rate))


class CorpusRecipe(Recipe):
    """A recipe that trains on any corpus; by default on its audio, without labels."""

    keys: ClassVar[Mapping[str, Key]] = {
        **KEYS,
        **dict.fromkeys(
            ("min_seconds", "max_seconds"),
            data_key(Range(low=0, high=DAY, advice="From 0 to 86400 clips may have any length.")),
        ),
    }

    def corpus(self, settings: Settings) -> Corpus:
        return corpus_of(settings)

    def prepare_splits(self, settings: Settings) -> Splits:
        return prepare_audio(settings)

    def make_loaders(
        self, hparams: Settings, splits: Splits, labels: Any, placement: Placement
    ) -> Loaders:
        collate = self.make_collate(hparams, labels)
        return make_loaders(splits, hparams, collate=collate, placement=placement)

    def make_collate(self, hparams: Settings, labels: Any) -> Callable[[Sequence[Row]], Batch]:
        """Return a function that pads utterances to a batch; each process pickles it."""
        return partial(collate_clips, sample_rate=hparams["sample_rate"])
