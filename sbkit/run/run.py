"""A run, from its YAML to its results: what `train.py`, notebooks and sweeps call.

    values -> data, labels -> check -> objects, loaders -> run folder -> training -> bundle -> test

`Run.train` has all stages in their order. Each can also be called alone.
"""

import logging
import shlex
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from sbkit.base.errors import BundleError, ConfigError, DataError, ExportError, SbkitError
from sbkit.base.files import RUN_YAML, write_text_atomically
from sbkit.base.machine import warn_of_unused_gpu
from sbkit.base.messages import plural
from sbkit.base.process import drop_unwritable
from sbkit.base.stores import wait_for_store
from sbkit.base.threads_and_memory import return_freed_memory
from sbkit.base.user_folders import prepare_user
from sbkit.bundle.config import require_run
from sbkit.check.check import check_before_training, check_run
from sbkit.check.checked_run import Finding
from sbkit.checkpoint.folder import locked_folder, newest_checkpoint
from sbkit.checkpoint.rng import isolated_rng
from sbkit.checkpoint.run_config import (
    BUNDLE,
    CHECKPOINTS,
    RunDescription,
    describe_spec,
    differences,
    has_checkpoint,
    machine_keys,
    read_description,
    require_resumable,
    require_same_on_ranks,
    write_description,
)
from sbkit.config.hparams import OUTPUT_FOLDER, RECIPE, RunSpec, Settings
from sbkit.config.keys import DATA_SOURCES, require_values
from sbkit.data.batch import Loaders
from sbkit.data.data_report import log_data, write_data_report
from sbkit.data.read_manifests import store_rows
from sbkit.data.splits import Splits
from sbkit.distributed.device import Placement
from sbkit.distributed.ranks import process_group, rank, rank0_then_others, world_size
from sbkit.distributed.same_on_ranks import require_same_code, require_shared
from sbkit.evaluate.report import REPORT
from sbkit.evaluate.run_results import PROVENANCE, SUMMARY, read_json, read_results
from sbkit.evaluate.wer import ERROR_RATES, FigureDict
from sbkit.evaluate.wer_report import read_utterances, utterances_file
from sbkit.export.export import export_run, exported_bundle
from sbkit.export.formats import ParityReports
from sbkit.logs.handlers import TEXT_LOG, TextLog, log_to_screen, quiet
from sbkit.logs.run_log import LOG_FILE, EpochFigures, Record, read_log
from sbkit.run.before_training import measure_start
from sbkit.run.export_and_test import (
    keep_better_start,
    make_bundle,
    report,
    score,
    write_declared_formats,
)
from sbkit.run.tuning import tune
from sbkit.runtime.runtimes import load_bundle
from sbkit.train.brain import Brain
from sbkit.train.ownership import helper_digests
from sbkit.train.recipe import Recipe, load_recipe, load_trusted_recipe
from sbkit.train.setup import (
    PreparedRun,
    RunData,
    build_run,
    choose_placement,
    declare_run,
    describe_run,
    find_ends_of,
    load_initial_weights,
    make_brain,
    prepare_data,
    prepare_splits,
    require_own_folder,
    require_unedited_modules,
    user_modules_of,
    write_label_files,
)

logger = logging.getLogger(__name__)


