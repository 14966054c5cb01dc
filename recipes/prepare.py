"""From the knobs to prepared splits, for every recipe: corpus -> manifests -> datasets.

Choose the corpus of a run: by its name, by manifests, by its folder, or the default one.
"""

import hashlib
import importlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets

from recipes.AsteriskPrompts import corpus as asterisk_prompts
from recipes.LibriSpeech import corpus as librispeech
from recipes.OwnData import corpus as own_data
from sbkit.base.errors import SbkitError
from sbkit.base.files import to_json, write_text_atomically
from sbkit.base.messages import listed, plural
from sbkit.base.units import samples_to_seconds
from sbkit.config.ranges import DAY, Range, Text
from sbkit.data import release as common_voice
from sbkit.data import sharded_corpus
from sbkit.data.batch import Batch, Loaders, collate_audio, make_loaders
from sbkit.data.cache import default_cache, is_archive, unpacked
from sbkit.data.corpus import Corpus, read_listed, resolve_splits
from sbkit.data.manifest import Excluded, Manifest, check_locale
from sbkit.data.sampler import TrainSampler
from sbkit.data.shard import AUDIO, require_store
from sbkit.data.sources import StreamedSplit
from sbkit.data.splits import (
    EMPTY,
    PreparedSplit,
    Splits,
    filled_rows,
    prepare_split,
    sample_counts,
    take_columns,
    within_limits,
    write_excluded,
)
from sbkit.distributed.device import Placement
from sbkit.distributed.ranks import rank
from sbkit.text.languages import check_language
from sbkit.text.normalization import normalize

logger = logging.getLogger(__name__)


RANGES = {  # of what every recipe here reads
    **TrainSampler.RANGES,
    **dict.fromkeys(
        ("min_seconds", "max_seconds"),
        Range(low=0, high=DAY, advice="From 0 to 86400 clips may have any length."),
    ),
    "eval_batch_seconds": Range(low=1, advice="120 is usual."),
    "sample_rate": Range(low=1000, high=384_000, whole=True, advice="16000 is usual."),
    **dict.fromkeys(("data_folder", "corpus", "path_column"), Text()),
    "text_column": Text(or_false=True),
}
OF_AUDIO = frozenset({"samples", AUDIO})  # columns that hold no text


def prepare_transcripts(knobs: Mapping[str, Any]) -> Splits:
    """Prepare audio and normalized transcripts; training does without empty ones.

    Raises:
        SbkitError: `language` is no tag of a language, or most of a split is in another one.
    """
    check_language(knobs["language"])
    return _prepare(knobs, normalize=partial(normalize, language=knobs["language"]))


def prepare_audio(knobs: Mapping[str, Any]) -> Splits:
    """Prepare audio and all columns of the manifest; transcripts may be empty."""
    return _prepare(knobs, normalize=str, keep_empty=True)


def prepare_labelled(knobs: Mapping[str, Any]) -> Splits:
    """Prepare audio and all columns, without the utterances whose column `label` is empty.

    Raises:
        SbkitError: a split has no such column, no utterance with a label, or one with a label that
            train has not.
    """
    splits, column = prepare_audio(knobs), knobs["label"]
    named, excluded = splits.named(), [*splits.excluded]
    fingerprints = {**splits.fingerprints}
    for name, split in named.items():
        columns = [each for each in split.column_names if each not in OF_AUDIO]
        if column not in columns:
            raise SbkitError(
                f"`label` must name a column of the manifest, but {column!r} is none of {name} "
                f"({', '.join(columns)}). Choose one of them, or add it."
            )
        labelled = filled_rows(split, column)
        if not len(labelled):
            raise SbkitError(
                f"`label` must name a column that tells the class of utterances, but `{column}` is "
                f"empty in all {len(split)} of {name}. Fill it, or choose another column."
            )
        ids = split.select(np.setdiff1d(np.arange(len(split)), labelled))["id"]
        excluded += [Excluded(name, each, "no label", f"{column} is empty") for each in ids]
        named[name] = split.select(labelled) if len(ids) else split
        labels = _labels_of(named[name], column)
        fingerprints[f"{name}, {column}"] = hashlib.sha256("\0".join(labels).encode()).hexdigest()
    _check_known_labels(named, column)
    return replace(splits.with_named(named), excluded=excluded, fingerprints=fingerprints)


