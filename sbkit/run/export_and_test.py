"""The end of a run: its weights become a bundle, and the bundle is tested.

    averaged weights -> decoder and confidences, fitted with the weights in memory -> `RUN/bundle`
    -> the same with the weights that the run started from, if they are better
    -> formats -> results of the test sets -> figures and pages

A run that was killed before its bundle was there averages and fits again. The tested bundle is
the one that `sbkit export` copies.
"""

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from speechbrain import Stage
from torch import nn

from sbkit.base.errors import BundleError, ConfigError, SbkitError
from sbkit.base.files import TEMPORARY_NAMES, atomic_folder, fsync_tree
from sbkit.base.versions import __version__
from sbkit.bundle.bundle import Bundle, BundleContents, read_bundle
from sbkit.bundle.config import BundleConfig
from sbkit.bundle.side_inputs import SIDE_SHAPES
from sbkit.checkpoint.run_config import BUNDLE, read_description
from sbkit.checkpoint.weights import differing_tensors
from sbkit.data.batch import Loader
from sbkit.decoding.decoder import LANGUAGE_MODELS_FILE
from sbkit.decoding.fit import FittedDecoder
from sbkit.distributed.device import Placement
from sbkit.distributed.ranks import as_single_process, gather_over_ranks, rank, rank0_then_others
from sbkit.evaluate.run_results import (
    BEFORE_TRAINING,
    SETTINGS_FIELD,
    ends_with_start,
    read_json,
)
from sbkit.evaluate.wer import FigureDict
from sbkit.export.export import (
    add_formats,
    collect_files,
    copy_files,
    replacing_bundle,
    write_bundle,
)
from sbkit.export.formats import PARITY_FILE, declared_formats, describe_failures
from sbkit.logs.curves import CURVES, draw_curves
from sbkit.logs.handlers import quiet
from sbkit.logs.metric import best_key, percent
from sbkit.logs.run_log import LOG_FILE, RunLog, SplitFigures
from sbkit.models.encoder_parts import generates_texts
from sbkit.run.before_training import (
    describe_start,
    describe_worse,
    find_start,
    read_start,
    score_splits,
)
from sbkit.runtime.runtimes import load_bundle
from sbkit.runtime.score_report import ScoredSet, ScoreReport
from sbkit.runtime.score_sets import batch_seconds_of
from sbkit.runtime.scoring import BundleScorer
from sbkit.runtime.torch_model import TorchModel
from sbkit.tasks.asr.bundle import as_recognizer
from sbkit.tasks.asr.fitting import fit_declared_decoder
from sbkit.train.brain import Brain
from sbkit.train.initialize import DIFFERS, init_folders, initialize_from, read_named_weights
from sbkit.train.setup import (
    PreparedRun,
    build_again,
    load_initial_weights,
    make_brain,
    user_modules_of,
)

logger = logging.getLogger(__name__)

START_BUNDLE = TEMPORARY_NAMES.replace("*", "start")  # in a run folder, while it is compared


def make_bundle(run: PreparedRun, brain: Brain) -> Bundle[TorchModel] | None:
    """Make the bundle of a run, unless an earlier start has written it; load it.

    Returns None for a model that no bundle can hold; then the checkpoint itself is tested.
    """
    folder = run.spec.folder
    return _open_or_make(run, brain, folder / BUNDLE, partial(collect_files, folder))


def _open_or_make(
    run: PreparedRun, brain: Brain, folder: Path, collect: Callable[[], Mapping[str, bytes]]
) -> Bundle[TorchModel] | None:
    """Open a bundle; if it is missing, collect its files, and fit a decoder to the Brain."""
    files: Mapping[str, bytes] | None = None  # on rank 0
    fitted: FittedDecoder | None = None
    bundle: Bundle[TorchModel] | None = None
    options: dict[str, Any] = {
        "device": brain.device,
        "precision": run.spec.settings["eval_precision"],
        "user_modules": user_modules_of(run.spec),
    }
    brain.ping("export")
    with rank0_then_others(), logging_unexportable():
        if rank() == 0 and not folder.exists():
            files = collect()
    if run.recipe.task.decodes_frames and gather_over_ranks(files is not None)[0]:
        fitted = fit(run, brain)
    brain.ping("export")
    with rank0_then_others(), logging_unexportable():
        if files is not None:
            has_models = fitted is not None and fitted.decoder is not None
            models = run.spec.folder / LANGUAGE_MODELS_FILE if has_models else None
            with atomic_folder(folder) as new:  # a bundle that loads gets its name
                write_bundle(new, files, fitted, models)
                bundle = load_bundle(new, **options)
                fsync_tree(new)
    if bundle is None and folder.exists():
        bundle = load_bundle(folder, **options)
    return bundle


@contextmanager
def logging_unexportable() -> Iterator[None]:
    """Log why no bundle can hold the model of a run."""
    try:
        yield
    except (BundleError, ConfigError) as error:
        logger.warning(
            "note: the checkpoint itself is tested, by the metrics of a validation, "
            f"and no format is written, because no bundle can hold it. {error}"
        )


