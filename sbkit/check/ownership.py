"""Ownership: whatever holds parameters, buffers or constants is inside the one ModuleList.

What is outside it stays on the CPU, in no optimizer and in no checkpoint (SpeechBrain #2804).
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from sbkit.check.dry_run import dry_run
from sbkit.check.finding import Finding
from sbkit.check.object_walk import reached
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.config.document import Keys, dotted

CHECK = "ownership"


def check_ownership(planned: PlannedRun) -> Iterator[Finding]:
    """Find what the ModuleList does not own, and what it owns twice."""
    for holder, tensors in _strays(planned).items():
        learned = any(isinstance(each, nn.Parameter) for _, each in tensors)
        yield (_stray if learned else _stranded)(planned, holder, tensors)
    yield from _twice(planned)


def owned(hparams: dict[str, Any]) -> Iterator[nn.Module]:
    """Give the ModuleList, under whatever key, and what SpeechBrain's Brain is given beside it."""
    for name, value in hparams.items():
        if isinstance(value, nn.ModuleList):
            yield value
        elif name == "modules" and isinstance(value, dict):
            yield from (each for each in value.values() if isinstance(each, nn.Module))


def _strays(planned: PlannedRun) -> dict[Keys, list[tuple[Keys, Tensor]]]:
    """Collect the tensors outside the list, by the largest module around them.

    Parameters always. Buffers and plain tensors are constants to a recipe that moves them itself,
    when it is made or when it uses them: they are strays when it does not.
    """
    owners = list(owned(planned.hparams))
    inside = {id(part) for owner in owners for part in owner.modules()}
    inside |= {id(each) for owner in owners for each in (*owner.parameters(), *owner.buffers())}
    outside = [(keys, each) for keys, each in reached(planned) if id(each) not in inside]
    modules = {keys for keys, each in outside if isinstance(each, nn.Module)}
    strays: dict[Keys, list[tuple[Keys, Tensor]]] = {}
    for keys, each in outside:
        if isinstance(each, Tensor) and _is_stray(planned, each):
            above = (keys[:depth] for depth in range(1, len(keys)))
            holder = next((each for each in above if each in modules), keys)
            strays.setdefault(holder, []).append((keys, each))
    return strays


def _is_stray(planned: PlannedRun, tensor: Tensor) -> bool:
    if isinstance(tensor, nn.Parameter):
        return True
    if tensor in planned.moved:
        return False
    try:
        return id(tensor) in dry_run(planned).stranded
    except MissingPartError:  # where no step can be taken, nothing shows what a constant is for
        return False


def _stray(planned: PlannedRun, holder: Keys, tensors: list[tuple[Keys, Tensor]]) -> Finding:
    return planned.finding(
        CHECK,
        *_place(planned, holder),
        declared=_holding(holder, tensors, "parameters"),
        effect="it is not in the one ModuleList: it stays on the CPU, in no optimizer and in no "
        "checkpoint",
        fix=f"Add `!ref <{holder[0]}>` to the list of `model`."
        if holder[0] in planned.document.root
        else "Declare it in the YAML, and add it to the list of `model`.",
    )


def _stranded(planned: PlannedRun, holder: Keys, tensors: list[tuple[Keys, Tensor]]) -> Finding:
    return planned.finding(
        CHECK,
        *_place(planned, holder),
        declared=_holding(holder, tensors, "constants"),
        effect="nothing moves it: a step uses it on the CPU beside tensors of the device",
        fix=f"Make it a buffer of a module in `model`, or move it where `{dotted(holder)}` is "
        "used.",
    )


def _place(planned: PlannedRun, holder: Keys) -> Keys:
    return holder if holder[0] in planned.document.root else ("model",)


def _holding(holder: Keys, tensors: list[tuple[Keys, Tensor]], what: str) -> str:
    count = sum(each.numel() for _, each in tensors)
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return f"`{dotted(holder)}` holds {count} {what} (`{dotted(tensors[0][0])}`{more})"


def _twice(planned: PlannedRun) -> Iterator[Finding]:
    """Name a part that is in the list more than once."""
    places: dict[int, list[int]] = {}
    for index, part in enumerate(planned.model):
        places.setdefault(id(part), []).append(index)
    for part, indices in places.items():
        if len(indices) > 1:
            name = next(keys for keys, each in reached(planned) if id(each) == part)
            yield planned.finding(
                CHECK,
                *("model", 0, indices[-1]),
                declared=f"{', '.join(f'model.{index}' for index in indices)}: as many parts",
                effect=f"they are one, `{dotted(name)}`, saved {len(indices)} times",
                fix="Take all but one out of the list.",
            )