def _labels_of(split: Dataset, column: str) -> list[str]:
    labels: list[str] = take_columns(split, column)[column].to_pylist()
    return labels


def _check_known_labels(splits: Mapping[str, Dataset], column: str) -> None:
    """Raise SbkitError for a label of a validation or test set that the training set has not."""
    known = dict.fromkeys(_labels_of(splits["train"], column))
    for name, split in splits.items():
        for row, label in enumerate(_labels_of(split, column)):
            if label not in known:
                raise SbkitError(
                    f"Every label must be one of the {len(known)} classes of the training set "
                    f"({listed(known, max_names=10)}), but {split[row]['id']} of {name} has "
                    f"{label!r}. Correct it, or take it out."
                )


def with_column(
    splits: Splits, column: str, compute: Callable[[Dataset], Iterable[str]], *, identity: object
) -> Splits:
    """Add a column to each split that lacks it, computed once and kept in the cache.

    identity: plain data that tells it from what is computed of the same rows in another way.
    """
    named, fingerprints = splits.named(), {**splits.fingerprints}
    for name, split in named.items():
        if column in split.column_names:
            continue
        rows = to_json([identity, {**splits.fingerprints}, split["id"][:]])
        key = fingerprints[f"{name}, {column}"] = hashlib.sha256(rows.encode()).hexdigest()
        file = default_cache() / column / f"{key[:16]}.txt"
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(file, "\n".join(compute(split)))
        named[name] = split.add_column(column, file.read_text().split("\n"))
    return replace(splits.with_named(named), fingerprints=fingerprints)


def print_data(splits: Splits, knobs: Mapping[str, Any]) -> None:
    """Print on rank 0 how much every split holds, and list what is left out in the run folder.

    Each recipe's `make_loaders` calls it, when nothing more is left out.
    """
    if rank() > 0:
        return
    for name, split in splits.named().items():
        minutes = samples_to_seconds(int(sample_counts(split).sum()), knobs["sample_rate"]) / 60
        logger.info(f"{name}: {plural(len(split), 'utterance')}, {minutes:.1f} min")
    listing = Path(knobs["output_folder"]) / "left_out.tsv"
    excluded = [*splits.excluded, *splits.out_of_range]
    write_excluded(listing, excluded)
    for (name, reason), count in Counter((each.split, each.reason) for each in excluded).items():
        logger.info(f"{name}: {count} left out, {reason} (listed in {listing})")


def collate_clips(rows: Sequence[Mapping[str, Any]], *, sample_rate: int) -> Batch:
    """Pad utterances to a batch without labels."""
    return Batch(**collate_audio(rows, sample_rate))


def unlabelled_loaders(collate: Callable[..., Batch] = collate_clips) -> Callable[..., Loaders]:
    """Return the `make_loaders` of a recipe without labels, which plans every split's batches."""

    def load(
        hparams: Mapping[str, Any], splits: Splits, labels: None, placement: Placement
    ) -> Loaders:
        print_data(splits, hparams)
        of_rate = partial(collate, sample_rate=hparams["sample_rate"])
        return make_loaders(splits, hparams, collate=of_rate, placement=placement)

    return load


def _prepare(
    knobs: Mapping[str, Any], *, normalize: Callable[[str], str], keep_empty: bool = False
) -> Splits:
    corpus = corpus_of(knobs)
    store = require_store(knobs.get("audio_store", "pcm"))

    def prepare(name: str, role: str) -> PreparedSplit:
        manifest = read_listed(corpus, knobs, name)
        if not keep_empty:
            check_locale(manifest, knobs["language"])
        return prepare_split(
            manifest,
            split=name,
            normalize=normalize,
            sample_rate=knobs["sample_rate"],
            cache_folder=default_cache(),
            keep_empty=keep_empty or role != "train",
            store=store,
        )

    prepared = {
        role: {name: prepare(name, role) for name in names}
        for role, names in corpus.splits(knobs).items()
    }
    return _assemble(knobs, prepared)


