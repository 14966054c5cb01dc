"""Checks of the values, the machine and the run folder.

A `Knobs` remembers which keys code has read from it. A key has no effect if the dry run did not
read it and no reference names it. But the dry run does not call the hooks at the end of a stage, so
a key also counts as read if the source of the recipe mentions it.
"""

import ast
import sys
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from sbkit.base.errors import SbkitError
from sbkit.base.messages import plural
from sbkit.base.units import samples_to_seconds
from sbkit.check.dry_run import dry_run
from sbkit.check.planned_run import Finding, MissingPartError, PlannedRun
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.folder import newest_checkpoint
from sbkit.checkpoint.run_config import CHECKPOINTS, RESOLVED
from sbkit.checkpoint.weights import check_weights
from sbkit.config.document import (
    Document,
    Keys,
    did_you_mean,
    nearest,
    read_document,
    referenced,
    tag_of,
    walk,
)
from sbkit.config.hparams import MissingKnobError, resolve, save_resolved
from sbkit.config.ranges import RANGES, out_of_range
from sbkit.data.splits import sample_counts
from sbkit.distributed.device import check_precision, choose_device, find_device
from sbkit.export.export import describe_parts
from sbkit.logs.handlers import quiet
from sbkit.tasks.task import load_task
from sbkit.train.optimizers import ALWAYS, FREEZE

COMMAND_KEYS = {"check", "recipe"}  # read by the command itself
LIBRARIES = {*sys.stdlib_module_names, "sbkit", "speechbrain", "torch"}  # read no key of a recipe's
MIN_STEPS = 4  # in an epoch; with fewer, many epochs change little
MAX_EMPTY_SHARE = 0.1  # micro-batches without an utterance
INITIAL_WEIGHTS = "initial weights"  # among a planned run's results: lines about loaded weights


def check_ranges(planned: PlannedRun) -> Iterator[Finding]:
    """Find each knob, and each argument of a class that declares its ranges, out of its range."""
    ranges = dict(RANGES)
    with suppress(MissingPartError):
        ranges |= planned.load_recipe().ranges
    refusals = out_of_range(planned.knobs, ranges)
    problems: dict[Keys, str] = {(name,): problem for name, problem in refusals}
    resolved = resolve(planned.yaml_file, planned.overrides)
    arguments = resolved.arguments_out_of_range()
    problems |= {keys: text for keys, text in arguments.items() if keys[:1] not in problems}
    for keys, problem in problems.items():
        yield planned.finding(*keys, problem=problem.rstrip("."))


def check_unread(planned: PlannedRun) -> Iterator[Finding]:
    """Find the keys that no reference and no code reads.

    A key of a base YAML counts only if the YAML itself or the command line sets it.
    If a step failed, the code after it has not run. Then a key counts only if it looks like one
    whose absence made the step fail.
    """
    with suppress(MissingPartError):
        planned.make_optimizers()
        dry_run(planned)
    names = planned.knobs.names_read | planned.results.get("hparams", planned.knobs).names_read
    if "brain" in planned.results:
        names |= names_in_code(type(planned.make_cpu_brain()))
    missing = {e.name for e in planned.faults.values() if isinstance(e, MissingKnobError)}
    is_complete = not planned.faults and dry_run(planned).error is None
    candidates = names - set(planned.document.root) if is_complete else missing
    declared = {*planned.document.own_keys, *planned.user_overrides}
    for key in unread(planned.document, names):
        if key in declared and (is_complete or nearest(key, missing)):
            yield planned.finding(
                key,
                problem=f"Nothing reads `{key}`, neither a reference nor code: it has no effect",
                fix=f"Correct its name, or take it out.{did_you_mean(key, candidates)}",
            )


def names_in_code(brain: type) -> set[str]:
    """Return all attributes and strings in the source of a Brain, and of the modules in its folder.

    A Brain may have bases in other folders, which count, too, unless they are of `LIBRARIES`.
    Raises MissingPartError for a Brain without a source file, as in a REPL.
    """
    files = {
        name: Path(vars(module).get("__file__") or name).absolute()
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
    }
    modules = {class_.__module__ for class_ in brain.__mro__}
    own_files = [files[name] for name in modules if name.partition(".")[0] not in LIBRARIES]
    if not all(file.is_file() for file in own_files):
        raise MissingPartError("source")
    folders = {file.parent for file in own_files}
    names: set[str] = set()
    for file in {*files.values()}:
        if file.parent in folders and file.suffix == ".py":
            for node in ast.walk(ast.parse(file.read_bytes())):
                if isinstance(node, ast.Attribute):
                    names.add(node.attr)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    names.add(node.value)
    return names


