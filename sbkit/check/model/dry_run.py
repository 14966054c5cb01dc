"""One small step of training and of evaluation, watched: two short utterances, on the CPU.

Where two parts do not fit, what is given is cut or filled up to what is taken, and the step goes
on, so that one dry run finds all that does not fit.
It leaves gradients, buffers, modes and random numbers as they were.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from speechbrain import Stage
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from sbkit.base.errors import SbkitError
from sbkit.check.model.attributes import Attributes, Holder, Place, Shared, is_torchs
from sbkit.check.model.object_walk import reached
from sbkit.check.model.watch import UseWatch, tensors_in
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.config.document import Keys
from sbkit.data.batches.batch import TextCollate, UtteranceDataset
from sbkit.models.frame_conv import FrameConv
from sbkit.models.normalize import GlobalNorm
from sbkit.text.tokenizer import Tokenizer
from sbkit.train.buffers import unchanged
from sbkit.train.ddp import TRIES
from sbkit.train.step import as_loss, training_loss

SEEN_ROWS = 32  # of which the shortest is taken, and one that is LONGER
LONGER = 1.5  # times as long, where there is one
NAME = "dry_run"


@dataclass(frozen=True)
class ShapeMismatch:
    """A module that is given another size than it takes, and the module that gave it."""

    taker: Keys
    takes: int
    giver: Keys | None
    gives: int


@dataclass(frozen=True)
class StepFailure:
    """A module in which the step broke off, and the error."""

    module: Keys
    error: Exception


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a small step showed.

    ran: ids of the modules that were called; trained: ids of the parameters that got a gradient;
    unmoved: ids of tensors that were used with others without being moved; foreign: parameters that
    were used and are in no module of the Brain, each with the modules that were running, the
    innermost last; on_cpu: likewise the functions that made tensors where no device was named, to
    be used with others;
    made: parameters, buffers and modules that were not there before; unsaved: what the step
    changed, on which an evaluation depends, and which no checkpoint holds.
    """

    mismatches: tuple[ShapeMismatch, ...]
    broken: StepFailure | None
    ran: frozenset[int]
    trained: frozenset[int]
    unmoved: frozenset[int]
    foreign: tuple[tuple[nn.Parameter, tuple[Keys, ...]], ...]
    on_cpu: frozenset[tuple[str, tuple[Keys, ...]]]
    made: tuple[Keys, ...]
    unsaved: tuple[Keys, ...]


def dry_run(planned: PlannedRun) -> DryRun:
    """Return what the small step shows; it runs once.

    Raises MissingPartError where there is no Brain, or the recipe refuses before the step.
    """
    return planned.once(
        NAME,
        lambda: _dry_run(planned),
        must="Two short utterances must make a batch, and `on_stage_start` must let it pass",
        fix="Correct the recipe.",
    )


def _dry_run(planned: PlannedRun) -> DryRun:
    brain, batch = planned.brain, small_batch(planned)
    everything = reached(planned)
    names = {id(each): keys for keys, each in everything if isinstance(each, Holder)}
    still = (each for _, each in everything if isinstance(each, Tensor))
    shared = (each for _, each in everything if isinstance(each, Shared) and not is_torchs(each))
    attributes = Attributes((*planned.model.modules(), *shared))
    chain, unsaved = ShapeTracer(names), list[Place]()
    watch = UseWatch((each for each in still if each not in planned.moved), lambda: chain.inside)
    stance: Any = torch.compiler.set_stance  # compiled parts fail beneath what watches them
    eager = stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with eager, unchanged(brain.modules, brain.device), chain.hooked():
        broken = _step(brain, batch, chain, watch)
        ran = chain.ran
        for number in range(TRIES - 1):
            # A second one, as what the first leaves in a part may break it; the others as a layer
            # may be dropped at random.
            if broken or chain.mismatches or (number and not _untrained(brain)):
                break
            broken = _step(brain, batch, chain, watch)
            ran = ran | chain.ran
        if not (broken or chain.mismatches):
            broken = _evaluation(brain, batch, chain, watch)
        if not (broken or chain.mismatches):
            unsaved = _unsaved(brain, batch, attributes)
        owned = list(brain.modules.parameters())
        trained = {id(each) for each in owned if each.grad is not None}
    return DryRun(
        mismatches=tuple(chain.mismatches),
        broken=broken,
        ran=frozenset(ran | chain.ran),
        trained=frozenset(trained),
        unmoved=frozenset(watch.unmoved),
        foreign=tuple(each for key, each in watch.used.items() if key not in set(map(id, owned))),
        on_cpu=frozenset(each for key, each in watch.made.items() if key in watch.unmoved),
        made=tuple((*names[id(holder)], name) for holder, name in attributes.made()),
        unsaved=tuple((*names[id(holder)], name) for holder, name in unsaved),
    )


