"""Checks of the values, the machine and the run folder.

A key has no effect if the dry run did not read it, no reference names it, and the source of the
recipe does not mention it: the dry run does not call the hooks at the end of a stage.
"""

import ast
import sys
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import numpy as np

from sbkit.base.errors import SbkitError
from sbkit.base.messages import did_you_mean, nearest, plural
from sbkit.base.ranges import RANGES, out_of_range
from sbkit.base.units import samples_to_seconds
from sbkit.bundle.task import load_task
from sbkit.check.checked_run import CheckedRun, DeclaredRun, Finding
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.run_config import CHECKPOINTS, folder_override
from sbkit.checkpoint.weights import check_weights
from sbkit.config.document import referenced, tag_of, walk
from sbkit.config.hparams import MissingSettingError, resolve
from sbkit.data.mix import samples_per_epoch
from sbkit.distributed.device import check_precision, choose_device, find_device
from sbkit.export.export import describe_parts, require_task_of_its_own
from sbkit.export.formats import declared_formats
from sbkit.logs.handlers import quiet
from sbkit.train.optimizers import ALWAYS, FREEZE
from sbkit.train.setup import load_initial_weights

COMMAND_KEYS = {"check", "recipe"}  # read by the command itself
# Packages whose source does not mention the keys that a recipe adds.
LIBRARY_PACKAGES = {*sys.stdlib_module_names, "sbkit", "speechbrain", "torch"}
MIN_STEPS = 4  # in an epoch; with fewer, many epochs change little
MAX_EMPTY_SHARE = 0.1  # micro-batches without an utterance


def check_ranges(declared: DeclaredRun) -> Iterator[Finding]:
    """Find hyperparameters out of range, and arguments out of the range that their class declares.

    An argument is not reported again if the key that holds it is out of range.
    """
    values = declared.values
    ranges = dict(RANGES)
    with suppress(SbkitError):  # of a recipe that cannot be imported, which is found later
        ranges |= values.load_recipe().ranges
    setting_problems = dict(out_of_range(values.settings, ranges))
    for key, problem in setting_problems.items():
        yield declared.finding(key, problem=problem.rstrip("."))
    argument_problems = resolve(values.yaml_file, values.overrides).arguments_out_of_range()
    for keys, problem in argument_problems.items():
        if keys[0] not in setting_problems:
            yield declared.finding(*keys, problem=problem.rstrip("."))


def check_unread(run: CheckedRun) -> Iterator[Finding]:
    """Find the keys that no reference and no code reads.

    A key of a base YAML is reported only if the YAML itself or the command line sets it.
    """
    in_code = names_in_code(type(run.brain))
    if isinstance(run.trial.error, MissingSettingError):
        yield from find_misspelled(run.declared, run.trial.error.key)
    if in_code is None or run.trial.error is not None:
        return  # code that has not run, or has no source, may read any key
    names_read = in_code.union(
        *(k.names_read for k in (run.values.settings, run.own.values.settings, run.own.hparams))
    )
    candidates = names_read - run.declared.document.own_keys
    for key in unread_keys(run.declared, names_read):
        yield _unread(run.declared, key, candidates)


def find_misspelled(declared: DeclaredRun, missing_key: str) -> Iterator[Finding]:
    """Find the keys that look like a misspelling of one that code reads, but the YAML lacks."""
    for key in unread_keys(declared, declared.values.settings.names_read):
        if nearest(key, {missing_key}):
            yield _unread(declared, key, {missing_key})


def _unread(declared: DeclaredRun, key: str, candidates: Set[str]) -> Finding:
    return declared.finding(
        key,
        problem=f"Nothing reads `{key}`, neither a reference nor code: it has no effect",
        fix=f"Correct its name, or take it out.{did_you_mean(key, candidates)}",
    )


def unread_keys(declared: DeclaredRun, names_read: Set[str]) -> Iterator[str]:
    """Yield the keys of the user that no reference names and no code has read.

    Only keys of the root are tested: a class refuses arguments that it does not take.
    """
    values, document = declared.values, declared.document
    set_by_user = {*values.given_overrides}
    if not folder_override(values.yaml_file):  # that of a run has the keys of its base as well
        set_by_user |= {*document.own_keys}
    referenced_keys = {str(path[0]) for _, node in walk(document.root) for path in referenced(node)}
    used = names_read | referenced_keys | COMMAND_KEYS
    for key, node in document.root.items():
        # An `!apply:` of somebody's own may have only a side effect.
        is_call = tag_of(node).startswith("!apply:") and not tag_of(node).startswith("!apply:sbkit")
        if key in set_by_user and not (key in used or key.startswith("_") or is_call):
            yield key


