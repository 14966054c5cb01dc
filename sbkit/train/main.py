"""A training run from its YAML to its results: the list of steps that train.py starts."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from sbkit.base.errors import SbkitError
from sbkit.base.files import require_writable
from sbkit.base.machine import describe_allocator, describe_waiting
from sbkit.base.text import plural
from sbkit.check.batch_seconds import find_batch_seconds
from sbkit.check.check import check_before_training
from sbkit.checkpoint.declaration import CHECKPOINTS, RESOLVED, Declaration
from sbkit.checkpoint.listing import newest_described
from sbkit.checkpoint.lock import hold
from sbkit.config.hparams import parse_command, save_resolved
from sbkit.data.corpora.columns import shard_numbers
from sbkit.data.corpora.splits import Splits
from sbkit.data.report import measure_data, write_data_report
from sbkit.data.storage.audio_cache import default_cache
from sbkit.data.storage.filesystem import Storage
from sbkit.data.storage.shard_units import ShardOptions
from sbkit.data.storage.write_shards import parse_size, write_shards
from sbkit.distributed.device import describe_products
from sbkit.distributed.ranks import main_rank_first, process_group, rank
from sbkit.evaluate.summary import SUMMARY
from sbkit.logs.log import log
from sbkit.logs.text_log import TextLog
from sbkit.text.normalize import table_to_store
from sbkit.text.tokenizer import Tokenizer
from sbkit.train.finished import is_finished, may_write_results
from sbkit.train.initialize import initialize_from
from sbkit.train.run import Run
from sbkit.train.scoring import metrics_of


def train(arguments: Sequence[str]) -> None:
    """Train what ``FILE.yaml [--key=value ...]`` declares.

    Raises:
        SbkitError: bad input.
    """
    run = Run(*parse_command(arguments))
    run.refuse_out_of_range()
    with TextLog(run.folder, title=shlex.join(["train.py", *arguments])) as text_log:
        train_run(run, text_log)


def train_run(run: Run, text_log: TextLog) -> None:
    """Train, test and report; the log is opened once nothing refuses the run folder."""
    waiting = describe_waiting(torch.get_num_threads())
    device = run.placement.device
    log(f"{device}: {waiting}; {describe_allocator()}{describe_products(device)}")
    with process_group(run.placement.device):
        run = settle_batches(run)
        with main_rank_first():
            prepare(run)
        declaration = declare(run)
        _ = run.loaders
        run.hparams["checkpointer"].refuse_other_model()
        start_weights(run)
        was_finished = is_finished(
            run.folder,
            metrics_of(run.recipe.brain),
            number_of_epochs=run.hparams["epoch_counter"].limit,
            patience=run.knobs.get("early_stopping", 0),
        )
        with main_rank_first():
            text_log.open()
            run.hparams["checkpointer"].declaration = declaration.begin(run.folder)
            run.hparams["checkpointer"].task = run.recipe.task.name
            if isinstance(run.labels, Tokenizer):
                run.hparams["checkpointer"].normalizer = table_to_store(run.knobs["language"])
            save_resolved(run.folder / RESOLVED, run.yaml_file, run.overrides)
            if rank() == 0:
                if not was_finished:  # its results are those of an earlier model
                    (run.folder / SUMMARY).unlink(missing_ok=True)
                report_data(run, run.loaders.splits, run.folder)
        brain = run.make_brain()
        brain.loaders = run.loaders
        brain.fit(run.hparams["epoch_counter"], run.loaders.train, run.loaders.valid)
        log(f"run folder: {run.folder}")
        if may_write_results(run.folder, was_finished=was_finished):
            brain.evaluate(run.loaders.test)
        else:
            log(f"All epochs were trained before; the results in {run.folder} stay as they are.")


def settle_batches(run: Run) -> Run:
    """Return the run with a number in the place of `batch_seconds: auto`."""
    overrides = find_batch_seconds(run.yaml_file, run.overrides, recipe=run.recipe)
    if overrides == run.overrides:
        return run
    return Run(run.yaml_file, overrides, recipe=run.recipe)


def prepare(run: Run) -> None:
    """Lock the run folder, check the run, and prepare data and labels, rank 0 before the others."""
    if rank() == 0:
        hold(run.folder)  # before anything in it is written
    if run.knobs.get("check", True) and rank() == 0:
        check_before_training(run)
    Declaration.of(
        run.yaml_file,
        run.overrides,
        data=run.splits.fingerprints,
        tokenizer_file=run.label_file,
    ).refuse_other(run.folder)
    if run.label_file and newest_described(run.folder / CHECKPOINTS) is None:
        log(
            f"note: {run.label_file} was there before the first checkpoint, and is used as it is. "
            "Remove it to have it made anew of this data."
        )
    _ = run.labels  # which makes what is missing, and language models of the tokenizer at hand


def report_data(run: Run, splits: Splits, folder: Path) -> Path:
    """Write what the data of a run is into a folder; return the page."""
    knobs = run.knobs
    _, page = write_data_report(
        splits, folder, sample_rate=knobs["sample_rate"], language=knobs.get("language")
    )
    return page


def prepare_data(arguments: Sequence[str], report: Path | None = None) -> None:
    """Prepare the data of a run, and say what it is; nothing is trained, no run folder is made.

    Raises:
        SbkitError: bad input.
    """
    run = Run(*parse_command(arguments))
    run.refuse_out_of_range()
    if report is not None:
        require_writable(report, option="--report")
    splits = run.splits
    facts = measure_data(
        splits, sample_rate=run.knobs["sample_rate"], language=run.knobs.get("language")
    )
    for name, split in facts["splits"].items():
        log(f"{name}: {split['utterances']} utterances, {split['hours']:.2f} h")
    for each in facts["left_out"]:
        log(f"{each['split']}: {each['utterances']} left out, {each['reason']}")
    if not shard_numbers(splits.train).any():
        log(f"prepared audio: {default_cache()}")
    if report is not None:
        log(f"report: {report_data(run, splits, report)}")


def prepare_shards(arguments: Sequence[str], destination: str, shard_size: str) -> None:
    """Write the data of a run as shards, or this process's share of them.

    Raises:
        SbkitError: bad input, or there is no room.
    """
    run = Run(*parse_command(arguments))
    run.refuse_out_of_range()
    if run.recipe.corpus is None:
        raise SbkitError(
            "The recipe must name its `corpus` for shards to be made of it, but does not. Add "
            "corpus=recipes.corpora.corpus_of to the recipe."
        )
    corpus = run.recipe.corpus(run.knobs)
    options = ShardOptions(
        sample_rate=run.knobs["sample_rate"],
        store=run.knobs.get("audio_store", "pcm"),
        shard_bytes=parse_size(shard_size),
        seed=run.knobs["seed"],
    )
    roles = corpus.splits(run.knobs)
    sources = {name: corpus.read(run.knobs, name) for names in roles.values() for name in names}
    index = write_shards(Storage.at(destination), options, sources, roles)
    if index is not None:
        for name, shards in index.splits.items():
            hours = sum(shard.samples for shard in shards) / options.sample_rate / 3600
            clips = sum(shard.clips for shard in shards)
            log(f"{name}: {clips} clips, {hours:.2f} h, {plural(len(shards), 'shard')}")
        log(f"Train with --data_folder={destination}")


def tune_run(folder: Path, changes: Mapping[str, object]) -> None:
    """Choose the weights of a trained run's decoder again, with changes to its decoder.

    Raises:
        SbkitError: the folder holds no trained run, or was moved.
    """
    yaml_file = folder / RESOLVED
    if newest_described(folder / CHECKPOINTS) is None or not yaml_file.is_file():
        raise SbkitError(
            f"A run must be trained before its decoder is tuned, but {folder} holds no checkpoint "
            "that can be read. Name a run folder, as training printed it."
        )
    options = [f"--{key}={value}" for key, value in changes.items()]
    run = Run(*parse_command([str(yaml_file), *options]))
    run.knobs["check"] = False
    if not run.folder.is_dir() or not run.folder.samefile(folder):
        raise SbkitError(
            f"A run must be where it was trained to be tuned, but {folder} was trained as "
            f"{run.folder}. Move it back, or call sbkit from the folder that it was trained from."
        )
    with process_group(run.placement.device):
        prepare(run)
        declare(run)
        brain = run.make_brain()
        if not hasattr(brain, "decoding"):  # which chooses the weights once the best is loaded
            raise SbkitError(
                f"A run must be of a recognizer to be tuned, but {folder} is none. Leave it."
            )
        brain.loaders = run.loaders
        brain.load_best(run.loaders.valid)


def declare(run: Run) -> Declaration:
    """Write down what the run is, and refuse the folder of another one, and other ranks."""
    declaration = Declaration.of(
        run.yaml_file,
        run.overrides,
        data=run.splits.fingerprints,
        tokenizer_file=run.label_file,
        hparams=run.hparams,
    )
    if note := declaration.refuse_other(run.folder):
        log(note)
    declaration.refuse_other_ranks()
    return declaration


def start_weights(run: Run) -> None:
    """Load what fits of `init_from`, unless the run has weights of its own."""
    source = run.knobs.get("init_from")
    if source and newest_described(run.folder / CHECKPOINTS) is None:
        for line in initialize_from(Path(str(source)), run.hparams, run.recipe.task).lines():
            log(line)
