"""Fit another decoder to a validation set, and write a new bundle with it, as `sbkit tune` does.

run or bundle, validation sets -> errors of the present decoder -> new decoder (language models,
weights, confidences) -> its errors -> new bundle
"""

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets

from sbkit.base.errors import ConfigError
from sbkit.base.files import RUN_YAML, require_writable
from sbkit.bundle.config import CONFIG_FILE
from sbkit.config.hparams import RunSpec
from sbkit.data.splits import Splits
from sbkit.decoding.decoder import LANGUAGE_MODELS_FILE
from sbkit.export.export import exported_bundle, require_new, set_decoder
from sbkit.runtime.runtimes import load_bundle
from sbkit.runtime.score_sets import name_of, prepare_user_set, table_settings
from sbkit.tasks.asr.bundle import as_recognizer
from sbkit.tasks.asr.fitting import TuningData, fit_another_decoder
from sbkit.train.recipe import load_trusted_recipe
from sbkit.train.setup import declare_run, prepare_splits

logger = logging.getLogger(__name__)


def tune(
    model: Path,
    *,
    out: Path,
    spec: RunSpec | None = None,
    data: Path | None = None,
    columns: Mapping[str, Any] | None = None,
    encoding: str | None = None,
    tier: Sequence[str] | None = None,
    user_modules: frozenset[str] = frozenset(),
    **options: Any,
) -> Path:
    """Fit another decoder to a validation set; return the folder of a new bundle with it.

    out: the folder of the new bundle.
    spec: of the run; by default the YAML in its folder.
    data: a table, as the validation set; by default the run's own sets.
    columns, encoding, tier: of the table and the texts.
    options: those of `sbkit.tasks.asr.fitting.fit_another_decoder`.
    """
    is_bundle = (model / CONFIG_FILE).exists()
    if is_bundle and data is None:
        raise ConfigError(
            f"To tune a bundle, --data is needed: sbkit tune {model} --data dev.csv --out NEW"
        )
    require_new(out.resolve(), model=model)
    require_writable(out.resolve().parent, option="--out")
    with exported_bundle(model, user_modules) as exported, TemporaryDirectory() as folder:
        opened = load_bundle(exported, user_modules=user_modules)
        bundle = as_recognizer(opened, command="tune")
        bundle.task.require_frames("`sbkit tune`")
        if spec is None and not is_bundle:
            spec = declare_run(model / RUN_YAML, {})
        splits: Splits | None = None
        if spec is not None:
            splits = prepare_splits(spec, load_trusted_recipe(spec, user_modules))
        tables = table_settings(model, columns=columns, encoding=encoding, tier=tier)
        sets: Mapping[str, datasets.Dataset]
        if data is not None:
            sets = {name_of(data): prepare_user_set(bundle, data, tables)}
        else:
            assert splits is not None  # `--data` is required for a bundle
            sets = splits.valid
        models = Path(folder, LANGUAGE_MODELS_FILE)
        for home in (exported, model):
            if (home / LANGUAGE_MODELS_FILE).is_file():
                shutil.copyfile(home / LANGUAGE_MODELS_FILE, models)
                break
        settings: Mapping[str, Any] = {} if spec is None else spec.settings
        tuning_data = TuningData(sets=sets, settings=settings, splits=splits, tables=tables)
        fitted = fit_another_decoder(bundle, tuning_data, models, **options)
        set_decoder(exported, out.resolve(), fitted, models)
    logger.info(f"written with the new decoder: {out}")
    return out
