"""Checks of the values, the machine and the run folder.

A key has no effect if no reference names it, the dry run did not read it, and it is none of
`LATER_KEYS`. The `keys` of a recipe may have further ones that its code reads later. The dry run
calls neither the hooks of a test nor those of later epochs.
"""

import math
import sys
from collections.abc import Iterator, Set
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from sbkit.base.errors import SbkitError, concerning
from sbkit.base.libraries import BUILT_IN_YAMLS, is_library
from sbkit.base.messages import did_you_mean, listed, plural, short_value
from sbkit.base.ranges import UNCHECKED
from sbkit.base.units import samples_to_seconds
from sbkit.check.checked_run import CheckedRun, Finding, finding_at
from sbkit.checkpoint.ranking import SavedCheckpoints
from sbkit.checkpoint.run_config import CHECKPOINTS, has_checkpoint
from sbkit.checkpoint.weights import part_names_of_model
from sbkit.config.document import (
    Keys,
    children,
    dotted,
    holds_object,
    plain_value,
    read_document,
    references_of,
    tag_of,
)
from sbkit.config.hparams import EPOCH_COUNTER, EPOCH_LIMIT, RunSpec, insert_defaults
from sbkit.config.keys import KEYS, out_of_range, with_defaults
from sbkit.data.mix import sources_of
from sbkit.data.sampler import TrainSampler, step_sizes
from sbkit.data.splits import sample_counts
from sbkit.distributed.device import check_precision, choose_device, device_counter_for, find_device
from sbkit.export.formats import declared_formats
from sbkit.train.optimizers import FREEZE, matches_path, named_parameters
from sbkit.train.schedule import MAX_SCHEDULED_STEPS
from sbkit.train.setup import (
    describe_run,
    load_initial_weights,
    require_own_folder,
)

COMMAND_KEYS = {"check", "recipe", "pretrained_revision"}  # read before a run has its settings
# Keys of every run that are read only after the dry run: by a second epoch, the watch for a hang,
# a store that is away, the load of weights, or the end.
LATER_KEYS = {
    *("early_stopping", "log_every", "stall_seconds", "store_patience", "init_from_differs"),
    "keep_better_start",
}
# In a YAML without these references, the key seems to decide, but the object does.
USUAL_REFERENCES: list[tuple[Keys, str]] = [
    (("opt_class", "lr"), "lr"),
    ((EPOCH_COUNTER, EPOCH_LIMIT), "number_of_epochs"),
]
MIN_STEPS = 4  # in an epoch; with fewer, many epochs change little
MIN_HIGHEST_FACTOR = 0.5  # of the optimizer's rate
MAX_COMPARED_STEPS = 100  # steps of two plans
MAX_EMPTY_SHARE = 0.1  # micro-batches without an utterance


def check_ranges(spec: RunSpec) -> Iterator[Finding]:
    """Find hyperparameters out of range, and arguments out of the range that their class declares.

    An argument is not reported again if the key that holds it is out of range.
    """
    setting_problems = dict(out_of_range(spec.settings, spec.keys))
    for key, problem in setting_problems.items():
        yield finding_at(spec, key, problem=problem.rstrip("."))
    argument_problems = spec.arguments_out_of_range()
    for keys, problem in argument_problems.items():
        if keys[0] not in setting_problems:
            yield finding_at(spec, *keys, problem=problem.rstrip("."))


def check_needs(spec: RunSpec) -> Iterator[Finding]:
    """Note the values of the user that other values turn off, unless they themselves are off."""
    values = dict(spec.settings.items())  # marks no key as read
    for key, declared in spec.keys.items():
        needs = declared.needs
        is_off = needs and not any(need.holds(values.get(name)) for name, need in needs.items())
        has_effect = values.get(key) or declared.default is True
        if is_off and has_effect and _is_given(spec, key):
            conditions = " or ".join(f"`{name}` {need.text}" for name, need in needs.items())
            yield finding_at(
                spec,
                key,
                problem=f"`{key}` needs {conditions}, which this run does not have",
                fix=f"Set that, or leave out `{key}`.",
                stops=False,
            )