def _assemble(
    knobs: Mapping[str, Any], prepared: Mapping[str, Mapping[str, PreparedSplit]]
) -> Splits:
    """Join the training splits, and keep them within the declared lengths."""
    every = [each for role in prepared.values() for each in role.values()]
    train = concatenate_datasets([each.dataset for each in prepared["train"].values()])
    if not len(train):
        raise _nothing_to_train_on(knobs, list(prepared["train"].values()))
    kept, unused, out_of_range = within_limits(
        train,
        min_seconds=knobs["min_seconds"],
        max_seconds=knobs["max_seconds"],
        sample_rate=knobs["sample_rate"],
    )
    return Splits(
        kept,
        {name: each.dataset for name, each in prepared["valid"].items()},
        {name: each.dataset for name, each in prepared["test"].items()},
        excluded=[item for each in every for item in each.excluded],
        out_of_range=out_of_range,
        unused=unused,
        fingerprints={
            name: each.fingerprint for role in prepared.values() for name, each in role.items()
        },
    )


def _nothing_to_train_on(knobs: Mapping[str, Any], prepared: list[PreparedSplit]) -> SbkitError:
    """Name the reason for which every row of train is left out."""
    excluded = [item for each in prepared for item in each.excluded]
    reasons = {item.reason for item in excluded}
    if reasons == {EMPTY}:
        return SbkitError(
            f"Sentences of train must hold text that `language: {knobs['language']}` can write, "
            f"but all {len(excluded)} are empty. Look at the column `sentence`, and at `language`."
        )
    return SbkitError(
        f"The training set must hold utterances, but all {len(excluded)} rows are left out "
        f"({', '.join(sorted(reasons)) or 'there are none'}). Correct the data."
    )


KNOWN = (librispeech, common_voice)  # the narrower layout first


def corpus_of(knobs: Mapping[str, Any]) -> Corpus:
    """Return the corpus that the knobs ``corpus``, ``manifest`` and ``data_folder`` lead to.

    Raises:
        SbkitError: two of them are set that exclude each other, or no corpus knows the folder.
    """
    module, tables, named = (knobs.get(key) for key in ("corpus", "manifest", "data_folder"))
    if module:
        return _import_corpus(str(module))
    if tables:
        if named:
            raise SbkitError(
                "The data must come from `manifest` or from `data_folder`, but both are set. Take "
                "one of them out."
            )
        return own_data
    if not named:
        return asterisk_prompts
    path = Path(named).expanduser().absolute()
    if not is_archive(path) and sharded_corpus.recognizes(str(named)):
        return sharded_corpus
    folder = unpacked(path)
    for corpus in KNOWN:
        if corpus.recognizes(folder):
            return corpus
    state = "has none of these layouts" if folder.is_dir() else "is not a folder"
    raise SbkitError(
        "data_folder must be a release of Common Voice (train.tsv, dev.tsv, test.tsv and clips/) "
        "or LibriSpeech (train-clean-100/SPEAKER/CHAPTER/*.trans.txt), or a .tar.gz of one, or a "
        f"folder or URL of shards (sbkit-shards.json), but {named} {state}. Pass "
        "--data_folder=FOLDER of one, or --manifest train=FILE --manifest dev=FILE."
    )


def _import_corpus(name: str) -> Corpus:
    try:
        module: Any = importlib.import_module(name)
    except ImportError as error:
        raise SbkitError(
            f"`corpus` must name a module, as recipes.LibriSpeech.corpus, but {name!r} cannot be "
            f"imported ({error}). Correct the name, put its file beside the YAML, or on PYTHONPATH."
        ) from error
    missing = [each for each in ("splits", "read") if not callable(getattr(module, each, None))]
    if missing:
        raise SbkitError(
            f"`corpus` must name a module with the functions splits and read, but {name} has no "
            f"{' and no '.join(missing)}. Write it, as in recipes/LibriSpeech/corpus.py."
        )
    return OwnCorpus(module)


@dataclass(frozen=True)
class OwnCorpus:
    """A corpus of the user's own, which the knob ``splits`` applies to as well."""

    module: Corpus

    def splits(self, knobs: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
        """Return the splits of each role: those of the knob ``splits``, else the module's."""
        roles = self.module.splits(knobs)
        return resolve_splits(knobs.get("splits"), roles, [*chain.from_iterable(roles.values())])

    def read(self, knobs: Mapping[str, Any], split: str) -> Manifest | StreamedSplit:
        """Return the rows of one split."""
        return self.module.read(knobs, split)
