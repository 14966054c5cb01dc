"""One small step of training and of evaluation, watched: two short utterances, on the CPU.

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
from sbkit.check.model.walk import differing, reached
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


class ShapeMismatchError(Exception):
    """A module is given another size than it takes; giver: the module that gave it."""

    def __init__(self, taker: Keys, takes: int, giver: Keys | None, gives: int) -> None:
        super().__init__(f"{taker} takes {takes} and is given {gives} by {giver}")
        self.taker, self.takes, self.giver, self.gives = taker, takes, giver, gives


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
    made: parts that were not there before; unsaved: what the step changed, on which an evaluation
    depends, and which no checkpoint holds.
    """

    broken: StepFailure | None
    ran: frozenset[int]
    trained: frozenset[int]
    unmoved: frozenset[int]
    foreign: tuple[tuple[nn.Parameter, tuple[Keys, ...]], ...]
    on_cpu: frozenset[tuple[str, tuple[Keys, ...]]]
    made: tuple[Keys, ...] = ()
    unsaved: tuple[Keys, ...] = ()


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
    names = {id(each): keys for keys, each in everything if isinstance(each, nn.Module)}
    still = (each for _, each in everything if isinstance(each, Tensor))
    trace = StepTrace(names)
    watch = UseWatch((each for each in still if each not in planned.moved), lambda: trace.inside)
    stance: Any = torch.compiler.set_stance  # compiled parts fail beneath what watches them
    eager = stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    made: tuple[Keys, ...] = ()
    unsaved: tuple[Keys, ...] = ()
    with eager, unchanged(brain.modules, brain.device), trace.hooked():
        broken = _train(brain, batch, trace, watch) or _evaluate(brain, batch, trace, watch)
        trained = {id(each) for each in brain.modules.parameters() if each.grad is not None}
        if not broken:
            made, unsaved = _not_in_a_checkpoint(planned, batch)
    owned = {id(each) for each in brain.modules.parameters()}
    return DryRun(
        broken=broken,
        ran=frozenset(trace.ran),
        trained=frozenset(trained),
        unmoved=frozenset(watch.unmoved),
        foreign=tuple(each for key, each in watch.used.items() if key not in owned),
        on_cpu=frozenset(each for key, each in watch.made.items() if key in watch.unmoved),
        made=made,
        unsaved=unsaved,
    )


def inactive(brain: Any) -> frozenset[int]:
    """Return the ids of the parameters that a Brain declares to be off with the present knobs."""
    return frozenset(id(each) for part in brain.inactive for each in part.parameters())


def _train(brain: Any, batch: Any, trace: "StepTrace", watch: UseWatch) -> StepFailure | None:
    """Take two steps, as the first may break the second, and more where layers were dropped."""
    off = inactive(brain)
    for number in range(TRIES):
        parameters = list(brain.modules.parameters())
        missing = (each for each in parameters if each.requires_grad and each.grad is None)
        if number > 1 and all(id(each) in off for each in missing):
            break
        brain.train_mode()
        brain.on_stage_start(Stage.TRAIN, 1)
        try:
            with watch:
                loss = training_loss(brain, batch)
            torch.autograd.backward(loss.sums.sum())
        except SbkitError:
            raise
        except Exception as error:
            return trace.failure(error)
    return None


@torch.no_grad()
def _evaluate(brain: Any, batch: Any, trace: "StepTrace", watch: UseWatch) -> StepFailure | None:
    """Evaluate the batch, for what only an evaluation uses."""
    brain.modules.eval()
    brain.on_stage_start(Stage.VALID, 1)
    try:
        with watch:
            outputs = brain.compute_forward(batch, Stage.VALID)
            brain.compute_objectives(outputs, batch, Stage.VALID)
    except SbkitError:
        raise
    except Exception as error:
        return trace.failure(error)
    return None


def _not_in_a_checkpoint(
    planned: PlannedRun, batch: Any
) -> tuple[tuple[Keys, ...], tuple[Keys, ...]]:
    """Load the model's state into a second one, and return the parts and attributes that it lacks.

    Attributes count where the second one computes other losses.
    """
    brain, (again, hparams) = planned.brain, planned.build_again()
    state = brain.modules.state_dict()
    lacking = again.modules.load_state_dict(state, strict=False).unexpected_keys
    if lacking:
        found, known = (dict(each.modules.named_modules()) for each in (brain, again))
        places = {id(each): keys for keys, each in reached(planned)}
        made: dict[Keys, None] = {}
        for name in lacking:
            part, own = name, ""
            while part not in known:
                part, _, own = part.rpartition(".")
            made[(*places.get(id(found[part]), ("model",)), own)] = None
        return tuple(made), ()
    again.modules.eval()
    again.on_stage_start(Stage.VALID, 1)
    stepped = losses_of(brain, batch)
    try:
        is_same = torch.allclose(stepped, losses_of(again, batch), rtol=1e-4)
    except Exception:  # whatever a part raises that lacks what it has learned
        is_same = False
    if is_same:
        return (), ()
    one, other = (
        {key: each for key, each in all_.items() if isinstance(each, nn.Module)}
        for all_ in (hparams, planned.hparams)
    )
    return (), tuple(differing(one, other))


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


class StepTrace:
    """Follow a step from module to module: which ran, which is inside, and who gave what size.

    Raises ShapeMismatchError in a module that is given another size than it takes.
    """

    def __init__(self, names: Mapping[int, Keys]) -> None:
        self._names = names
        self.inside: list[Keys] = []
        self.ran: set[int] = set()
        self._given: list[tuple[Keys, set[int]]] = []

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Follow every module that is called."""
        entering = register_module_forward_pre_hook(self._enter)
        with entering, register_module_forward_hook(self._leave):
            yield

    def failure(self, error: Exception) -> StepFailure:
        """Return where a step broke off."""
        return StepFailure(self.inside[-1] if self.inside else (), error)

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        name = self._names.get(id(module), (type(module).__name__,))
        self.inside.append(name)
        self.ran.add(id(module))
        x, (axis, takes) = next(tensors_in(inputs), None), taken(module)
        if takes and x is not None and x.ndim >= -axis and x.shape[axis] != takes:
            gives = x.shape[axis]
            raise ShapeMismatchError(name, takes, self._giver(gives, name), gives)

    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        name = self.inside.pop()
        made = [x.shape for x in tensors_in(output) if x.ndim]
        sizes = {size for shape in made for size in (shape[-1], shape[2:].numel())}
        # A part that returns what it is given, as SpecAugment does, sets no size.
        passed = {x.shape[-1] for x in tensors_in(inputs) if x.ndim} if len(name) == 1 else set()
        self._given.append((name, sizes - passed))

    def _giver(self, size: int, taker: Keys) -> Keys | None:
        """Find who last gave this size, another part before a module of the same part."""
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