def _is_given(spec: RunSpec, key: str) -> bool:
    """Return whether the user has set a key, to another value than a YAML of sbkit."""
    if key in spec.user_overrides:
        documents = [replace(spec.declared, root=deepcopy(spec.declared.root))]
        insert_defaults(documents[0], spec.user_overrides, spec.keys)
    else:
        is_copy = len(spec.document.texts) == 1  # perhaps
        documents = [read_document(file) for file in BUILT_IN_YAMLS if is_copy]
    values_before = [plain_value(document.root.get(key)) for document in documents]
    return key in user_keys(spec) and spec.settings.get(key) not in values_before


def check_unread(run: CheckedRun) -> Iterator[Finding]:
    """Find the keys of the user that no reference and no code reads.

    If another value of the user's replaced the references to a key, the two cannot both hold.
    """
    if run.dry_run.error is not None:
        return  # code that has not run may read any key
    spec, is_own = run.spec, _runs_own_code(run)
    names_read = set[str]().union(
        *(k.names_read for k in (spec.settings, run.copy.spec.settings, run.copy.hparams))
    )
    # What the file refers to counts through these references.
    of_recipe = {n for n, key in spec.keys.items() if n not in KEYS and key.type is not UNCHECKED}
    names_read |= of_recipe - {name for _, name in spec.declared.references}
    candidates = {*names_read, *spec.document.root} - spec.document.own_keys
    for key in unread_keys(spec, names_read):
        replaced = _replaced_references(spec, key)
        values = [f"`{path}` {state} ({spec.place(*path.split('.'))})" for path, state in replaced]
        if replaced:
            problem = f"`{key}` has no effect, because {listed(values, separator=' and ')}"
            fix = f"Leave out `{key}`."
            if "is taken out" not in dict(replaced).values():
                paths = listed(f"`{path}`" for path, _ in replaced)
                fix = f"Leave out `{key}`, or let {paths} refer to it."
            is_fault = {state for _, state in replaced} != {_describe(spec.tree[key])}
        else:
            problem = f"Nothing in this run reads `{key}`, neither a reference nor code"
            fix = f"Correct its name, or take it out.{did_you_mean(key, candidates - {key})}"
            is_fault = key not in KEYS
            if not is_fault:
                fix = "Leave it out: it counts in other runs."
        if is_own:
            fix += " If your code reads it later in the run, declare it in the recipe's `keys`."
        yield run.finding(key, problem=problem, fix=fix, stops=is_fault and not is_own)


def _replaced_references(spec: RunSpec, key: str) -> list[tuple[str, str]]:
    """List the paths whose reference to a key another value replaced, with the present value.

    A part that is taken out is listed once.
    """
    replaced: dict[str, str] = {}
    usual = [reference for reference in USUAL_REFERENCES if reference[0][0] in spec.tree]
    for path in (path for path, name in spec.declared.references + usual if name == key):
        node: Any = spec.tree
        for depth, name in enumerate(path, start=1):
            if not isinstance(node, CommentedMap | CommentedSeq) or name not in dict(
                children(node)
            ):
                replaced[dotted(path[:depth])] = "is taken out" if depth == 1 else "is not declared"
                break
            node = node[name]
        else:
            replaced[dotted(path)] = _describe(node)
    return [*replaced.items()]


def _describe(node: object) -> str:
    value = plain_value(node)
    return "is another object" if holds_object(value) else f"is {short_value(value)}"


def user_keys(spec: RunSpec) -> Set[str]:
    """Return the keys that the command line or the YAML itself sets."""
    document = spec.document  # that of a run folder has the keys of its base as well
    return {*spec.user_overrides} | (set() if document.is_in_run_folder else document.own_keys)


