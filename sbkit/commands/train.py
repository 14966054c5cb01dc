"""A training run from its YAML to its results: what train.py does, in order.

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
from sbkit.train.setup import RunSetup

logger = logging.getLogger(__name__)


def train(arguments: Sequence[str]) -> None:
    """Train and test what ``FILE.yaml [--key=value ...]`` declares; raises SbkitError."""
    setup = RunSetup(*parse_command(arguments))
    setup.check_ranges()
    placement = setup.choose_placement()
    with (
        TextLog(setup.folder, title=shlex.join(["train.py", *arguments])) as text_log,
        process_group(placement.device),
    ):
        log_machine(placement)
        setup = with_fitting_batches(setup)
        prepare(setup)
        was_finished = setup.is_finished()  # after `fit` every run is
        begin(setup, text_log, was_finished=was_finished)
        loaders = setup.make_loaders()
        brain = setup.make_brain(loaders)
        brain.fit(setup.build_hparams()["epoch_counter"], loaders.train, loaders.valid)
        test(setup, brain, was_finished=was_finished)


def log_machine(placement: Placement) -> None:
    """Log how this machine will compute."""
    device = placement.device
    waiting = describe_waiting(torch.get_num_threads())
    logger.info(f"{device}: {waiting}; {describe_allocator()}{describe_tf32(device)}")
    if note := note_precision(placement):
        logger.info(note)


def with_fitting_batches(setup: RunSetup) -> RunSetup:
    """Return the run with a number for `batch_seconds: auto`."""
    overrides = find_batch_seconds(setup.yaml_file, setup.overrides, recipe=setup.load_recipe())
    return RunSetup(setup.yaml_file, overrides, recipe=setup.load_recipe())


def prepare(setup: RunSetup) -> None:
    """Check the run, and prepare its data, labels, model and batches; raises SbkitError."""
    with main_rank_first():
        if rank() == 0:
            lock_folder(setup.folder)  # before anything in it is written
        if setup.knobs.get("check", True) and rank() == 0:
            check_before_training(setup)
        setup.prepare_splits()
        if note := setup.make_run_config().check_resumable(setup.folder):
            logger.info(note)
        if (label_file := setup.find_label_file()) and not setup.has_checkpoint():
            logger.info(
                f"note: {label_file} was there before the first checkpoint and is used as it is. "
                "Remove it to have it made again from this data."
            )
        setup.prepare_labels()
    setup.build_hparams()
    setup.make_loaders()
    config = setup.make_run_config()  # now with the labels
    config.check_resumable(setup.folder)
    config.check_same_on_ranks()
    setup.build_hparams()["checkpointer"].check_same_model()
    for line in setup.load_initial_weights():
        logger.info(line)


def begin(setup: RunSetup, text_log: TextLog, *, was_finished: bool) -> None:
    """Write the files that describe the run into its folder, now that all checks have passed."""
    with main_rank_first():
        text_log.open()
        if rank() == 0:
            setup.make_run_config().write(setup.folder)
            save_resolved(setup.folder / RESOLVED_YAML, setup.yaml_file, setup.overrides)
            if not was_finished:
                setup.set_results_aside()
            write_data_report(setup.make_loaders().splits, setup.folder, **setup.describe_data())
            return_freed_memory()  # of the report, which training does not need


def test(setup: RunSetup, brain: Brain, *, was_finished: bool) -> None:
    """Test the best weights, unless nothing was trained and the results are there.

    At the end, name the report and the command that follows.
    """
    logger.info(f"run folder: {setup.folder}")
    if was_finished and (setup.folder / SUMMARY).is_file() and not is_without_bundle(setup.folder):
        logger.info(
            f"All epochs were trained before; the results in {setup.folder} stay as they are."
        )
    else:
        RunEnding(setup, brain).finish()
        if type(brain).evaluate is not Brain.evaluate:
            brain.evaluate(setup.make_loaders().test)
    if (report := setup.folder / REPORT).is_file():
        logger.info(f"report: {report}")
    if setup.load_recipe().task.export is not None:
        logger.info(f"next: sbkit export {shlex.quote(str(setup.folder))} --out my-model")


def prepare_data(options: Namespace) -> None:
    """Prepare the data of a run and describe it, or write it as shards.

    Nothing is trained, and no run folder is made. Raises SbkitError for bad input, or a full disk.
    """
    if options.shards and options.report:
        raise ConfigError("--shards writes no report. Run `sbkit prepare --report` separately.")
    setup = RunSetup(options.yaml, parse_overrides(options.overrides))
    setup.check_ranges()
    if options.shards is not None:
        write_run_as_shards(setup, options.shards, options.shard_size)
        return
    report: Path | None = options.report
    if report is not None:
        require_writable(report, option="--report")
    rate = setup.knobs["sample_rate"]
    language = setup.knobs.get("language")
    splits = setup.prepare_splits()
    facts = measure_data(splits, sample_rate=rate, language=language)
    for name, split in facts["splits"].items():
        logger.info(f"{name}: {plural(split['utterances'], 'utterance')}, {split['hours']:.2f} h")
        if clips := split["other_durations"]:
            ids = listed(clip["id"] for clip in clips)
            logger.info(f"{name}: {plural(len(clips), 'clip')} not as long as stated: {ids}")
    for group in facts["left_out"]:
        logger.info(f"{group['split']}: {group['utterances']} left out, {group['reason']}")
    if not shard_numbers(splits.train).any() and setup.knobs.get("audio_store") != LAZY:
        logger.info(f"prepared audio: {default_cache()}")
    if report is not None:
        _, page = write_data_report(splits, report, sample_rate=rate, language=language)
        logger.info(f"report: {page}")


def write_run_as_shards(setup: RunSetup, destination: str, shard_size: str) -> None:
    """Write the data of a run as shards, or this process's share of them."""
    make_corpus = setup.load_recipe().corpus
    if make_corpus is None:
        raise ConfigError(
            "Shards can only be made if the recipe has a `corpus`. Add "
            "corpus=recipes.prepare.corpus_of to the recipe."
        )
    corpus = make_corpus(setup.knobs)
    options = ShardOptions(
        sample_rate=setup.knobs["sample_rate"],
        store=setup.knobs.get("audio_store", "pcm"),
        shard_bytes=parse_size(shard_size),
        seed=setup.knobs["seed"],
    )
    roles = splits_of(corpus, setup.knobs)
    sources = {name: corpus.read(setup.knobs, name) for name in chain(*roles.values())}
    sources = filter_sources(setup, sources)
    facts = describe_corpus(corpus, setup.knobs)
    if write_shards(Storage(destination), options, sources, roles, facts) is not None:
        logger.info(f"Train with --data_folder={destination}")


def filter_sources(
    setup: RunSetup, sources: Mapping[str, Manifest | TableFolders]
) -> dict[str, Manifest | TableFolders]:
    """Leave out the rows that `where` and `skip_quality_tags` leave out, and log their number.

    Raises ConfigError for table folders, whose rows are not known yet.
    """
    manifests = {split: s for split, s in sources.items() if isinstance(s, Manifest)}
    has_filters = setup.knobs.get("where") or setup.knobs.get("skip_quality_tags")
    if has_filters and len(manifests) < len(sources):
        raise ConfigError(
            "Table folders are written as shards with all rows. Take `where` and "
            "`skip_quality_tags` out, and pass them to the training on the shards."
        )
    manifests = filter_manifests(manifests, setup.knobs)
    for split, manifest in manifests.items():
        for reason, count in manifest.filtered.items():
            logger.info(f"{split}: {count} left out, {reason}")
    return {**sources, **manifests}
