"""Checks of the values, the machine and the run folder.

Code reads keys from a `Knobs`, which remembers them: a key that the dry run has not read, and that
no reference reaches, does nothing. The dry run calls no hook at the end of a stage, so names in the
code of the recipe count, too: in the modules of its Brain and the modules beside them.
"""

import sys
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from inspect import isclass, isfunction
from pathlib import Path
from types import CodeType, ModuleType

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
from sbkit.export.export import plain_parts
from sbkit.logs.handlers import quiet
from sbkit.tasks.task import load_task
from sbkit.train.optimizers import ALWAYS, FREEZE

READ_BEFORE = {"check", "recipe"}  # by the command, before it checks and trains
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
    declared = {*planned.document.own_keys, *planned.given}
    for key in unread(planned.document, names):
        if key in declared and (is_complete or nearest(key, missing)):
            yield planned.finding(
                key,
                problem=f"Nothing reads `{key}`, neither a reference nor code: it has no effect",
                fix=f"Correct its name, or take it out.{did_you_mean(key, candidates)}",
            )


def names_in_code(brain: type) -> set[str]:
    """Return the names and texts in the code of a Brain's modules and of modules beside them.

    sbkit's own and SpeechBrain's do not count.
    """
    modules = {name: vars(m) for name, m in sys.modules.items() if isinstance(m, ModuleType)}
    folder_of = {name: Path(str(m.get("__file__") or "/")).parent for name, m in modules.items()}
    names = {class_.__module__ for class_ in brain.__mro__ if class_ is not object}
    folders = {folder_of[n] for n in names if not n.startswith(("sbkit.", "speechbrain."))}
    beside = {name for name, folder in folder_of.items() if folder in folders}
    values = [value for name in beside for value in modules[name].values()]
    values += [member for v in values if isclass(v) for member in vars(v).values()]
    codes = [v.__code__ for v in values if isfunction(v) and v.__module__ in beside]
    for code in codes:  # grows by nested functions
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {n for c in codes for n in (*c.co_names, *c.co_consts) if isinstance(n, str)}


def unread(document: Document, names_read: Set[str]) -> Iterator[str]:
    """Yield the keys that no reference reaches and no code has read.

    An object reads all its arguments: it would have refused the others.
    """
    referred = {str(keys[0]) for _, node in walk(document.root) for keys in referenced(node)}
    for key, node in document.root.items():
        was_called = tag_of(node).startswith("!apply:")  # and may have had its effect
        if not (key in names_read | referred | READ_BEFORE or key.startswith("_") or was_called):
            yield key


def check_freezing(planned: PlannedRun) -> Iterator[Finding]:
    """Find parts whose freezing ends after the last step: a small corpus may have fewer steps."""
    declared = planned.knobs.get(FREEZE)
    if not isinstance(declared, Mapping):
        return
    num_steps = len(planned.require_sampler().steps()) * planned.knobs["number_of_epochs"]
    late = [path for path, end in declared.items() if end != ALWAYS and end >= num_steps]
    if late:
        yield planned.finding(
            FREEZE,
            problem=f"`freeze` of {', '.join(late)} does not end within the run, which has about "
            f"{num_steps:,} steps: they never learn",
            fix=f"Lower their number of steps, or write `{ALWAYS}`.",
            stops=False,
        )


def check_placement(planned: PlannedRun) -> Iterator[Finding]:
    """Find a device that is not there, and precisions that it does not have."""
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
    num_parts = num_processes * planned.accumulation
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
    empty_share = sum(max(num_parts - len(s), 0) for s in steps) / (num_parts * len(steps))
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
    """Refuse, as training does, `pretrained` and `init_from` without the weights of the model."""
    if newest_checkpoint(planned.run_folder / CHECKPOINTS) is None:
        planned.results[INITIAL_WEIGHTS] = planned.load_initial_weights()


def check_export(planned: PlannedRun) -> Iterator[Finding]:
    """Find parts that `sbkit export` would refuse, because they are not plain data."""
    file, task = planned.folder / RESOLVED, planned.load_recipe().task
    save_resolved(file, planned.yaml_file, planned.overrides)
    try:
        load_task(task.name, user_modules=frozenset([task.name.rpartition(".")[0]]))
        plain_parts(read_document(file).root, planned.build_hparams(), task)
    except SbkitError as error:
        key = next((key for key in planned.document.root if f"`{key}`" in str(error)), "model")
        yield planned.finding(key, problem=str(error).rstrip("."), stops=False)
