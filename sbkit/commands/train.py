"""A training run from its YAML to its results: the list of steps that train.py starts.

`sbkit prepare` decodes the data of a run into the cache, or writes it as shards.
"""

import logging
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch

from sbkit.base.allocator import describe_allocator, return_freed_memory
from sbkit.base.errors import ConfigError
from sbkit.base.files import require_writable
from sbkit.base.messages import listed, plural
from sbkit.base.openmp import describe_waiting
from sbkit.check.batch_seconds import find_batch_seconds
from sbkit.check.check import check_before_training
from sbkit.checkpoint.folder import lock_folder
from sbkit.checkpoint.run_config import RESOLVED_YAML
from sbkit.config.hparams import save_resolved
from sbkit.config.overrides import parse_command, parse_overrides
from sbkit.data.cache import default_cache
from sbkit.data.corpus import describe_corpus, splits_of
from sbkit.data.filesystem import Storage
from sbkit.data.filters import filter_manifests
from sbkit.data.manifest import Manifest
from sbkit.data.report import measure_data, write_data_report
from sbkit.data.shard import LAZY
from sbkit.data.sharded_corpus import ShardOptions, parse_size, write_shards
from sbkit.data.sources import TableFolders
from sbkit.data.splits import shard_numbers
from sbkit.distributed.device import Placement, describe_tf32, note_precision
from sbkit.distributed.ranks import main_rank_first, process_group, rank
from sbkit.evaluate.report import REPORT
from sbkit.evaluate.run_results import SUMMARY
from sbkit.logs.handlers import TextLog
from sbkit.run.ending import RunEnding
from sbkit.run.results import is_without_bundle
from sbkit.train.brain import Brain
from sbkit.train.run import Run

logger = logging.getLogger(__name__)


def train(arguments: Sequence[str]) -> None:
    """Train and test what ``FILE.yaml [--key=value ...]`` declares; raises SbkitError."""
    run = Run(*parse_command(arguments))
    run.check_ranges()
    placement = run.choose_placement()
    with (
        TextLog(run.folder, title=shlex.join(["train.py", *arguments])) as text_log,
        process_group(placement.device),
    ):
        log_machine(placement)
        run = with_fitting_batches(run)
        prepare(run)
        was_finished = run.is_finished()  # after `fit` every run is
        begin(run, text_log, was_finished=was_finished)
        loaders = run.make_loaders()
        brain = run.make_brain(loaders)
        brain.fit(run.build_hparams()["epoch_counter"], loaders.train, loaders.valid)
        test(run, brain, was_finished=was_finished)


def log_machine(placement: Placement) -> None:
    """Log how this machine will compute."""
    device = placement.device
    waiting = describe_waiting(torch.get_num_threads())
    logger.info(f"{device}: {waiting}; {describe_allocator()}{describe_tf32(device)}")
    if note := note_precision(placement):
        logger.info(note)


def with_fitting_batches(run: Run) -> Run:
    """Return the run with a number for `batch_seconds: auto`."""
    overrides = find_batch_seconds(run.yaml_file, run.overrides, recipe=run.load_recipe())
    return Run(run.yaml_file, overrides, recipe=run.load_recipe())


def prepare(run: Run) -> None:
    """Check the run, and prepare its data, labels, model and batches; raises SbkitError."""
    with main_rank_first():
        if rank() == 0:
            lock_folder(run.folder)  # before anything in it is written
        if run.knobs.get("check", True) and rank() == 0:
            check_before_training(run)
        run.prepare_splits()
        if note := run.make_run_config().check_resumable(run.folder):
            logger.info(note)
        if (label_file := run.find_label_file()) and not run.has_checkpoint():
            logger.info(
                f"note: {label_file} was there before the first checkpoint and is used as it is. "
                "Remove it to have it made again from this data."
            )
        run.prepare_labels()
    run.build_hparams()
    run.make_loaders()
    config = run.make_run_config()  # now with the labels
    config.check_resumable(run.folder)
    config.check_same_on_ranks()
    run.build_hparams()["checkpointer"].check_same_model()
    for line in run.load_initial_weights():
        logger.info(line)


def begin(run: Run, text_log: TextLog, *, was_finished: bool) -> None:
    """Write the files that describe the run into its folder, now that all checks have passed."""
    with main_rank_first():
        text_log.open()
        if rank() == 0:
            run.make_run_config().write(run.folder)
            save_resolved(run.folder / RESOLVED_YAML, run.yaml_file, run.overrides)
            if not was_finished:
                run.set_results_aside()
            write_data_report(run.make_loaders().splits, run.folder, **run.describe_data())
            return_freed_memory()  # of the report, which training does not need