def fit(run: PreparedRun, brain: Brain) -> FittedDecoder:
    """Fit a decoder, and the confidences of words, with the weights in memory."""
    settings, valid = run.spec.settings, run.splits.valid
    task, rate = run.recipe.task, settings["sample_rate"]
    language = settings["language"]
    table = run.splits.text_table(settings) if language else None
    shapes = run.hparams["checkpointer"].meta.get(SIDE_SHAPES, {})
    config = BundleConfig(
        task.name, rate, (), {}, language=language, normalizer=table, side_shapes=shapes
    )
    for part in run.hparams.values():
        if isinstance(part, nn.Module):  # also the features, which `model` may lack
            part.eval()
    with torch.compiler.set_stance("force_eager"):  # as the bundle will run
        placement = Placement(brain.device, settings["eval_precision"])
        model = TorchModel(
            brain.network, parts=(), sample_rate=rate, placement=placement, side_shapes=shapes
        )
        contents = BundleContents(config=config, task=task, labels=run.labels)
        return fit_declared_decoder(
            as_recognizer(contents.with_model(model)),
            run.hparams,
            valid,
            batch_seconds=batch_seconds_of(settings),
            on_sampled=brain.stop_if_signaled,
        )


def keep_better_start(
    run: PreparedRun, brain: Brain, bundle: Bundle[TorchModel] | None
) -> Bundle[TorchModel] | None:
    """Return the bundle of a run, with the weights that the run started from if they are better.

    Their bundle is made in the same way, with a decoder fitted to them. It is better if it has
    fewer errors on the validation sets, as both would be exported.
    """
    folder, settings = run.spec.folder, run.spec.settings
    is_measured = bool(read_json(folder / BEFORE_TRAINING))
    if bundle is None or not (is_measured and settings["keep_better_start"]):
        return bundle
    if ends_with_start(folder) or (start := _load_start(run, bundle)) is None:
        return bundle
    start_folder = folder / START_BUNDLE
    weights = start.hparams["model"].state_dict()
    with rank0_then_others():
        if rank() == 0:
            shutil.rmtree(start_folder, ignore_errors=True)  # an earlier start may have left it
    with quiet():
        start_brain = make_brain(start)
    start_brain.stopping, start_brain.watchdog = brain.stopping, brain.watchdog
    logger.info("For comparison, the decoder is also fitted to the weights before training:")
    collect = partial(collect_files, folder, untrained_weights=weights)
    start_bundle = _open_or_make(start, start_brain, start_folder, collect)
    assert start_bundle is not None  # the trained model has the same parts, and a bundle
    sets = run.loaders.splits.valid
    rate = best_key(bundle.task.metrics).name
    reports = [score_splits(run, brain, model, sets) for model in (start_bundle, bundle)]
    errors = [
        fmean(report.entries[name][rate] for name in sets) for report in reports if rank() == 0
    ]
    is_better = gather_over_ranks(errors and errors[0] < errors[1])[0]
    with rank0_then_others():
        if rank() == 0 and is_better:
            with replacing_bundle(folder / BUNDLE) as new:
                copy_files(start_folder, new)
            rate_before, rate_after = map(percent, errors)
            logger.warning(
                "note: the run ends with the weights that it started from, because training made "
                f"them worse: on validation, {rate} was {rate_before} before and is "
                f"{rate_after} after. keep_better_start: False takes the trained weights."
            )
        if rank() == 0:
            shutil.rmtree(start_folder)
    return make_bundle(run, brain) if is_better else bundle


def _load_start(run: PreparedRun, bundle: Bundle[TorchModel]) -> PreparedRun | None:
    """Return other objects of a run, with the weights that it started from.

    Returns None if they do not make up the same model: `init_from` must have the same tensors and
    labels, `pretrained` a decoder of texts, beside which the task's `fresh_heads` are the trained
    ones.
    """
    settings = run.spec.settings
    if settings.get(DIFFERS) or (start_options := find_start(run)) is None:
        return None
    folder, start = start_options["folder"], build_again(run)
    if init_folders(settings):
        contents = read_bundle(folder, user_modules=user_modules_of(run.spec))
        labels, start_labels = ([*b.task.label_names(b.labels)] for b in (bundle, contents))
        tensors, start_tensors = map(read_named_weights, (run.spec.folder / BUNDLE, folder))
        if labels != start_labels or differing_tensors(tensors, start_tensors):
            return None
        initialize_from([folder], start.hparams, run.recipe.task, run.spec.tree)
        return start
    if not generates_texts(run.hparams.get("Transformer")):
        return None
    load_initial_weights(start)
    for name in run.recipe.task.fresh_heads:
        if isinstance(part := run.hparams.get(name), nn.Module):
            start.hparams[name].load_state_dict(part.state_dict())
    return start


