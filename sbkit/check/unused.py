"""Unused: parts of the model that no step trains."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain, combinations
from typing import Any

from torch import nn

from sbkit.check.finding import Finding
from sbkit.check.reach import reached
from sbkit.check.rehearsal import Rehearsal, rehearse
from sbkit.check.subject import MissingPartError, Subject
from sbkit.machine.document import Keys, dotted

CHECK = "unused"
NO_GRADIENT = ": no gradient, and it stays as it was made"
FROZEN = "it is frozen (requires_grad is False)"


def check_unused(subject: Subject) -> Iterator[Finding]:
    """Name what of the model a small step leaves without a gradient, and what is frozen.

    A part may be off because a knob at its limit says so (`ctc_weight: 1.0` runs no decoder): it
    is left out when it trains in a run whose knobs are off their limits.
    """
    rehearsal = rehearse(subject)
    if rehearsal.broken is not None:
        return
    frozen = {name for name, each in subject.model.named_parameters() if not each.requires_grad}
    dead = {
        name
        for name, each in subject.model.named_parameters()
        if each.requires_grad and id(each) not in rehearsal.trained
    }
    dead -= awake_elsewhere(subject, dead)
    yield from _parts(subject, rehearsal, dead, stops=True)
    yield from _parts(subject, rehearsal, frozen, stops=False)


def _parts(
    subject: Subject, rehearsal: Rehearsal, names: set[str], *, stops: bool
) -> Iterator[Finding]:
    """Make one finding of each part of the YAML and each reason."""
    groups: dict[tuple[str, str], list[Keys]] = {}
    for name, part in topmost(subject.model, names):
        keys = _keys(subject, name)
        inside = part.modules() if isinstance(part, nn.Module) else ()
        ran = not inside or any(id(each) in rehearsal.ran for each in inside)
        reason = ("its output does not reach the loss" if ran else "it is never run") + NO_GRADIENT
        groups.setdefault((str(keys[0]), reason if stops else FROZEN), []).append(keys)
    for (_, reason), found in groups.items():
        yield subject.finding(
            CHECK,
            *found[0],
            declared=f"{', '.join(f'`{dotted(keys)}`' for keys in found)}, to be trained",
            effect=reason,
            mend="Use it in the recipe, or take it out of the YAML."
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


def awake_elsewhere(subject: Subject, dead: set[str]) -> set[str]:
    """Find what trains in the same run with all knobs off their limits, or one, or two."""
    awake: set[str] = set()
    knobs = off_limits(subject.knobs)
    for names in chain([tuple(knobs)], combinations(knobs, 1), combinations(knobs, 2)):
        if dead <= awake:
            break
        other = {**subject.overrides, **{name: knobs[name] for name in names}}
        with suppress(MissingPartError), variant(subject, other) as run:
            trained = rehearse(run).trained
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


def variant(subject: Subject, overrides: Mapping[str, object]) -> Subject:
    """Take the same run with other knobs, on the data that is there."""
    other = Subject(subject.yaml_file, overrides, recipe=subject.recipe, target=subject.target)
    other.parts |= {name: subject.parts[name] for name in ("splits",) if name in subject.parts}
    return other


def _keys(subject: Subject, name: str) -> Keys:
    """Find the path in the YAML of what the model calls ``3.weight``."""
    found: object = subject.model
    for part in name.split("."):
        found = getattr(found, part)
    return next(keys for keys, each in reached(subject) if each is found)
