"""Unused: parts of the model that no step trains."""

from collections.abc import Iterator

from torch import nn

from sbkit.check.finding import Finding
from sbkit.check.model.dry_run import DryRun, dry_run, inactive
from sbkit.check.model.walk import reached
from sbkit.check.planned_run import PlannedRun
from sbkit.config.document import Keys, dotted

CHECK = "unused"
NO_GRADIENT = ", so that it gets no gradient and stays as it was made"
FROZEN = "frozen (requires_grad is False)"


def check_unused(planned: PlannedRun) -> Iterator[Finding]:
    """Find what of the model a small step leaves without a gradient, and what is frozen.

    A knob may turn a part off (`ctc_weight: 1.0` runs no decoder): the Brain declares
    it in `inactive`.
    """
    seen = dry_run(planned)
    if seen.broken is not None:
        return
    used = seen.trained | inactive(planned.brain)
    frozen = {name for name, each in planned.model.named_parameters() if not each.requires_grad}
    dead = {
        name
        for name, each in planned.model.named_parameters()
        if each.requires_grad and id(each) not in used
    }
    yield from _parts(planned, seen, dead, stops=True)
    yield from _parts(planned, seen, frozen, stops=False)


def _parts(planned: PlannedRun, seen: DryRun, names: set[str], *, stops: bool) -> Iterator[Finding]:
    """Make one finding of each part of the YAML and each reason."""
    groups: dict[tuple[str, str], list[Keys]] = {}
    for name, part in topmost(planned.model, names):
        keys = _keys(planned, name)
        inside = part.modules() if isinstance(part, nn.Module) else ()
        ran = not inside or any(id(each) in seen.ran for each in inside)
        reason = ("does not reach the loss" if ran else "is never run") + NO_GRADIENT
        groups.setdefault((str(keys[0]), reason if stops else FROZEN), []).append(keys)
    for (_, reason), found in groups.items():
        yield planned.finding(
            CHECK,
            *found[0],
            declared=f"{', '.join(f'`{dotted(keys)}`' for keys in found)} must be trained",
            effect=reason if stops else f"{'is' if len(found) == 1 else 'are'} {reason}",
            fix="Use it in the recipe, or take it out of the YAML. What a knob turns off belongs "
            "into `inactive` of the Brain."
            if stops
            else "If that is meant, there is nothing to do; else unfreeze it.",
            stops=stops,
        )


def topmost(model: nn.Module, names: set[str]) -> Iterator[tuple[str, object]]:
    """Yield the largest modules all of whose parameters are named, then the parameters left."""
    left = set(names)
    for path, module in model.named_modules():
        own = {f"{path}.{name}".lstrip(".") for name, _ in module.named_parameters()}
        if path and own and own <= left:
            left -= own
            yield path, module
    yield from ((name, model.get_parameter(name)) for name in sorted(left))


def _keys(planned: PlannedRun, name: str) -> Keys:
    """Find the path in the YAML of what the model calls ``3.weight``."""
    found: object = planned.model
    for part in name.split("."):
        found = getattr(found, part)
    return next(keys for keys, each in reached(planned) if each is found)
