"""Prepare test sets, from a run or from tables and folders, and batch whole utterances."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import datasets

from sbkit.base.errors import ConfigError, DataError
from sbkit.base.files import RUN_YAML, is_run
from sbkit.base.messages import listed, printable
from sbkit.bundle.bundle import Bundle
from sbkit.bundle.config import CONFIG_FILE
from sbkit.config.hparams import read_spec
from sbkit.config.keys import KEYS, with_defaults
from sbkit.data.batch import UtteranceDataset
from sbkit.data.common_voice import SPONTANEOUS_TABLE, read_spontaneous
from sbkit.data.corpus import Corpus, CorpusRow, SettingValues
from sbkit.data.prepared import prepare
from sbkit.data.read_manifests import choose_files, find_files, read_files
from sbkit.data.sampler import EvalSampler
from sbkit.data.splits import Splits, add_texts, sample_counts
from sbkit.data.tables import TableOptions
from sbkit.distributed.ranks import rank, world_size
from sbkit.runtime.torch_model import TorchModel
from sbkit.train.recipe import load_recipe, load_trusted_recipe

logger = logging.getLogger(__name__)

BATCH_SECONDS: float = KEYS["eval_batch_seconds"].default  # padded audio


def batch_seconds_of(settings: Mapping[str, Any]) -> float:
    """Return the seconds of padded audio in a batch, except in training."""
    return float(settings["eval_batch_seconds"])


def read_whole_clips(
    rows: datasets.Dataset, sample_rate: int, *, batch_seconds: float = BATCH_SECONDS
) -> Iterator[dict[int, Mapping[str, Any]]]:
    """Yield this rank's batches of utterances, the shortest first, with `audio` (S,) int16.

    Each batch is a mapping by the indices of its rows.
    """
    reader = UtteranceDataset(rows)
    batches = EvalSampler(
        samples=sample_counts(rows),
        batch_seconds=batch_seconds,
        sample_rate=sample_rate,
        rank=rank(),
        world_size=world_size(),
    )
    for batch in batches:
        indices = (row for plan in batch for row in plan.rows)
        yield dict(zip(indices, reader.__getitems__(batch), strict=True))


def prepare_test_sets(
    run: Path, split: str | None = None, user_modules: Collection[str] | None = frozenset()
) -> Splits:
    """Prepare the data of a run as training does.

    split: the only test set to return, such as `train`; None for all test sets.
    user_modules: modules that the user trusts; None if the run itself calls, in its training.
    """
    spec = read_spec(run / RUN_YAML)
    recipe = load_recipe(spec) if user_modules is None else load_trusted_recipe(spec, user_modules)
    splits = recipe.prepare_splits(spec.settings)
    if split is not None:
        named = splits.named()
        if split not in named:
            raise ConfigError(f"{run} has no split `{split}`. It has {', '.join(named)}.")
        return replace(splits, test={split: named[split]})
    if not splits.test:
        raise DataError(f"{run} has no test sets. Name your own: sbkit score {run} test.csv")
    return splits


def name_of(path: Path) -> str:
    """Return the name of a table in messages and reports: its file name without suffix."""
    return path.absolute().stem


def table_settings(model: Path, **options: object) -> dict[str, object]:
    """Return options of tables, such as `columns`; a run's settings replace missing ones."""
    has_settings = not (model / CONFIG_FILE).exists() and is_run(model)
    settings = read_spec(model / RUN_YAML).settings if has_settings else {}
    return {name: settings.get(name) if v is None else v for name, v in options.items()}


class UserSet(Corpus):
    """A corpus of one test set."""

    def __init__(self, settings: SettingValues, name: str, rows: Sequence[CorpusRow]) -> None:
        super().__init__(settings)
        self._name, self._rows = name, rows

    def roles(self) -> dict[str, tuple[str, ...]]:
        return {"train": (), "valid": (), "test": (self._name,)}

    def read(self, split: str) -> Sequence[CorpusRow]:
        return self._rows


def prepare_user_set(
    bundle: Bundle[TorchModel], path: Path, settings: Mapping[str, Any] = MappingProxyType({})
) -> datasets.Dataset:
    """Prepare a user's table or folder as a test set, which keeps rows without text.

    settings: may have the columns and the encoding of the table.
    """
    settings = with_defaults(settings)
    language = bundle.config.language or "und"
    columns = TableOptions.from_settings(settings, language, str(path.absolute()))
    columns = columns if bundle.task.predicts in ("text", "audio") else columns.without("text")
    path = path.absolute()
    if not path.exists():
        raise DataError(f"{path} does not exist.", file=str(path))
    rows: Sequence[CorpusRow]
    if path.match(SPONTANEOUS_TABLE.format("*")):
        rows = [read_spontaneous(path, None, columns)]
    else:
        rows = read_files([(file, columns) for file in choose_files(find_files(str(path)))])
    split = name_of(path)
    declared = {
        "manifest": {"test": str(path)},
        "columns": settings["columns"],
        "encoding": settings["encoding"],
        "tier": settings["tier"],
        "language": language,
        "sample_rate": bundle.config.sample_rate,
    }
    prepared = prepare(declared, UserSet(declared, split, rows)).splits[split]
    made_from = {"table": repr(bundle.config.text_table), "tags": bundle.tags}
    prepared = add_texts(prepared, split, bundle.normalizer(), made_from, keep_empty=True)
    excluded = sorted(prepared.excluded, key=lambda row: row.reason)
    for reason, lost in groupby(excluded, key=lambda row: row.reason):
        ids = [row.id for row in lost]
        logger.warning(printable(f"{split}: {len(ids)} left out, {reason}: {listed(ids)}"))
    return prepared.dataset