def unread(document: Document, names_read: Set[str]) -> Iterator[str]:
    """Yield the keys that no reference names and no code has read.

    Only keys of the root are tested: a class refuses arguments that it does not take.
    """
    referred = {str(keys[0]) for _, node in walk(document.root) for keys in referenced(node)}
    used = names_read | referred | COMMAND_KEYS
    for key, node in document.root.items():
        is_call = tag_of(node).startswith("!apply:")  # whose effect may be all that is wanted
        if not (key in used or key.startswith("_") or is_call):
            yield key


def check_freezing(planned: PlannedRun) -> Iterator[Finding]:
    """Find parts that stay frozen for more steps than the run has, as with a small corpus."""
    frozen_steps = planned.knobs.get(FREEZE)
    if not isinstance(frozen_steps, Mapping):
        return
    num_steps = len(planned.require_sampler().steps()) * planned.knobs["number_of_epochs"]
    parts = [part for part, end in frozen_steps.items() if end != ALWAYS and end >= num_steps]
    if parts:
        yield planned.finding(
            FREEZE,
            problem=f"The run has about {num_steps:,} steps, but `freeze` keeps "
            f"{', '.join(parts)} frozen for longer, so that they never learn",
            fix=f"Lower their number of steps, or write `{ALWAYS}`.",
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
    steps, batch_seconds = planned.require_sampler().steps(), planned.knobs["batch_seconds"]
    num_processes = planned.count_processes()
    micro_batches_per_step = num_processes * planned.accumulation
    seconds = samples_to_seconds(
        int(sample_counts(planned.prepare_splits().train).sum()), planned.knobs["sample_rate"]
    )
    if len(steps) < MIN_STEPS and seconds < MIN_STEPS * batch_seconds:
        yield planned.finding(
            "batch_seconds",
            problem=f"An epoch has too few steps to learn from: with batches of {batch_seconds:g} "
            f"s, the {seconds:,.0f} s of train make {len(steps)}, fewer than {MIN_STEPS}",
            fix="Lower --batch_seconds.",
            stops=False,
        )
    num_empty = sum(max(micro_batches_per_step - len(step), 0) for step in steps)
    empty_share = num_empty / (micro_batches_per_step * len(steps))
    if empty_share > MAX_EMPTY_SHARE:
        yield planned.finding(
            "batch_seconds",
            problem=f"Batches of {batch_seconds:g} s are too small to share: "
            f"{plural(num_processes, 'process', 'processes')} with "
            f"{plural(planned.accumulation, 'micro-batch', 'micro-batches')} each compute "
            f"{empty_share:.0%} of the micro-batches for nothing, because they are empty",
            fix="Raise --batch_seconds, lower --grad_accumulation_factor, or start fewer "
            "processes.",
            stops=False,
        )


def check_run_folder(planned: PlannedRun) -> None:
    """Refuse, as training does, a run folder that belongs to another run."""
    folder = planned.run_folder / CHECKPOINTS
    if folder.is_dir():
        with quiet():  # training logs which ones are damaged
            newest = next(iter(Checkpointer(folder).find_whole(1)), None)
        if newest is not None:
            planned.prepare_labels()  # writes the label file, which is compared too
            planned.make_run_config().check_continues(planned.run_folder)
            check_weights(planned.build_hparams()["checkpointer"], newest)


def check_initial_weights(planned: PlannedRun) -> None:
    """Refuse, as training does, a `pretrained` or `init_from` without weights for the model."""
    if newest_checkpoint(planned.run_folder / CHECKPOINTS) is None:
        planned.results[INITIAL_WEIGHTS] = planned.load_initial_weights()


def check_export(planned: PlannedRun) -> Iterator[Finding]:
    """Find parts that `sbkit export` would refuse, because they are not plain data."""
    file, task = planned.folder / RESOLVED, planned.load_recipe().task
    save_resolved(file, planned.yaml_file, planned.overrides)
    try:
        load_task(task.name, user_modules=frozenset([task.name.rpartition(".")[0]]))
        describe_parts(read_document(file).root, planned.build_hparams(), task)
    except SbkitError as error:
        key = next((key for key in planned.document.root if f"`{key}`" in str(error)), "model")
        yield planned.finding(key, problem=str(error).rstrip("."), stops=False)