def _untrained(brain: Any) -> bool:
    """Return whether a parameter has no gradient that is neither frozen nor off."""
    off = resting(brain)
    return any(
        each.requires_grad and each.grad is None and id(each) not in off
        for each in brain.modules.parameters()
    )


def resting(brain: Any) -> frozenset[int]:
    """Return the ids of the parameters that a Brain declares to be off with the present knobs."""
    return frozenset(id(each) for part in brain.inactive for each in part.parameters())


def _step(brain: Any, batch: Any, chain: "ShapeTracer", watch: UseWatch) -> StepFailure | None:
    brain.train_mode()
    brain.on_stage_start(Stage.TRAIN, 1)
    while True:
        chain.begin()
        try:
            with watch:
                loss = training_loss(brain, batch)
            torch.autograd.backward(loss.sums.sum())
            return None
        except SbkitError:
            raise
        except Exception as error:
            if not chain.give_way():
                return StepFailure(chain.inside[-1] if chain.inside else (), error)


@torch.no_grad()
def _evaluation(
    brain: Any, batch: Any, chain: "ShapeTracer", watch: UseWatch
) -> StepFailure | None:
    """Run an evaluation of the batch, for what only that uses."""
    brain.modules.eval()
    brain.on_stage_start(Stage.VALID, 1)
    try:
        with watch:
            outputs = brain.compute_forward(batch, Stage.VALID)
            brain.compute_objectives(outputs, batch, Stage.VALID)
    except SbkitError:
        raise
    except Exception as error:
        return StepFailure(chain.inside[-1] if chain.inside else (), error)
    return None


def _unsaved(brain: Any, batch: Any, attributes: Attributes) -> list[Place]:
    """Return what the step changed and no checkpoint holds, where an evaluation depends on it."""
    changed = attributes.changed()
    if not changed:
        return []
    stepped = losses_of(brain, batch)
    with attributes.restored():
        try:
            loaded = losses_of(brain, batch)
        except Exception:  # whatever a part raises that lacks what it has learned
            return changed
    return [] if torch.allclose(stepped, loaded, rtol=1e-4) else changed


@torch.no_grad()
def losses_of(brain: Any, batch: Any) -> Tensor:
    """Compute the losses of an evaluation, with the same random numbers each time."""
    torch.manual_seed(0)
    outputs = brain.compute_forward(batch, Stage.VALID)
    return as_loss(brain.compute_objectives(outputs, batch, Stage.VALID)).sums


def small_batch(planned: PlannedRun) -> Any:
    """Collate two short utterances of the training data, by the recipe's loader if there is one.

    One is longer, so that there is padding.
    """
    try:
        loader = planned.loaders.train
        data, collate = loader.dataset, loader.collate_fn
    except MissingPartError:
        if not isinstance(planned.labels, Tokenizer):
            raise
        data, collate = UtteranceDataset(planned.splits.train), TextCollate(planned.labels)
    rows = [data[row] for row in range(min(SEEN_ROWS, len(data)))]
    shortest, *others = sorted(rows, key=lambda row: len(row["audio"]))
    enough = LONGER * len(shortest["audio"])
    longer = [row for row in others if len(row["audio"]) >= enough] or others[-1:]
    return collate([shortest, *longer[:1]])


