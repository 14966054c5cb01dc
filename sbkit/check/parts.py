"""The parts of a run as a tree, for `sbkit config --parts`."""

import math
from collections.abc import Iterable
from itertools import groupby

from torch import nn

from sbkit.base.messages import align_columns
from sbkit.check.checked_run import CheckedRun
from sbkit.checkpoint.weights import part_names_of_model
from sbkit.config.document import dotted

MAX_PART_DEPTH = 2  # as of Transformer.encoder.0
PartRow = tuple[str, ...]


def part_lines(run: CheckedRun) -> Iterable[str]:
    """Return a line for each part of `model`, then for each module outside of it."""
    names, seen = part_names_of_model(run.copy.hparams), {*map(id, run.model.modules())}
    outside: dict[str, nn.Module] = {}
    for path, module in run.reached:  # the shortest paths come first
        if isinstance(module, nn.Module) and seen.isdisjoint(map(id, module.modules())):
            outside[dotted(path)] = module
            seen |= {*map(id, module.modules())}
    in_model = _rows(run, zip(names, run.model, strict=True))
    title = ("part", "class", "parameters", "trainable", "dtype", "device", "optimizer")
    separator = ("outside of `model`", *[""] * len(title[1:]))
    return align_columns([title, *in_model, separator, *_rows(run, outside.items())])


def _rows(
    run: CheckedRun, parts: Iterable[tuple[str, nn.Module]], above: PartRow = ()
) -> list[PartRow]:
    """Return the rows of parts, and of the parts below them; equal layers are one, such as 0-5."""
    described = [(name, _describe(run, (*above, name), part)) for name, part in parts]
    groups = groupby(described, lambda item: (item[0].isdecimal() or item[0], item[1]))
    rows: list[PartRow] = []
    for (_, ((kind, count, *facts), *below)), layers in groups:
        first, *others = [name for name, _ in layers]
        name = f"{first}-{others[-1]}" if others else first
        count = f"{1 + len(others)} x {count}" if others else count
        rows += [("  " * len(above) + name, kind, count, *facts), *below]
    return rows


def _describe(run: CheckedRun, path: PartRow, part: nn.Module) -> list[PartRow]:
    """Return the row of a part, without its name, and the rows below it."""
    parameters, optimizers = [*part.parameters()], run.brain.optimizers_dict or {}
    trainable_ids = {id(parameter) for parameter in parameters if parameter.requires_grad}
    is_whole = len(trainable_ids) == len(parameters)
    trainable = "yes" if is_whole else "partly" if trainable_ids else "no"
    steps = run.brain.training_step.freezing.steps
    declared = [steps.get(dotted(path[:depth])) for depth in range(len(path), 0, -1)]
    if trainable_ids and (frozen := next(filter(None, declared), None)):
        trainable = f"except in steps {frozen[0] + 1:g} to {frozen[1]:g}"
        if math.isinf(frozen[1]):
            trainable = f"until step {frozen[0]:g}"
    ids = {
        key: {id(p) for g in o.param_groups for p in g["params"]} for key, o in optimizers.items()
    }
    placed_parts = (
        *part_names_of_model(run.copy.hparams),
        *run.brain.parts,
        *run.brain.optional_parts,
    )
    device = run.copy.placement.device if path[0] in placed_parts else None
    tensors = [*parameters, *part.buffers()]
    facts = (
        {trainable} if parameters else (),
        {str(tensor.dtype).removeprefix("torch.") for tensor in tensors},
        {str(device or tensor.device) for tensor in tensors},
        {name for name, owned in ids.items() if owned & trainable_ids},
    )
    count = f"{sum(parameter.numel() for parameter in parameters):,}"
    row = (type(part).__name__, count, *(", ".join(sorted(values)) for values in facts))
    below = [(name, child) for name, child in part.named_children() if [*child.state_dict()]]
    return [row, *(_rows(run, below, path) if len(path) <= MAX_PART_DEPTH else [])]
