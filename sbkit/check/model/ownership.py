"""Ownership: whatever holds parameters is inside the one ModuleList.

What is outside it stays on the CPU, in no optimizer and in no checkpoint (SpeechBrain #2804).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from sbkit.base.text import listed, plural
from sbkit.check.finding import Finding
from sbkit.check.model.walk import reached
from sbkit.check.planned_run import PlannedRun
from sbkit.config.document import Keys, dotted

CHECK = "ownership"


def check_ownership(planned: PlannedRun) -> Iterator[Finding]:
    """Find what the ModuleList does not own."""
    at = dict(reached(planned))
    for holder, parameters in _unowned(planned).items():
        fix = f"Add `!ref <{holder[0]}>` to the list of `model`, or take it out."
        if isinstance(at[holder], list | tuple | dict) or holder[0] not in planned.document.root:
            fix = f"Make `{dotted(holder)}` a torch.nn.ModuleList or a part of `model`."
        yield planned.finding(
            CHECK,
            *(holder if holder[0] in planned.document.root else ("model",)),
            declared="every parameter must be in the one ModuleList `model`",
            effect=f"`{dotted(holder)}` holds {plural(sum(parameters), 'parameter')} outside it, "
            "on the CPU, in no optimizer and in no checkpoint",
            fix=fix,
        )
    for each, count in Counter(map(id, planned.model)).items():
        if count > 1:
            name = next(keys for keys, part in at.items() if id(part) == each)
            yield planned.finding(
                CHECK,
                "model",
                declared="every part must be in the list of `model` once",
                effect=f"`{dotted(name)}` is in it {count} times",
                fix="Take all but one out of the list.",
            )


def _unowned(planned: PlannedRun) -> dict[Keys, list[int]]:
    """Count the parameters outside the list, by the largest module around them."""
    inside = {id(each) for each in (*planned.model.modules(), *planned.model.parameters())}
    owned = {keys for keys, each in reached(planned) if id(each) in inside}
    modules = {keys for keys, each in reached(planned) if isinstance(each, nn.Module)} - owned
    unowned: dict[Keys, list[int]] = {}
    for keys, each in reached(planned):
        if id(each) not in inside and isinstance(each, nn.Parameter):
            above = [keys[:depth] for depth in range(1, len(keys))]
            parts = [each for each in above if each in owned]
            hidden = keys[: len(parts[-1]) + 1] if parts else None  # what a part of `model` holds
            holder = hidden or next((each for each in above if each in modules), keys)
            unowned.setdefault(holder, []).append(each.numel())
    return unowned


def check_optimizers(planned: PlannedRun) -> Iterator[Finding]:
    """Find what would not be trained, and what would not be saved."""
    brain: Any = planned.brain
    try:
        brain.init_optimizers()
    except Exception as error:  # whatever an optimizer or a recipe raises
        yield planned.finding(
            CHECK,
            "opt_class",
            declared="optimizers must take the parameters of the model",
            effect=f"they cannot be made ({type(error).__name__}: {error})",
            fix="Correct `opt_class`, or the recipe's `init_optimizers`.",
        )
        return
    optimizers = list((brain.optimizers_dict or {}).values())
    grouped = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    counts = Counter(map(id, grouped))
    trainable = [each for each in planned.model.parameters() if each.requires_grad]
    owned = set(map(id, planned.model.parameters()))
    for wrong, effect in (
        ([each for each in trainable if not counts[id(each)]], "in none: never trained"),
        ([each for each in trainable if counts[id(each)] > 1], "in more than one: stepped twice"),
        ([each for each in grouped if id(each) not in owned], "in one, but outside the model"),
    ):
        if wrong:
            yield planned.finding(
                CHECK,
                "opt_class",
                declared="every parameter of the model must be in one group of the optimizer",
                effect=f"{_several(planned, wrong)} would be {effect}",
                fix="Give each parameter of `model` to one optimizer, and no others.",
            )
    yield from _unsaved(planned, brain.checkpointer, optimizers)


def _unsaved(planned: PlannedRun, checkpointer: Any, optimizers: list[Any]) -> Iterator[Finding]:
    """Find what of the model, the epochs and the optimizers the checkpointer does not save."""
    recoverables: dict[str, Any] = getattr(checkpointer, "recoverables", {})
    modules = [each for each in recoverables.values() if isinstance(each, nn.Module)]
    saved = {id(each) for part in modules for each in (*part.parameters(), *part.buffers())}
    tensors = (*planned.model.parameters(), *planned.model.buffers())
    missing = [each for each in tensors if id(each) not in saved]
    known = set(map(id, recoverables.values()))
    wanted = (planned.hparams["epoch_counter"], *optimizers)
    lost = [type(each).__name__ for each in wanted if id(each) not in known]
    if missing or lost:
        what = [*([_several(planned, missing)] if missing else []), *dict.fromkeys(lost)]
        yield planned.finding(
            CHECK,
            *("checkpointer", "recoverables"),
            declared="the checkpointer must save the whole model, the epochs and the optimizers",
            effect=f"{listed(what)} would be in no checkpoint: it saves "
            f"{', '.join(f'`{name}`' for name in recoverables) or 'nothing'}",
            fix="Write `model: !ref <model>` and `epochs: !ref <epoch_counter>` there; add an "
            "optimizer in `init_optimizers`: `self.checkpointer.add_recoverable(NAME, OPTIMIZER)`.",
        )


def _several(planned: PlannedRun, tensors: Sequence[Tensor]) -> str:
    paths = (keys for keys, each in reached(planned) if each is tensors[0])
    first = next((f"`{dotted(keys)}`" for keys in paths), "a parameter outside the YAML")
    return listed([first, *tensors[1:]], most=1)