def unread_keys(spec: RunSpec, names_read: Set[str]) -> Iterator[str]:
    """Yield the keys of the user that no reference names and no code has read.

    An override may replace the references to a key of the file: this is no fault of that key, but
    of a key that is overridden as well. Only keys of the root are tested: a class refuses arguments
    that it does not take.
    """
    document, set_by_user = spec.document, user_keys(spec)
    used = names_read | {name for _, name in references_of(document.root)}
    used |= COMMAND_KEYS | LATER_KEYS
    used_in_file = {name for _, name in references_of(spec.declared.root)} - {*spec.user_overrides}
    for key, node in document.root.items():
        # An `!apply:` of somebody's own may have only a side effect.
        is_call = tag_of(node).startswith("!apply:") and not tag_of(node).startswith("!apply:sbkit")
        is_used = key in used | used_in_file or key.startswith("_") or is_call
        if key in set_by_user and not is_used:
            yield key


def _runs_own_code(run: CheckedRun) -> bool:
    """Return whether the user has written a part of the Brain or of the recipe."""
    recipe = run.data.recipe
    owners = (run.brain, recipe, recipe.task)
    kinds = [kind for owner in owners for kind in type(owner).__mro__[:-1]]
    modules = [sys.modules.get(kind.__module__) for kind in kinds]
    return not all(is_library(getattr(module, "__file__", None) or "") for module in modules)


def check_freezing(run: CheckedRun) -> Iterator[Finding]:
    """Find parts that stay frozen at random weights or by mistake, and parts never frozen."""
    steps = run.brain.training_step.freezing.steps
    parts = [part for part, (start, end) in steps.items() if start == 0 and end >= run.num_steps]
    has_weights = any(map(run.spec.settings.__getitem__, ("pretrained", "init_from")))
    is_random = not has_weights and not has_checkpoint(run.spec.folder)
    num_steps = plural(run.num_steps, "step")
    for part in (part for part, (start, _) in steps.items() if start >= run.num_steps):
        problem = f"`freeze` would freeze {part} only after the {num_steps} of the run"
        yield run.note(FREEZE, problem=problem, fix="Freeze it earlier.")
    if parts and (is_random or any(steps[part][1] < math.inf for part in parts)):
        weights = "random weights" if is_random else "their weights"
        yield run.note(
            FREEZE,
            problem=f"`freeze` keeps {', '.join(parts)} at {weights} for the whole run of "
            f"{num_steps}",
            fix="Let these parts learn earlier, or name a run with their weights as `init_from`.",
        )
    yield from _check_adapters(run)


def _check_adapters(run: CheckedRun) -> Iterator[Finding]:
    """Find parts whose adapters never learn; adapters are the few parameters that a part trains."""
    objects = dict(run.copy.hparams.items())  # marks no key as read
    named = named_parameters(run.model, objects)
    freezing = run.brain.training_step.freezing
    for part in part_names_of_model(objects):
        parameters = {name: p for name, p in named.items() if matches_path(name, part)}
        adapters = [name for name, p in parameters.items() if id(p) in run.learnable]
        size = sum(parameters[name].numel() for name in adapters)
        is_adapted = 2 * size < sum(p.numel() for p in parameters.values())
        if adapters and is_adapted and all(map(freezing.is_always_frozen, adapters)):
            yield run.finding(
                FREEZE,
                problem=f"`freeze` also freezes the adapters of `{part}`, such as "
                f"`{adapters[0]}`, so they never learn",
                fix=f"Leave `{part}` out of `freeze`: all but its adapters is frozen anyway. Or "
                "build it without adapters.",
            )


