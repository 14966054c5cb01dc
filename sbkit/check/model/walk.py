"""Everything that can be reached from some objects, each once, by its shortest path.

The walk follows modules, containers, partials and attributes. What it does not reach, such as what
a closure learns, is found by the dry run.
"""

import types
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from logging import Logger

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.config.document import Keys

NAME = "reached"
MODULE_TABLES = ("_parameters", "_buffers", "_modules")
LEAVES = (
    *(str, bytes, int, float, complex, types.NoneType, types.ModuleType, type),
    *(torch.dtype, torch.device, np.ndarray, np.generic, Logger),
    *(Dataset, DataLoader, Sampler),  # data: a million rows, and none of them is learned
)


def reached(planned: PlannedRun) -> list[tuple[Keys, object]]:
    """Return all that is reached from a run's hparams and, if there is one, from its Brain."""
    roots = dict(planned.hparams)
    with suppress(MissingPartError):
        roots["brain"] = planned.brain
    return planned.once(NAME, lambda: list(reach(roots)))


def reach(roots: Mapping[str, object]) -> Iterator[tuple[Keys, object]]:
    """Yield breadth first, so that the path of an object is its shortest."""
    waiting: deque[tuple[Keys, object]] = deque(((name,), root) for name, root in roots.items())
    seen: dict[int, object] = {}  # keeps what it has seen, or an id would come twice
    while waiting:
        keys, holder = waiting.popleft()
        if id(holder) in seen:
            continue
        seen[id(holder)] = holder
        yield keys, holder
        for name, child in children(holder):
            if not isinstance(child, LEAVES):
                waiting.append(((*keys, name), child))


def children(holder: object) -> Iterator[tuple[str | int, object]]:
    """Yield what an object holds, with its name there."""
    match holder:
        case Tensor():
            return
        case nn.Module():
            yield from (item for table in MODULE_TABLES for item in vars(holder)[table].items())
        case Mapping():
            yield from ((str(key), value) for key, value in list(holder.items()))
        case list() | tuple() | set() | frozenset() | deque():
            yield from enumerate(holder)
        case partial():
            yield from {"func": holder.func, "args": holder.args, **holder.keywords}.items()
    for name, value in list(getattr(holder, "__dict__", {}).items()):
        if not (isinstance(holder, nn.Module) and name in MODULE_TABLES):
            yield name, value