class ShapeTracer:
    """Follow a step from module to module: who is inside, who gave what size last.

    A part that gives what it is given (SpecAugment) sets no size.

    A module that is given another size gets what it takes. Where the step then breaks off, as a
    residual does, the giver gives way instead and the step begins anew.
    """

    def __init__(self, names: Mapping[int, Keys]) -> None:
        self._names = names
        self._fills: dict[Keys, ShapeMismatch] = {}
        self.mismatches: list[ShapeMismatch] = []
        self.begin()

    def begin(self) -> None:
        """Start over."""
        self.inside: list[Keys] = []
        self.ran: set[int] = set()
        self._given: list[tuple[Keys, set[int]]] = []
        self._last: ShapeMismatch | None = None

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Follow every module that is called."""
        entering = register_module_forward_pre_hook(self._enter)
        with entering, register_module_forward_hook(self._leave):
            yield

    def give_way(self) -> bool:
        """Resize the output of the last mismatch's giver; return whether that is new."""
        last = self._last
        if last is None or last.giver is None or last.giver in self._fills:
            return False
        self._fills[last.giver] = last
        return True

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        name = self._names.get(id(module), (type(module).__name__,))
        self.inside.append(name)
        self.ran.add(id(module))
        x, (axis, takes) = next(tensors_in(inputs), None), taken(module)
        if not takes or x is None or x.ndim < -axis or x.shape[axis] == takes:
            return None
        gives = x.shape[axis]
        self._last = ShapeMismatch(name, takes, self._giver(gives, name), gives)
        self.mismatches += [self._last] * (self._last not in self.mismatches)
        return (resized(x, axis, takes), *inputs[1:])

    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        name = self.inside.pop()
        if name in self._fills:
            output = filled(output, self._fills[name])
        made = [x.shape for x in tensors_in(output) if x.ndim]
        sizes = {size for shape in made for size in (shape[-1], shape[2:].numel())}
        passed = {x.shape[-1] for x in tensors_in(inputs) if x.ndim} if len(name) == 1 else set()
        self._given.append((name, sizes - passed))
        return output

    def _giver(self, size: int, taker: Keys) -> Keys | None:
        """Find who last gave this size, a part of its own before a module of the same part."""
        named = [name for name, sizes in reversed(self._given) if size in sizes]
        others = [name for name in named if name[0] != taker[0]]
        return next(iter((*others, *named)), None)


def taken(module: nn.Module) -> tuple[int, int]:
    """Return the axis of a module's input that has a fixed size, and the size; 0: none."""
    match module:
        case nn.Linear():
            return -1, module.in_features
        case FrameConv():
            return -1, module.in_channels
        case nn.LayerNorm():
            return -1, module.normalized_shape[-1]
        case nn.Conv1d():
            return -2, module.in_channels
        case nn.Conv2d():
            return -3, module.in_channels
        case nn.RNNBase():
            return -1, module.input_size
        case GlobalNorm():
            return -1, len(module.mean)
    return -1, 0


def filled(output: Any, mismatch: ShapeMismatch) -> Any:
    """Cut or fill up the last axis of what a module gives too much or too little of."""
    if isinstance(output, tuple):
        return tuple(filled(each, mismatch) for each in output)
    if isinstance(output, Tensor) and output.ndim and output.shape[-1] == mismatch.gives:
        return resized(output, -1, mismatch.takes)
    return output


def resized(x: Tensor, axis: int, size: int) -> Tensor:
    """Cut or fill up one axis, counted from the last."""
    return nn.functional.pad(x, (*(0, 0) * (-axis - 1), 0, size - x.shape[axis]))
