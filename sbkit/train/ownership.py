"""Walk over all that a Brain holds, and check who owns the parameters that learn."""

import hashlib
import types
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from logging import Logger

import numpy as np
import speechbrain as sb
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from sbkit.base.errors import ConfigError, DeviceError, translate
from sbkit.base.messages import listed
from sbkit.config.dependencies import NUM_HASH_DIGITS
from sbkit.config.document import Keys, dotted
from sbkit.distributed.ranks import raise_on_all_ranks

MODULE_TABLES = ("_parameters", "_buffers", "_modules")
LEAF_TYPES = (  # the walk does not look inside them
    *(str, bytes, int, float, complex, types.NoneType, types.ModuleType, type),
    *(torch.dtype, torch.device, np.ndarray, np.generic, Logger),
    *(Dataset, DataLoader, Sampler),  # they may hold a million rows, but no parameters
)


def reachable(roots: Mapping[str, object]) -> Iterator[tuple[Keys, object]]:
    """Yield every object within the roots once, with its shortest path.

    It walks breadth first, so that shorter paths come first.
    """
    queue: deque[tuple[Keys, object]] = deque(((name,), root) for name, root in roots.items())
    seen: dict[int, object] = {}  # by id; it keeps the objects alive, so that no id is used again
    while queue:
        path, parent = queue.popleft()
        if id(parent) in seen:
            continue
        seen[id(parent)] = parent
        yield path, parent
        for name, child in _children(parent):
            if not isinstance(child, LEAF_TYPES):
                queue.append(((*path, name), child))


def _children(parent: object) -> Iterator[tuple[str | int, object]]:
    match parent:
        case Tensor():
            return
        case Optimizer():
            yield "param_groups", parent.param_groups
            return
        case nn.Module():
            for table in MODULE_TABLES:
                # A module whose __init__ does not call super().__init__() has no tables.
                yield from vars(parent).get(table, {}).items()
        case Mapping():
            yield from ((str(key), value) for key, value in list(parent.items()))
        case list() | tuple() | set() | frozenset() | deque():
            yield from enumerate([*parent])  # a thread may add to it meanwhile
        case partial():
            yield from {"func": parent.func, "args": parent.args, **parent.keywords}.items()
    for name in getattr(type(parent), "__slots__", ()):
        yield name, getattr(parent, name, None)
    for name, value in list(getattr(parent, "__dict__", {}).items()):
        if not (isinstance(parent, nn.Module) and name in MODULE_TABLES):
            yield name, value


def all_within(brain: sb.Brain) -> Iterator[tuple[Keys, object]]:
    """Yield every object within the hparams, the attributes and the class of a Brain."""
    hparams = getattr(brain, "hparams", None)
    roots = {"hparams": getattr(hparams, "settings", hparams), "brain": brain}
    return reachable({**roots, type(brain).__name__: vars(type(brain))})


def check_owners(brain: sb.Brain) -> bool:
    """Raise ConfigError for gradients that no step uses; return whether there are any."""
    parts = [*all_within(brain)]
    optimizers = [part for _, part in parts if isinstance(part, Optimizer)]
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    owned = set(map(id, chain(*groups))) & set(map(id, brain.modules.parameters()))
    parameters = [(path, part) for path, part in parts if isinstance(part, nn.Parameter)]
    learning = [(path, p) for path, p in parameters if p.requires_grad and p.grad is not None]
    strays = [f"`{dotted(path)}` {tuple(p.shape)}" for path, p in learning if id(p) not in owned]
    if strays:
        raise ConfigError(
            f"What gets a gradient must be in `modules` and in an optimizer, but {listed(strays)} "
            f"{'is' if len(strays) == 1 else 'are'} not. Put the layer into `modules`, and give it "
            "to an optimizer, or call its `requires_grad_(False)`."
        )
    return bool(learning)


