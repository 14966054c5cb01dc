"""Checks of the values, the machine and the run folder.

A `Knobs` records which keys have been read from it. A key has no effect if the dry run did not
read it and no reference names it. However, the dry run does not call the hooks at the end of a
stage, so a key also counts as read if the source of the recipe mentions it.
"""

import ast
import sys
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import numpy as np

from sbkit.base.errors import SbkitError
from sbkit.base.messages import plural
from sbkit.base.ranges import RANGES, out_of_range
from sbkit.base.units import samples_to_seconds
from sbkit.bundle.task import load_task
from sbkit.check.dry_run import dry_run
from sbkit.check.planned_run import Finding, MissingPartError, PlannedRun
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.folder import newest_checkpoint
from sbkit.checkpoint.run_config import CHECKPOINTS, folder_override
from sbkit.checkpoint.weights import check_weights
from sbkit.config.document import (
    Document,
    did_you_mean,
    nearest,
    referenced,
    tag_of,
    walk,
)
from sbkit.config.hparams import MissingKnobError, resolve
from sbkit.data.mix import samples_per_epoch
from sbkit.distributed.device import check_precision, choose_device, find_device
from sbkit.export.export import describe_parts
from sbkit.export.formats import declared_formats
from sbkit.logs.handlers import quiet
from sbkit.train.optimizers import ALWAYS, FREEZE

COMMAND_KEYS = {"check", "recipe"}  # read by the command itself
# Packages whose source does not mention the keys that a recipe adds.
LIBRARY_PACKAGES = {*sys.stdlib_module_names, "sbkit", "speechbrain", "torch"}
MIN_STEPS = 4  # in an epoch; with fewer, many epochs change little
MAX_EMPTY_SHARE = 0.1  # micro-batches without an utterance
# `PlannedRun.results` holds the log lines about loaded weights under this key.
INITIAL_WEIGHTS = "initial weights"


def check_ranges(planned: PlannedRun) -> Iterator[Finding]:
    """Find hyperparameters out of range, and arguments out of the range that their class declares.

    An argument is not reported again if the key that holds it is out of range.
    """
    ranges = dict(RANGES)
    with suppress(MissingPartError):
        ranges |= planned.load_recipe().ranges
    knob_problems = dict(out_of_range(planned.knobs, ranges))
    for key, problem in knob_problems.items():
        yield planned.finding(key, problem=problem.rstrip("."))
    argument_problems = resolve(planned.yaml_file, planned.overrides).arguments_out_of_range()
    for keys, problem in argument_problems.items():
        if keys[0] not in knob_problems:
            yield planned.finding(*keys, problem=problem.rstrip("."))


def check_unread(planned: PlannedRun) -> Iterator[Finding]:
    """Find the keys that no reference and no code reads.

    A key of a base YAML is reported only if the YAML itself or the command line sets it.
    If something cannot be made, the code after it reads nothing. Then only the keys that look like
    a misspelling of a missing key are reported.
    """
    with suppress(MissingPartError):
        planned.make_optimizers()
        dry_run(planned)
    names_read = planned.knobs.names_read | planned.results.get("hparams", planned.knobs).names_read
    if "brain" in planned.results:
        names_read |= names_in_code(type(planned.make_cpu_brain()))
    set_by_user = {*planned.user_overrides}
    if not folder_override(planned.yaml_file):  # that of a run has the keys of its base as well
        set_by_user |= {*planned.document.own_keys}
    unread_keys = [
        key for key in find_unread_keys(planned.document, names_read) if key in set_by_user
    ]
    is_complete = not planned.faults and dry_run(planned).error is None
    if is_complete:
        candidates = names_read - set(planned.document.root)
    else:
        candidates = {e.name for e in planned.faults.values() if isinstance(e, MissingKnobError)}
        unread_keys = [key for key in unread_keys if nearest(key, candidates)]
    for key in unread_keys:
        yield planned.finding(
            key,
            problem=f"Nothing reads `{key}`, neither a reference nor code: it has no effect",
            fix=f"Correct its name, or take it out.{did_you_mean(key, candidates)}",
        )


def names_in_code(brain: type) -> set[str]:
    """Return every attribute name and every string in the source of a Brain.

    The source includes its bases, except for those in `LIBRARY_PACKAGES`, and all modules imported
    from the same folders. Raises MissingPartError for a Brain without a source file, as in a REPL.
    """
    folders: set[Path] = set()
    for module_name in {class_.__module__ for class_ in brain.__mro__}:
        if module_name.partition(".")[0] not in LIBRARY_PACKAGES:
            file = source_file(module_name)
            if file is None:
                raise MissingPartError("source")
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


def find_unread_keys(document: Document, names_read: Set[str]) -> Iterator[str]:
    """Yield the keys that no reference names and no code has read.

    Only keys of the root are tested: a class refuses arguments that it does not take.
    """
    referenced_keys = {str(path[0]) for _, node in walk(document.root) for path in referenced(node)}
    used = names_read | referenced_keys | COMMAND_KEYS
    for key, node in document.root.items():
        # An `!apply:` of somebody's own may have only a side effect.
        is_call = tag_of(node).startswith("!apply:") and not tag_of(node).startswith("!apply:sbkit")
        if not (key in used or key.startswith("_") or is_call):
            yield key


