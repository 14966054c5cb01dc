"""The data of every recipe: settings -> corpus -> manifests -> prepared splits -> loaders."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset, concatenate_datasets

from sbkit.base.content_cache import keep
from sbkit.base.errors import DataError
from sbkit.base.files import to_json
from sbkit.base.ranges import DAY, RANGES, Kind, Range
from sbkit.config.hparams import Settings
from sbkit.data.batch import Batch, Loaders, collate_audio, make_loaders
from sbkit.data.corpus import Corpus, SettingValues, corpus_of
from sbkit.data.filters import filter_manifests
from sbkit.data.manifest import MIX_SOURCE, Manifest, check_locale
from sbkit.data.mix import read_shares
from sbkit.data.prepared_splits import PreparedData, prepare_once
from sbkit.data.sampler import TrainSampler
from sbkit.data.shard import STORES, Row
from sbkit.data.splits import (
    EMPTY,
    Keep,
    PreparedSplit,
    Splits,
    prepare_split,
    read_column,
    within_limits,
)
from sbkit.distributed.device import Placement
from sbkit.text.languages import check_language
from sbkit.text.normalization import text_table
from sbkit.text.transcripts import check_tag_names, transcript_normalizer
from sbkit.train.recipe import Recipe

COMMON_RANGES = {  # of the keys that every recipe here reads
    **TrainSampler.RANGES,
    **dict.fromkeys(
        ("min_seconds", "max_seconds"),
        Range(low=0, high=DAY, advice="From 0 to 86400 clips may have any length."),
    ),
    "eval_batch_seconds": Range(low=1, advice="120 is usual."),
    "sample_rate": Range(low=1000, high=384_000, integer=True, advice="16000 is usual."),
    "audio_store": Kind(
        STORES, advice="pcm is fast; flac takes 60 % of its space; lazy none, but needs durations."
    ),
    **{name: RANGES[name] for name in ("corpus", "data_folder")},
}


# Prepared splits


def prepare_transcripts(settings: SettingValues) -> Splits:
    """Prepare audio and normalized transcripts; empty ones are excluded from training."""
    table = text_table(check_language(settings["language"]), settings.get("text"))
    tags = check_tag_names(settings.get("keep_tags"))
    return _prepare(settings, normalize=transcript_normalizer(table, tags))


def prepare_audio(settings: SettingValues) -> Splits:
    """Prepare audio and all columns of the manifest; transcripts may be empty."""
    return _prepare(settings, normalize=str, keep_empty=True)


def _read_sources(corpus: Corpus, names: Sequence[str]) -> dict[str, Iterator[Manifest]]:
    """Return the blocks of splits, without the rows that filters leave out."""
    # A filter needs all splits at once: a tag is wrong if no row of any has it.
    settings = corpus.settings
    blocks = {name: corpus.blocks(name) for name in names}
    if not (settings.get("where") or settings.get("skip_quality_tags")):
        return blocks
    manifests = {name: Manifest.join(blocks[name]) for name in names}
    filtered = filter_manifests(manifests, settings)
    return {name: manifest.blocks() for name, manifest in filtered.items()}


def _prepare(
    settings: SettingValues, *, normalize: Callable[[str], str], keep_empty: bool = False
) -> Splits:
    def make(corpus: Corpus, keep_rows: Keep) -> PreparedData:
        own_settings = corpus.settings
        roles = corpus.roles()
        read_shares(settings.get("mix") or {}, roles["train"])  # before audio is decoded
        store = own_settings.get("audio_store", "pcm")
        names = [*chain(*roles.values())]
        sources = _read_sources(corpus, names)
        splits: dict[str, PreparedSplit] = {}
        for name in names:
            blocks = sources.pop(name)
            if not keep_empty:
                blocks = check_locale(blocks, own_settings["language"])
            splits[name] = prepare_split(
                blocks,
                split=name,
                normalize=normalize,
                sample_rate=own_settings["sample_rate"],
                keep_empty=keep_empty or name not in roles["train"],
                store=store,
                keep=keep_rows,
                roots=corpus.roots(),
            )
        return PreparedData(roles, splits)

    kind = "audio" if keep_empty else "transcripts"
    return _assemble(settings, prepare_once(corpus_of(settings), kind, make))


def _assemble(settings: SettingValues, prepared: PreparedData) -> Splits:
    """Join the training splits, and exclude utterances that are too short or too long."""
    roles, splits = prepared
    mix = read_shares(settings.get("mix") or {}, roles["train"])
    train_splits = [splits[name] for name in roles["train"]]
    train = concatenate_datasets([split.dataset for split in train_splits])
    if not len(train):
        excluded = [row for split in train_splits for row in split.excluded]
        reasons = {row.reason for row in excluded}
        if reasons == {EMPTY}:
            raise DataError(
                f"All {len(excluded)} sentences of train are empty after normalization for "
                f"`language: {settings['language']}`."
            )
        raise DataError(
            f"The training set is empty: all {len(excluded)} rows are left out "
            f"({', '.join(sorted(reasons)) or 'there are none'})."
        )
    if mix:
        counts = [len(split.dataset) for split in train_splits]
        train = train.add_column(MIX_SOURCE, np.repeat(np.arange(len(counts)), counts))
    inside, out_of_range = within_limits(
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
        fingerprints={name: split.fingerprint for name, split in splits.items()},
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
    """Add a column to each split, computed once and kept in the cache; one of a table is replaced.

    ``identity`` is plain data that names what else than a split and sbkit's code decides the texts.
    """
    named = splits.named()
    for name, split in named.items():

        def write(file: Path, split: Dataset = split) -> None:
            file.write_text("".join(f"{text}\n" for text in compute(split)), encoding="utf-8")

        def is_current(file: Path, count: int = len(split)) -> bool:
            return file.read_bytes().count(b"\n") == count

        made_from = {"split": split._fingerprint, "identity": identity}
        content = keep(column, made_from, write, is_current=is_current).read_text(encoding="utf-8")
        kept = split.select_columns([other for other in split.column_names if other != column])
        named[name] = kept.add_column(column, content.split("\n")[:-1])
    return with_fingerprints(splits.with_named(named), column)


# Loaders


def collate_clips(rows: Sequence[Row], *, sample_rate: int) -> Batch:
    """Pad utterances to a batch without labels."""
    return Batch(**collate_audio(rows, sample_rate))


class CorpusRecipe(Recipe):
    """A recipe that trains on any corpus; by default on its audio, without labels."""

    ranges: ClassVar[Mapping[str, Range]] = COMMON_RANGES

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