def names_in_code(brain: type) -> set[str] | None:
    """Return every attribute name and every string in the source of a Brain.

    The source includes that of its bases and of all modules imported from the same folders. Returns
    None for a Brain without a source file, as in a REPL.
    """
    folders: set[Path] = set()
    for module_name in {class_.__module__ for class_ in brain.__mro__}:
        if module_name.partition(".")[0] not in LIBRARY_PACKAGES:
            file = source_file(module_name)
            if file is None:
                return None
            folders.add(file.parent)
    module_files = {source_file(module_name) for module_name in list(sys.modules)}
    names: set[str] = set()
    for file in module_files:
        if file is None or file.parent not in folders or file.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return names


def source_file(module_name: str) -> Path | None:
    """Return the file of an imported module; None if it has none."""
    module = sys.modules.get(module_name)
    if not isinstance(module, ModuleType):
        return None
    name = vars(module).get("__file__")  # an attribute access could import a lazy module
    if name is None or not Path(name).is_file():
        return None
    return Path(name).absolute()


def check_freezing(run: CheckedRun) -> Iterator[Finding]:
    """Find parts that stay frozen at random weights for the whole run."""
    steps = run.brain.training_step.freezing.steps
    parts = [part for part, end in steps.items() if end == ALWAYS]
    has_weights = any(map(run.values.settings.get, ("pretrained", "init_from")))
    if parts and not has_weights and not run.values.has_checkpoint():
        yield run.note(
            FREEZE,
            problem=f"`freeze` keeps {', '.join(parts)} at random weights: neither `pretrained` "
            "nor `init_from` names others",
            fix="Name a run as `init_from`, or let these parts learn.",
        )


def check_placement(declared: DeclaredRun) -> Iterator[Finding]:
    """Find a device that the machine lacks, and precisions that the device lacks."""
    settings, count = declared.values.settings, declared.values.count
    device = choose_device(settings.get("device"), count)
    for key in ("device", "precision", "eval_precision"):
        try:
            if key == "device":
                find_device(device, count)
            else:
                check_precision(device.type, settings.get(key, "fp32"), key=key)
        except SbkitError as error:
            yield declared.finding(key, problem=str(error).rstrip("."))


def check_batches(run: CheckedRun) -> Iterator[Finding]:
    """Find batches too large for an epoch, or too small to share among the machine's processes."""
    if run.sampler is None:
        return
    steps = run.sampler.steps()
    batch_seconds = run.values.settings["batch_seconds"]
    num_processes = run.num_processes
    micro_batches_per_step = num_processes * run.accumulation
    num_samples = samples_per_epoch(run.data.splits)
    seconds = samples_to_seconds(num_samples, run.values.settings["sample_rate"])
    if len(steps) < MIN_STEPS and seconds < MIN_STEPS * batch_seconds:
        yield run.note(
            "batch_seconds",
            problem=f"An epoch has too few steps to learn from: with batches of {batch_seconds:g} "
            f"s, its {seconds:,.0f} s of train make {len(steps)}",
            fix="Lower `batch_seconds`.",
        )
    num_empty = int(np.maximum(micro_batches_per_step - steps.sizes, 0).sum())
    empty_share = num_empty / (micro_batches_per_step * len(steps))
    if empty_share > MAX_EMPTY_SHARE:
        yield run.note(
            "batch_seconds",
            problem=f"Batches of {batch_seconds:g} s are too small to share: of the micro-batches "
            f"of {plural(num_processes, 'process', 'processes')}, {empty_share:.0%} are empty",
            fix="Raise `batch_seconds`, or start fewer processes.",
        )


def check_run_folder(run: CheckedRun) -> None:
    """Refuse, as training does, a run folder that belongs to another run."""
    run_folder = run.values.folder
    folder = run_folder / CHECKPOINTS
    if folder.is_dir():
        with quiet():  # training itself logs which checkpoints are damaged
            newest = next(iter(Checkpointer(folder).find_whole(1)), None)
        if newest is not None:
            run.data.check_resumable()
            check_weights(run.own.hparams["checkpointer"], newest)


def check_initial_weights(run: CheckedRun) -> None:
    """Refuse, as training does, a `pretrained` or `init_from` without weights for the model."""
    if not run.values.has_checkpoint():
        run.measured.initial_weights = load_initial_weights(run.own)


def check_formats(run: CheckedRun) -> Iterator[Finding]:
    """Find export formats that models of this task do not have."""
    try:
        declared_formats(run.values.settings, run.data.recipe)
    except SbkitError as error:
        yield run.finding("export_formats", problem=str(error).rstrip("."))


def check_export(run: CheckedRun) -> Iterator[Finding]:
    """Find parts that `sbkit export` would refuse; they stop a run that declares formats."""
    require_task_of_its_own(run.data.recipe)
    name, values = run.data.recipe.name, run.values
    try:
        task = load_task(name, user_modules=frozenset([name.rpartition(".")[0]]))
        root = resolve(values.yaml_file, values.overrides).tree
        describe_parts(root, run.own.hparams, task)
    except SbkitError as error:
        key = next((key for key in run.declared.document.root if f"`{key}`" in str(error)), "model")
        stops = bool(values.settings.get("export_formats"))
        yield run.finding(key, problem=str(error).rstrip("."), stops=stops)