def check_freezing(planned: PlannedRun) -> Iterator[Finding]:
    """Find parts that stay frozen at random weights for the whole run.

    Training itself refuses values that are neither steps nor `always`.
    """
    frozen_steps = planned.knobs.get(FREEZE)
    if isinstance(frozen_steps, list | tuple):
        frozen_steps = dict.fromkeys(map(str, frozen_steps), ALWAYS)
    if not isinstance(frozen_steps, Mapping):
        return
    is_first = newest_checkpoint(planned.run_folder / CHECKPOINTS) is None
    parts = [part for part, end in frozen_steps.items() if end == ALWAYS]
    if parts and is_first and not any(map(planned.knobs.get, ("pretrained", "init_from"))):
        yield planned.finding(
            FREEZE,
            problem=f"`freeze` keeps {', '.join(parts)} at random weights: neither `pretrained` "
            "nor `init_from` names others",
            fix="Name a run as `init_from`, or let these parts learn.",
            stops=False,
        )


def check_placement(planned: PlannedRun) -> Iterator[Finding]:
    """Find a device that the machine lacks, and precisions that the device lacks."""
    device = choose_device(planned.knobs.get("device"), planned.count)
    for key in ("device", "precision", "eval_precision"):
        try:
            if key == "device":
                find_device(device, planned.count)
            else:
                check_precision(device.type, planned.knobs.get(key, "fp32"), key=key)
        except SbkitError as error:
            yield planned.finding(key, problem=str(error).rstrip("."))


def check_batches(planned: PlannedRun) -> Iterator[Finding]:
    """Find batches too large for an epoch, or too small to share among the machine's processes."""
    steps = planned.require_sampler().steps()
    batch_seconds = planned.knobs["batch_seconds"]
    num_processes = planned.count_processes()
    micro_batches_per_step = num_processes * planned.accumulation
    num_samples = samples_per_epoch(planned.prepare_splits())
    seconds = samples_to_seconds(num_samples, planned.knobs["sample_rate"])
    if len(steps) < MIN_STEPS and seconds < MIN_STEPS * batch_seconds:
        yield planned.finding(
            "batch_seconds",
            problem=f"An epoch has too few steps to learn from: with batches of {batch_seconds:g} "
            f"s, its {seconds:,.0f} s of train make {len(steps)}, fewer than {MIN_STEPS}",
            fix="Lower `batch_seconds`.",
            stops=False,
        )
    num_empty = int(np.maximum(micro_batches_per_step - steps.sizes, 0).sum())
    empty_share = num_empty / (micro_batches_per_step * len(steps))
    if empty_share > MAX_EMPTY_SHARE:
        yield planned.finding(
            "batch_seconds",
            problem=f"Batches of {batch_seconds:g} s are too small to share: "
            f"{plural(num_processes, 'process', 'processes')} with "
            f"{plural(planned.accumulation, 'micro-batch', 'micro-batches')} each compute "
            f"{empty_share:.0%} of the micro-batches for nothing, because they are empty",
            fix="Raise `batch_seconds`, lower `grad_accumulation_factor`, or start fewer "
            "processes.",
            stops=False,
        )


def check_run_folder(planned: PlannedRun) -> None:
    """Refuse, as training does, a run folder that belongs to another run."""
    folder = planned.run_folder / CHECKPOINTS
    if folder.is_dir():
        with quiet():  # training itself logs which checkpoints are damaged
            newest = next(iter(Checkpointer(folder).find_whole(1)), None)
        if newest is not None:
            planned.prepare_labels()  # writes the label file, which is compared too
            planned.make_run_config().check_resumable(planned.run_folder)
            check_weights(planned.build_hparams()["checkpointer"], newest)


def check_initial_weights(planned: PlannedRun) -> None:
    """Refuse, as training does, a `pretrained` or `init_from` without weights for the model."""
    if newest_checkpoint(planned.run_folder / CHECKPOINTS) is None:
        planned.results[INITIAL_WEIGHTS] = planned.load_initial_weights()


def check_formats(planned: PlannedRun) -> Iterator[Finding]:
    """Find export formats that models of this task do not have."""
    try:
        declared_formats(planned.knobs, planned.load_recipe())
    except SbkitError as error:
        yield planned.finding("export_formats", problem=str(error).rstrip("."))


def check_export(planned: PlannedRun) -> Iterator[Finding]:
    """Find parts that `sbkit export` would refuse, because they are not plain data.

    They stop a run that declares formats, which it could not write.
    """
    name = planned.load_recipe().name
    try:
        task = load_task(name, user_modules=frozenset([name.rpartition(".")[0]]))
        root = resolve(planned.yaml_file, planned.overrides).tree
        describe_parts(root, planned.build_hparams(), task)
    except SbkitError as error:
        key = next((key for key in planned.document.root if f"`{key}`" in str(error)), "model")
        stops = bool(planned.knobs.get("export_formats"))
        yield planned.finding(key, problem=str(error).rstrip("."), stops=stops)