class Run:
    """A YAML with its overrides, which trains, and whose results can be read.

    >>> run = Run("hparams/ctc.yaml", {"lr": 1e-3, "output_folder": "runs/a"})  # doctest: +SKIP
    >>> run.train()  # doctest: +SKIP
    >>> run.scores["test"]["WER"]  # doctest: +SKIP
    0.242

    Attributes:
        spec: the YAML as it takes effect.
        position: the epoch and the step at which `train` has ended; zeros before it trains.
    """

    def __init__(
        self,
        yaml_file: Path | str,
        overrides: Mapping[str, object] | None = None,
        *,
        recipe: type[Recipe] | None = None,
        corpus: Mapping[str, Any] | None = None,
        title: str = "",
    ) -> None:
        """Read the YAML; nothing is prepared yet.

        Args:
            yaml_file: the YAML of the run.
            overrides: values that replace the YAML's, by key, such as `lr` or
                `Transformer.dropout`.
            recipe: replaces the recipe that the YAML names, perhaps by one with your own Brain,
                such as `class Mine(AsrRecipe): brain = MyBrain`.
            corpus: rows by the name of their split (`train`, `dev`, `test`), in the place of the
                YAML's `manifest`: mappings, a DataFrame or a dataset of `datasets`, with the
                columns of a table, such as `path` and `sentence`. Audio is a path, a mapping with
                `array` and `sampling_rate`, or whatever else a Transcriber takes.
            title: the first line of the run's log; by default this call.
        """
        prepare_user()
        overrides = dict(overrides or {})
        self._call = f"Run({str(yaml_file)!r}, {overrides})"
        self._title = title or self._call
        if corpus is not None:
            if not isinstance(corpus, Mapping):
                kind = type(corpus).__name__
                raise ConfigError(
                    f"`corpus` must map train, dev and test to rows, but is a {kind}."
                )
            files: dict[str, str] = {}
            for split, rows in corpus.items():
                try:
                    files[split] = str(store_rows(rows))
                except SbkitError as error:
                    raise DataError(f"`corpus[{split!r}]`: {error}") from error
            overrides |= {"manifest": files, "data_folder": None, "corpus": None}
        self.spec = declare_run(yaml_file, overrides, recipe=recipe)
        self.position = (0, 0)
        self._prepared: PreparedRun | None = None
        self._trusted_modules: frozenset[str] = frozenset()  # the user's

    @property
    def settings(self) -> Settings:
        """The plain values of the YAML, which cannot be changed any more."""
        return self.spec.settings

    @property
    def folder(self) -> Path:
        """Where the run writes, the value of `output_folder`."""
        return self.spec.folder

    def __repr__(self) -> str:
        return self._call

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process or a copy, without the objects made so far."""
        return {**vars(self), "_prepared": None}

    @classmethod
    def open(
        cls,
        folder: Path | str,
        overrides: Mapping[str, object] | None = None,
        *,
        recipe: type[Recipe] | None = None,
        corpus: Mapping[str, Any] | None = None,
        user_modules: Collection[str] = (),
    ) -> Self:
        """Open a finished or stopped run, wherever its folder lies now.

        Its results and its model are read as data: no module that they name is imported, except for
        sbkit's. Methods that prepare or train (`train`, `check`, ...) run the YAML as a program.

        user_modules: modules that you trust, of parts, a task, a recipe or a corpus of your own.
        """
        require_run(Path(folder))
        folder = Path(folder).absolute()
        here = {OUTPUT_FOLDER: folder, **(overrides or {})}
        run = cls(folder / RUN_YAML, here, recipe=recipe, corpus=corpus)
        run._trusted_modules = frozenset(user_modules)
        return run

    # ---- the whole run

    def train(self, *, on_epoch: Callable[[Record], object] | None = None) -> None:
        """Check, train, export and test the run; resume it if it was stopped.

        on_epoch: is called after each validation with the record that `history` gets, on rank 0.
            An exception that it raises ends the run; the next call resumes it.

        Raises KeyboardInterrupt after Ctrl-C or another signal; the next call resumes the run.
        Raises ExportError, with all results written, if no bundle can hold the model.
        """
        spec = self.spec
        self._require_valid()
        with self._exclusive_run() as text_log:
            placement = choose_placement(spec)
            logger.info(f"{placement.device}: {plural(torch.get_num_threads(), 'thread')}")
            if spec.settings["device"] is None and placement.device.type == "cpu":
                warn_of_unused_gpu("torch")
            prepared = self._prepared = prepare_run(spec, placement, checks=True)
            brain = open_run_folder(prepared)
            text_log.open()
            brain.on_epoch = on_epoch
            try:
                measure_start(prepared, brain)
                loaders = prepared.loaders
                brain.fit(prepared.hparams["epoch_counter"], loaders.train, loaders.valid)
                self._finish(prepared, brain)
            finally:
                self.position = brain.position
        if prepared.recipe.task.has_model and not (self.folder / BUNDLE).exists():
            raise ExportError(
                f"The run in {self.folder} has ended, and its checkpoint is tested, but no bundle "
                f"can hold its model: {TEXT_LOG} says why. Correct that, and train anew."
            )

    def check(self) -> list[Finding]:
        """Return the faults that would end the run, and effects that differ from the YAML."""
        require_unedited_modules(self.spec)
        with quiet():
            return check_run(self.spec).findings

    def test(self) -> Mapping[str, FigureDict]:
        """Export and test the best weights, unless that is done; return `scores`."""
        with self._exclusive_run() as text_log:
            prepared = self.prepare()
            description = describe_run(prepared)
            ends = find_ends_of(self.spec)
            require_resumable(self.folder, description, trains=False, ends=ends)
            text_log.open()
            write_yaml(prepared, description, has_ended=True)
            brain = make_brain(prepared)
            brain.checkpointer.recover_if_possible()  # with its counters, which the results name
            self._finish(prepared, brain)
        return self.scores

    def tune(self, *, out: Path | str, data: Path | str | None = None, **options: Any) -> Path:
        """Fit another decoder to the validation sets; return the folder of a new bundle with it.

        out: the folder to write; an earlier bundle there is replaced.
        data: a table, as the validation set.
        options: `lm_text="talks.txt"`, `word_lm_order=3`, `beam_size=64` and the others of
            `sbkit.run.tuning.tune`.
        """
        self._require_model()
        options |= {"spec": self.spec, "user_modules": self._user_modules()}
        data = None if data is None else Path(data)
        return tune(self.folder, out=Path(out), data=data, **options)

    def export(self, out: Path | str, **options: Any) -> ParityReports:
        """Copy the bundle of the run, with a model card and further formats; return their reports.

        out: the folder to write; an earlier bundle there is replaced.
        options: `formats=["onnx", "sherpa-onnx"]`, `license="CC0-1.0"`, `weights="my.safetensors"`
            and the others of `sbkit.export.export.export_run`.
        """
        self._require_model()
        return export_run(self.folder, Path(out), user_modules=self._user_modules(), **options)

    # ---- results

    @property
    def history(self) -> list[Record]:
        """The figures of each epoch so far, such as `epoch`, `loss`, `valid_loss` and metrics."""
        self._require_unchanged()
        records = read_log(self.folder / LOG_FILE)
        return [record for record in records if record["kind"] == EpochFigures.kind]

    @property
    def scores(self) -> Mapping[str, FigureDict]:
        """The figures of each test set, such as `scores["test"]["WER"]`, a fraction.

        A recognizer has `WER` and `CER`, their `WER_interval` and `CER_interval` (`low`, `high`),
        the counts `utterances`, `words`, `characters`, `word_errors` and `character_errors` (by
        kind), the `decoder`, and perhaps the same figures of `greedy` decoding and of `normalized`
        texts, `confidence` and `notes`. Other tasks have their metrics.

        Raises BundleError if the run was not tested yet.
        """
        self._require_unchanged()
        scores: Mapping[str, FigureDict] = read_results(self.folder)["test"]
        return scores

    def errors(self, name: str = "test") -> list[dict[str, Any]]:
        """Return the utterances of a test set, those with the highest error rate first.

        Each has an `id`, `reference`, `hypothesis`, the `greedy` text of a run with another
        decoder, `WER` (none in a language without spaces), `CER`, and the `path` of its audio.

        Raises BundleError if the run was not tested yet, or its task writes no texts.
        """
        self.scores  # noqa: B018, raises the error
        file = utterances_file(self.folder, name)
        if not file.is_file():
            raise BundleError(f"{self.folder} has no texts of a test set {name}.")
        self._require_trusted()
        corpus = load_recipe(self.spec).corpus(self.settings)
        clips = () if corpus is None else corpus.clips(name)
        paths = {clip.id: str(clip.path) for clip in clips}
        rows: list[dict[str, Any]] = [
            {
                "id": utterance.id,
                "reference": utterance.reference,
                "hypothesis": utterance.hypothesis,
                "greedy": utterance.greedy and utterance.greedy.hypothesis,
                **dict.fromkeys(ERROR_RATES),
                **utterance.errors.rates(by_words=utterance.by_words),
                "path": paths.get(utterance.id),
            }
            for utterance in read_utterances(file)
        ]
        return sorted(rows, key=lambda row: row["CER"] if row["WER"] is None else row["WER"])[::-1]

    @property
    def model(self) -> nn.Module:
        """The parts of the exported model, or of the best checkpoint so far, on the CPU."""
        self._require_model()
        modules = self._user_modules()
        with exported_bundle(self.folder, modules) as folder:
            return load_bundle(folder, user_modules=modules).model

    def _require_trusted(self) -> None:
        """Read the YAML of a run folder as data, but not one that the user has written."""
        if self.spec.document.is_in_run_folder:
            load_trusted_recipe(self.spec, self._trusted_modules)

    def _user_modules(self) -> frozenset[str]:
        """Return the trusted modules: the named ones of an opened run, or those of the YAML."""
        if self.spec.document.is_in_run_folder:
            return self._trusted_modules
        return user_modules_of(self.spec)

    def _require_unchanged(self) -> None:
        """Raise ConfigError if the run in the folder has other values."""
        if not has_checkpoint(self.folder):
            return
        before = read_description(self.folder)
        splits: Splits | None = None
        if any(self.settings.get(key) != before.values.get(key) for key in DATA_SOURCES):
            self._require_trusted()  # the data may have been moved
            splits = self.prepare_splits()
        now = describe_spec(self.spec, data=None if splits is None else splits.fingerprints)
        # Results need no Brain of the user's.
        now = replace(now, values={**now.values, RECIPE: before.values[RECIPE]})
        if (self.folder / SUMMARY).is_file():
            require_resumable(self.folder, now, trains=False, ends=find_ends_of(self.spec))
        else:
            require_resumable(self.folder, now)

    def _require_model(self) -> None:
        if not (has_checkpoint(self.folder) or (self.folder / BUNDLE).exists()):
            raise BundleError(f"{self.folder} has no model yet. Call `train()`.")
        self._require_unchanged()

    # ---- its stages

    def prepare(self) -> PreparedRun:
        """Prepare the data, objects and loaders once; write the labels, and nothing else."""
        self._require_valid()
        if self._prepared is None:
            self._prepared = prepare_run(self.spec, choose_placement(self.spec))
        return self._prepared

    def prepare_splits(self) -> Splits:
        """Prepare the data that is not prepared yet."""
        self._require_valid()
        return prepare_splits(self.spec, load_recipe(self.spec))

    def _require_valid(self) -> None:
        """Refuse edited modules, and values out of their ranges."""
        require_unedited_modules(self.spec)
        with self.spec.placing_errors():
            require_values(self.spec.settings, self.spec.keys)

    def make_loaders(self) -> Loaders:
        """Plan the batches of every split."""
        return self.prepare().loaders

    def make_brain(self, **run_opts: Any) -> Brain:
        """Check the run, write its description, and make its Brain with initial weights.

        run_opts: take precedence over the YAML.
        """
        prepared = self.prepare()
        with rank0_then_others():
            check_before_training(prepared)
        return open_run_folder(prepared, **run_opts)

    def _finish(self, prepared: PreparedRun, brain: Brain) -> None:
        """Export and test the best weights, unless the results are there; rank 0 writes."""
        logger.info(f"run folder: {self.folder}")
        if self._has_results():
            logger.info(f"The run has ended before; the results in {self.folder} stay as they are.")
        else:
            with brain.guarded():
                brain.load_tested_weights()
                bundle = make_bundle(prepared, brain)  # with a decoder fitted to these weights
                bundle = keep_better_start(prepared, brain, bundle)
            # Not watched: an exporter may work for longer than `stall_seconds` without a sign of
            # life. A signal ends it at once, and no format is half-written.
            with rank0_then_others():
                if rank() == 0 and bundle is not None:
                    write_declared_formats(prepared)
            with brain.guarded():
                sets = [score(prepared, brain, bundle, name) for name in prepared.loaders.test]
                if rank() == 0:
                    report(prepared, brain, bundle, sets)
            if type(brain).evaluate is not Brain.evaluate:
                brain.evaluate(prepared.loaders.test)
        if (page := self.folder / REPORT).is_file():
            logger.info(f"report: {page}")
        if (self.folder / BUNDLE).exists():
            logger.info(f"next: sbkit export {shlex.quote(str(self.folder))} --out my-model")

    def _has_results(self) -> bool:
        summary = read_json(self.folder / SUMMARY) or {}
        is_whole = (self.folder / BUNDLE).exists() or not summary.get(PROVENANCE)
        return bool(summary) and is_whole and (self.folder / REPORT).is_file()

    @contextmanager
    def _exclusive_run(self) -> Iterator[TextLog]:
        """Log to the screen and the run folder, lock it, join the other processes."""
        device = choose_placement(self.spec).device
        with (
            drop_unwritable("stdout", "stderr") if logger.hasHandlers() else log_to_screen(),
            TextLog(self.folder, title=self._title) as text_log,
            process_group(device),
            isolated_rng(device),
            ExitStack() as lock,
        ):
            with rank0_then_others():
                if rank() == 0:  # before anything in the folder is written
                    lock.enter_context(locked_folder(self.folder))
            require_shared(self.folder)
            if world_size() > 1:
                require_same_on_ranks(describe_spec(self.spec))
            yield text_log


# ---- stages of a run, in their order


def prepare_run(spec: RunSpec, placement: Placement, *, checks: bool = False) -> PreparedRun:
    """Prepare the data, write the labels, and build the objects of a run.

    checks: whether to check the run before its labels are written.
    """
    with rank0_then_others():  # rank 0 makes the labels, and the others find them
        with spec.placing_errors():
            data = wait_for_store(lambda: prepare_data(spec))
        if checks:
            check_before_training(data)
        write_labels(data)
    run = build_run(data, placement)
    require_same_on_ranks(describe_run(run))
    require_same_code()
    return run


def write_labels(data: RunData) -> None:
    """Write the labels, the first files in the run folder, unless it is another run's."""
    note = require_own_folder(data.spec, describe_run(data))
    if rank() == 0:
        if note:
            logger.info(note)
        write_label_files(data)