def test(run: Run, brain: Brain, *, was_finished: bool) -> None:
    """Test the best weights, unless nothing was trained and the results are there.

    At the end, name the report and the command that follows.
    """
    logger.info(f"run folder: {run.folder}")
    if was_finished and (run.folder / SUMMARY).is_file() and not is_without_bundle(run.folder):
        logger.info(
            f"All epochs were trained before; the results in {run.folder} stay as they are."
        )
    else:
        RunEnding(run, brain).take()
        if type(brain).evaluate is not Brain.evaluate:
            brain.evaluate(run.make_loaders().test)
    if (report := run.folder / REPORT).is_file():
        logger.info(f"report: {report}")
    if run.load_recipe().task.export is not None:
        logger.info(f"next: sbkit export {shlex.quote(str(run.folder))} --out my-model")


def prepare_data(options: Namespace) -> None:
    """Prepare the data of a run and describe it, or write it as shards.

    Nothing is trained, and no run folder is made. Raises SbkitError for bad input, or a full disk.
    """
    if options.shards and options.report:
        raise ConfigError("--shards writes no report. Run `sbkit prepare --report` separately.")
    run = Run(options.yaml, parse_overrides(options.overrides))
    run.check_ranges()
    if options.shards is not None:
        write_run_as_shards(run, options.shards, options.shard_size)
        return
    report: Path | None = options.report
    if report is not None:
        require_writable(report, option="--report")
    rate = run.knobs["sample_rate"]
    language = run.knobs.get("language")
    splits = run.prepare_splits()
    facts = measure_data(splits, sample_rate=rate, language=language)
    for name, split in facts["splits"].items():
        logger.info(f"{name}: {plural(split['utterances'], 'utterance')}, {split['hours']:.2f} h")
        if clips := split["other_durations"]:
            ids = listed(clip["id"] for clip in clips)
            logger.info(f"{name}: {plural(len(clips), 'clip')} not as long as stated: {ids}")
    for group in facts["left_out"]:
        logger.info(f"{group['split']}: {group['utterances']} left out, {group['reason']}")
    if not shard_numbers(splits.train).any() and run.knobs.get("audio_store") != LAZY:
        logger.info(f"prepared audio: {default_cache()}")
    if report is not None:
        _, page = write_data_report(splits, report, sample_rate=rate, language=language)
        logger.info(f"report: {page}")


def write_run_as_shards(run: Run, destination: str, shard_size: str) -> None:
    """Write the data of a run as shards, or this process's share of them."""
    make_corpus = run.load_recipe().corpus
    if make_corpus is None:
        raise ConfigError(
            "Shards can only be made if the recipe has a `corpus`. Add "
            "corpus=recipes.prepare.corpus_of to the recipe."
        )
    corpus = make_corpus(run.knobs)
    options = ShardOptions(
        sample_rate=run.knobs["sample_rate"],
        store=run.knobs.get("audio_store", "pcm"),
        shard_bytes=parse_size(shard_size),
        seed=run.knobs["seed"],
    )
    roles = splits_of(corpus, run.knobs)
    sources = {name: corpus.read(run.knobs, name) for name in chain(*roles.values())}
    sources = filter_sources(run, sources)
    facts = describe_corpus(corpus, run.knobs)
    if write_shards(Storage(destination), options, sources, roles, facts) is not None:
        logger.info(f"Train with --data_folder={destination}")


def filter_sources(
    run: Run, sources: Mapping[str, Manifest | TableFolders]
) -> dict[str, Manifest | TableFolders]:
    """Leave out the rows that `where` and `skip_quality_tags` leave out, and log their number.

    Raises ConfigError for table folders, whose rows are not known yet.
    """
    manifests = {split: s for split, s in sources.items() if isinstance(s, Manifest)}
    has_filters = run.knobs.get("where") or run.knobs.get("skip_quality_tags")
    if has_filters and len(manifests) < len(sources):
        raise ConfigError(
            "Table folders are written as shards with all rows. Take `where` and "
            "`skip_quality_tags` out, and pass them to the training on the shards."
        )
    manifests = filter_manifests(manifests, run.knobs)
    for split, manifest in manifests.items():
        for reason, count in manifest.filtered.items():
            logger.info(f"{split}: {count} left out, {reason}")
    return {**sources, **manifests}