def check_schedule(run: CheckedRun) -> Iterator[Finding]:
    """Find a rate that the run does not reach, as with a warm-up of more steps than it has."""
    if run.highest_factor < MIN_HIGHEST_FACTOR and run.num_steps <= MAX_SCHEDULED_STEPS:
        yield run.note(
            "lr_schedule",
            problem=f"`lr_schedule` reaches only {run.highest_factor:.2g} of `lr` in the "
            f"{plural(run.num_steps, 'step')} of the run",
            fix="Shorten its warm-up, or train for more epochs.",
        )


def check_placement(spec: RunSpec) -> Iterator[Finding]:
    """Find a device that the machine lacks, and precisions that the device lacks."""
    settings, count = with_defaults(spec.settings), device_counter_for(spec.target)
    device = choose_device(settings["device"], count)
    for key in ("device", "precision", "eval_precision"):
        try:
            if key == "device":
                find_device(device, count)
            elif settings[key] in KEYS[key].values:
                check_precision(device.type, settings[key], key=key)
        except SbkitError as error:
            yield finding_at(spec, key, problem=str(error).rstrip("."))


def check_batches(run: CheckedRun) -> Iterator[Finding]:
    """Find batches too large for an epoch, or too small to share among the machine's processes."""
    if run.sampler is None:
        return
    steps = run.sampler.steps()
    planner = run.sampler.sampler
    if not isinstance(planner, TrainSampler):
        again = run.sampler.plan_again()
        if [*islice(steps, MAX_COMPARED_STEPS)] != [*islice(again, MAX_COMPARED_STEPS)]:
            yield run.finding(
                "recipe",
                problem=f"The recipe's sampler plans epoch {run.last_epoch} in two ways",
                fix="Draw only by numpy.random.default_rng((seed, epoch)). What a plan takes from "
                "training must be in `state_dict` and `load_state_dict` of the sampler.",
            )
    batch_seconds = run.spec.settings["batch_seconds"]
    num_processes = run.num_processes
    micro_batches_per_step = num_processes * run.accumulation
    splits = run.data.splits
    of_sources = sum(source.epoch_samples for source in sources_of(splits))
    num_samples = of_sources or int(sample_counts(splits.train).sum())
    seconds = samples_to_seconds(num_samples, run.spec.settings["sample_rate"])
    if len(steps) < MIN_STEPS and seconds < MIN_STEPS * batch_seconds:
        yield run.note(
            "batch_seconds",
            problem=f"An epoch has too few steps to learn from: with batches of {batch_seconds:g} "
            f"s, its {seconds:,.0f} s of train make {len(steps)}",
            fix="Lower `batch_seconds`.",
        )
    num_empty = int(np.maximum(micro_batches_per_step - step_sizes(steps), 0).sum())
    empty_share = num_empty / (micro_batches_per_step * len(steps))
    if empty_share > MAX_EMPTY_SHARE:
        yield run.note(
            "batch_seconds",
            problem=f"Batches of {batch_seconds:g} s are too small to share: of the micro-batches "
            f"of {plural(num_processes, 'process', 'processes')}, {empty_share:.0%} are empty",
            fix="Raise `batch_seconds`, or start fewer processes.",
        )


@concerning("output_folder")
def check_run_folder(run: CheckedRun) -> None:
    """Refuse, as training does, a run folder that belongs to another run."""
    run_folder = run.spec.folder
    folder = run_folder / CHECKPOINTS
    if folder.is_dir():
        newest = next(iter(SavedCheckpoints(folder).find_whole(1)), None)
        if newest is not None:
            require_own_folder(run.spec, describe_run(run.data, run.helpers))
            run.copy.hparams["checkpointer"].check_weights(newest)


def check_initial_weights(run: CheckedRun) -> None:
    """Refuse, as training does, a `pretrained` or `init_from` without weights for the model."""
    if not has_checkpoint(run.spec.folder):
        run.initial_weights = load_initial_weights(run.copy)


@concerning("export_formats")
def check_formats(run: CheckedRun) -> None:
    """Refuse export formats that models of this task do not have."""
    declared_formats(run.spec.settings, run.data.recipe.task)