def open_run_folder(run: PreparedRun, **run_opts: Any) -> Brain:
    """Make the Brain with initial weights, write the description of its run, set results aside."""
    spec = run.spec
    if not has_checkpoint(spec.folder):
        for line in load_initial_weights(run):
            logger.info(line)
    run.hparams["checkpointer"].check_same_model()
    brain = make_brain(run, **run_opts)
    description = describe_run(run, helper_digests(brain))
    require_same_on_ranks(description)
    require_own_folder(spec, description)
    was_finished = bool(find_ends_of(spec))
    with rank0_then_others():
        if rank() == 0:
            if not was_finished:
                set_results_aside(spec.folder)
            log_data(run.loaders.splits, spec.folder, spec.settings["sample_rate"])
            corpus = run.recipe.corpus(spec.settings)
            write_data_report(
                run.loaders.splits,
                spec.folder,
                sample_rate=spec.settings["sample_rate"],
                language=spec.settings["language"],
                corpus=corpus and corpus.describe(),
            )
            return_freed_memory()  # memory of the report, which training does not need
    write_yaml(run, description, has_ended=was_finished)
    return brain


def set_results_aside(folder: Path) -> None:
    """Rename the bundle and summary of a run that is trained further."""
    newest = newest_checkpoint(folder / CHECKPOINTS)
    epoch = newest.meta.get("epoch", 0) if newest else 0
    for file in (folder / BUNDLE, folder / SUMMARY):
        if file.exists():
            renamed = file.with_stem(f"{file.stem}-{epoch}")
            shutil.rmtree(renamed, ignore_errors=True)  # an earlier start may have left it
            file.rename(renamed)
            logger.info(f"{file.name} after epoch {epoch} is kept as {renamed.name}.")


def write_yaml(run: PreparedRun, description: RunDescription, *, has_ended: bool) -> None:
    """Write the YAML and the description of a run; remove an unmeasured bundle of other values.

    has_ended: no step is trained, so the values that only training reads stay.
    """
    is_outdated = False
    spec, folder = run.spec, run.spec.folder
    if has_ended:
        before = read_description(folder)
        changed = {d.key for d in differences(before, description)}
        changed &= machine_keys(spec.keys) & {*before.values}
        spec = spec.with_overrides(**{key: before.values[key] for key in changed})
        description = describe_run(replace(run, spec=spec), before.helpers)
        is_changed = any(d.key not in DATA_SOURCES for d in differences(before, description))
        is_outdated = is_changed and not (folder / SUMMARY).exists()
    with rank0_then_others():
        if rank() == 0:
            if is_outdated:
                shutil.rmtree(folder / BUNDLE, ignore_errors=True)
            write_description(folder, description)
            write_text_atomically(folder / RUN_YAML, spec.one_file)