def write_declared_formats(run: PreparedRun) -> None:
    """Write the missing ones of the formats that the YAML declares; log which of them fail."""
    folder = run.spec.folder
    try:
        declared = declared_formats(run.spec.settings, run.recipe.task)
        names = [name for name in declared if not (folder / BUNDLE / name / PARITY_FILE).exists()]
        # One rank compares them on all test clips, not only on its own share.
        with as_single_process():
            modules = user_modules_of(run.spec)
            reports = add_formats(folder, names, modules) if names else {}
        failures = describe_failures(reports)
    except SbkitError as error:
        failures = [f"No format is written: {error}"]
    for failure in failures:
        logger.warning(failure)


def score(
    run: PreparedRun, brain: Brain, bundle: Bundle[TorchModel] | None, name: str
) -> ScoredSet:
    """Score the bundle on a test set; without a bundle or metrics, validate the checkpoint."""
    splits = run.loaders.splits
    if bundle is not None and type(brain).metrics:
        scorer = BundleScorer(bundle, batch_seconds=batch_seconds_of(run.spec.settings))
        count, as_tested = brain.max_evaluated_batches, splits.as_tested
        scored = scorer.score(name, splits.test[name], as_tested=as_tested, max_batches=count)
    else:
        results = validate(brain, run.loaders.test[name])
        scored = ScoredSet.gather(name, splits.test[name], results)
    brain.stop_if_signaled()
    return scored


def validate(brain: Brain, loader: Loader) -> dict[int, Any]:
    """Validate this rank's share of a test set; return its results by row."""
    brain.on_stage_start(Stage.TEST, None)
    losses = brain.evaluate_splits({"": loader}, Stage.TEST, phase="test")
    results = brain.evaluator.results[""]
    planned = [*islice(loader.batch_sampler or (), len(losses))]
    rows = [[row for example in batch for row in example.rows] for batch in planned]
    if len(results) == len(losses):  # plain means, which belong to all utterances alike
        results = [mean for mean, batch in zip(results, rows, strict=True) for _ in batch]
    return dict(zip(chain.from_iterable(rows), results, strict=True))


def report(
    run: PreparedRun, brain: Brain, bundle: Bundle[TorchModel] | None, sets: Sequence[ScoredSet]
) -> None:
    """Write the results into the run folder, and log a line for each test set."""
    folder, settings = run.spec.folder, run.spec.settings
    test_report = ScoreReport(
        folder,
        run.recipe.task,
        sample_rate=settings["sample_rate"],
        labels=run.labels,
        metrics=brain.evaluator.metrics if type(brain).metrics else None,
        measure=brain.evaluator.measure if type(brain).metrics else None,
        report_by=settings["report_by"] or (),
    )
    for scored in sets:
        facts: FigureDict = {}
        if bundle is not None:
            facts = dict(bundle.facts(scored.rows))
            if note := (bundle.config.decoder or {}).get("note"):
                facts["notes"] = [note, *facts.get("notes", ())]
        test_report.add(scored, **facts)

    is_start = ends_with_start(folder)
    newest = max(brain.tested, key=lambda meta: meta["unixtime"], default=dict[str, Any]())
    if is_start:
        newest = {"epoch": 0, "optimizer_step": 0}
    log_size = brain.training_metrics.log_size  # so a repeated test replaces its lines
    run_log = RunLog(folder, size=log_size, step=brain.optimizer_step)
    for name, entry in test_report.entries.items():
        metrics = {key: entry[key] for key in brain.evaluator.metrics if key in entry}
        run_log.write(
            SplitFigures(
                epoch=newest.get("epoch", brain.hparams.epoch_counter.current),
                step=newest.get("optimizer_step", brain.optimizer_step),
                split=name,
                metrics=metrics,
                decoder=entry.get("decoder"),
            )
        )
    run_log.close()

    weights = "best checkpoint"
    if len(brain.tested) > 1:
        weights = f"mean of {len(brain.tested)} checkpoints"
    if is_start:
        weights = "the weights before training"
    parameters = sum(p.numel() for p in brain.modules.parameters())
    training = brain.training_metrics.of_run
    draw_curves(folder / LOG_FILE, folder / CURVES, brain.evaluator.metrics)
    before = read_start(run)
    note = f"{parameters / 1e6:.1f} M parameters, {weights}, sbkit {__version__}"
    test_report.write(
        notes=[*describe_start(run.recipe.task, before), note],
        model=str(folder),
        **{SETTINGS_FIELD: read_description(folder).values},
        provenance=None if bundle is None else bundle.provenance,
        parameters=parameters,
        train_seconds=round(training.wall_seconds, 1),
        audio_seconds=round(training.audio_seconds, 1),
        rtfx=round(training.rtfx, 1) if training.wall_seconds else None,
        device=str(brain.device),
        **(
            {"before_training": read_json(folder / BEFORE_TRAINING), "ends_with_start": is_start}
            if before
            else {}
        ),
    )
    for scored in sets:
        logger.info(f"{test_report.describe(scored)}, {weights}")
    for line in test_report.notes:
        logger.info(line)
    for line in describe_worse(run.recipe.task.metrics, before, test_report.figures):
        logger.warning(line)