class OwnerCheck:
    """Check before the first step of a fit, of every optimizer, that all that learns has owners."""

    def __init__(self, brain: sb.Brain) -> None:
        self._brain = brain
        self._position: tuple[int, int] | None = (0, -1)  # the first step's, None before it

    def begin(self) -> None:
        self._position = None

    def check(self, *_: object) -> None:
        step = self._brain.training_step
        position = step.epoch, self._brain.step
        if self._position in (None, position):
            with raise_on_all_ranks(ConfigError) if step.ddp.is_shared else nullcontext():
                self._position = position if check_owners(self._brain) else None


def device_errors(brain: sb.Brain) -> AbstractContextManager[None]:
    """Raise DeviceError with the parameters elsewhere, if torch refuses tensors of two devices."""

    def describe(error: RuntimeError) -> str | None:
        parts = [*all_within(brain)]
        parameters = [(dotted(path), p) for path, p in parts if isinstance(p, nn.Parameter)]
        device = brain.device_type
        elsewhere = [f"`{name}` on {p.device}" for name, p in parameters if p.device.type != device]
        fix = "Put the layer into `modules`, or, if frozen, into `helpers`."
        for optimizer in [part for _, part in parts if isinstance(part, Optimizer)]:
            for name, state in [(name, optimizer.state.get(p, {})) for name, p in parameters]:
                for tensor in [t for t in state.values() if isinstance(t, Tensor) and t.ndim]:
                    if tensor.device.type != device:
                        kind = type(optimizer).__name__
                        elsewhere.append(f"state of {kind} for `{name}` on {tensor.device}")
                        fix = "Let the optimizer make it by torch.zeros_like(parameter)."
        words = ("same device", "expected device", "weight type")
        if not elsewhere or not any(word in str(error) for word in words):
            return None
        return (
            f"Training and evaluation must use the device {brain.device}, but use "
            f"{listed(elsewhere)}. {fix}"
        )

    return translate(RuntimeError, DeviceError, describe)


def prepare_helpers(brain: sb.Brain) -> dict[str, nn.ModuleList]:
    """Move the declared helpers to the device, in evaluation mode; return their modules by name.

    A helper is an attribute of the Brain or an object of its YAML: a module, or what holds modules,
    such as a list or an open bundle; None if there is none. Raises ConfigError for one that learns.
    """
    objects = dict(getattr(getattr(brain, "hparams", None), "settings", {}).items())
    helpers: dict[str, nn.ModuleList] = {}
    for name in brain.helpers:
        value = getattr(brain, name, objects.get(name, name))
        modules = helpers[name] = nn.ModuleList()
        inner: set[nn.Module] = set()
        for _, part in reachable({name: value}):
            if isinstance(part, nn.Module) and part not in inner:
                modules.append(part)
                inner |= {*part.modules()}
        learns = any(p.requires_grad for p in modules.parameters())
        if learns or (value is not None and not modules):
            fault = "wants a gradient" if learns else "holds no torch.nn.Module"
            raise ConfigError(
                f"`{name}` of `helpers` must be frozen, and made in `__init__` or by the YAML, but "
                f"{fault}. Call its `requires_grad_(False)`, or make it a part of `model`.",
                keys=(name if name in objects else "model",),
            )
        modules.to(brain.device).eval()
    return helpers


def helper_digests(brain: sb.Brain) -> dict[str, str]:
    """Hash the tensors of each helper, without those that a checkpoint holds."""
    recoverables = getattr(brain.checkpointer, "recoverables", {}).values()
    modules = [part for part in recoverables if isinstance(part, nn.Module)]
    saved = {id(t) for module in modules for t in module.state_dict(keep_vars=True).values()}
    digests: dict[str, str] = {}
    for name, helper in prepare_helpers(brain).items():
        digest = hashlib.sha256()
        for key, tensor in helper.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor) and id(tensor) not in saved:
                digest.update(f"{key} {tensor.dtype} {[*tensor.shape]}".encode())
                content = tensor.detach().cpu().contiguous().reshape(-1)
                digest.update(content.view(torch.uint8).numpy().data)
        digests[name] = digest.hexdigest()[:NUM_HASH_DIGITS]
    return digests
