"""Unused: parts of the model that no step trains."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain, combinations
from typing import Any

from torch import nn

from sbkit.check.dry_run import DryRun, dry_run
from sbkit.check.finding import Finding
from sbkit.check.object_walk import reached
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.config.document import Keys, dotted

CHECK = "unused"
NO_GRADIENT = ": no gradient, and it stays as it was made"
FROZEN = "it is frozen (requires_grad is False)"


def check_unused(planned: PlannedRun) -> Iterator[Finding]:
    """Name what of the model a small step leaves without a gradient, and what is frozen.

    A part may be off because a knob at its limit says so (`ctc_weight: 1.0` runs no decoder): it
    is left out when it trains in a run whose knobs are off their limits.
    """
    dry_run_result = dry_run(planned)
    if dry_run_result.broken is not None:
        return
    frozen = {name for name, each in planned.model.named_parameters() if not each.requires_grad}
    dead = {
        name
        for name, each in planned.model.named_parameters()
        if each.requires_grad and id(each) not in dry_run_result.trained
    }
    dead -= awake_elsewhere(planned, dead)
    yield from _parts(planned, dry_run_result, dead, stops=True)
    yield from _parts(planned, dry_run_result, frozen, stops=False)


def _parts(
    planned: PlannedRun, dry_run_result: DryRun, names: set[str], *, stops: bool
) -> Iterator[Finding]:
    """Make one finding of each part of the YAML and each reason."""
    groups: dict[tuple[str, str], list[Keys]] = {}
    for name, part in topmost(planned.model, names):
        keys = _keys(planned, name)
        inside = part.modules() if isinstance(part, nn.Module) else ()
        ran = not inside or any(id(each) in dry_run_result.ran for each in inside)
        reason = ("its output does not reach the loss" if ran else "it is never run") + NO_GRADIENT
        groups.setdefault((str(keys[0]), reason if stops else FROZEN), []).append(keys)
    for (_, reason), found in groups.items():
        yield planned.finding(
            CHECK,
            *found[0],
            declared=f"{', '.join(f'`{dotted(keys)}`' for keys in found)}, to be trained",
            effect=reason,
            fix="Use it in the recipe, or take it out of the YAML."
            if stops
            else "Nothing, if that is meant; else let it learn.",
            stops=stops,
        )


def topmost(model: nn.Module, names: set[str]) -> Iterator[tuple[str, object]]:
    """Give the largest modules all of whose parameters are named, then the parameters left."""
    left = set(names)
    for path, module in model.named_modules():
        own = {f"{path}.{name}".lstrip(".") for name, _ in module.named_parameters()}
        if path and own and own <= left:
            left -= own
            yield path, module
    yield from ((name, model.get_parameter(name)) for name in sorted(left))


def awake_elsewhere(planned: PlannedRun, dead: set[str]) -> set[str]:
    """Find what trains in the same run with all knobs off their limits, or one, or two."""
    awake: set[str] = set()
    knobs = off_limits(planned.knobs)
    for names in chain([tuple(knobs)], combinations(knobs, 1), combinations(knobs, 2)):
        if dead <= awake:
            break
        other = {**planned.overrides, **{name: knobs[name] for name in names}}
        with suppress(MissingPartError), variant(planned, other) as run:
            trained = dry_run(run).trained
            awake |= {name for name, each in run.model.named_parameters() if id(each) in trained}
    return awake & dead


def off_limits(knobs: Mapping[str, Any]) -> dict[str, float]:
    """Give the knobs that are at a limit, each with a value off it."""
    values: dict[str, float] = {}
    for name, value in knobs.items():
        if isinstance(value, float) and value in (0.0, 1.0):
            values[name] = 0.5
        elif value == 0 and isinstance(value, int) and not isinstance(value, bool):
            values[name] = 1
    return values


def variant(planned: PlannedRun, overrides: Mapping[str, object]) -> PlannedRun:
    """Take the same run with other knobs, on the data that is there."""
    other = PlannedRun(planned.yaml_file, overrides, recipe=planned.recipe, target=planned.target)
    other.parts |= {name: planned.parts[name] for name in ("splits",) if name in planned.parts}
    return other


def _keys(planned: PlannedRun, name: str) -> Keys:
    """Find the path in the YAML of what the model calls ``3.weight``."""
    found: object = planned.model
    for part in name.split("."):
        found = getattr(found, part)
    return next(keys for keys, each in reached(planned) if each is found)
