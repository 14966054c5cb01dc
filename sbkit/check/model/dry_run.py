"""One small step of training and of evaluation, watched: two short utterances, on the CPU.

It leaves gradients, buffers, modes and random numbers as they were.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from speechbrain import Stage
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from sbkit.base.errors import SbkitError
from sbkit.check.model.walk import reached
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.checkpoint.rng import preserve_rng
from sbkit.config.document import Keys
from sbkit.data.batches.batch import TextCollate, UtteranceDataset
from sbkit.text.tokenizer import Tokenizer
from sbkit.train.step import as_loss, training_loss

SEEN_ROWS = 32  # of which the shortest is taken, and one that is LONGER
LONGER = 1.5  # times as long, where there is one
TRIES = 5  # steps in which a parameter may get no gradient before it counts as one that gets none
NAME = "dry_run"


@dataclass(frozen=True)
class StepFailure:
    """A module in which the step broke off, and the error."""

    module: Keys
    error: Exception


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a small step showed.

    ran: ids of the modules that were called; trained: ids of the parameters that got a gradient;
    foreign: parameters that were used and are in no module of the Brain, each with the modules that
    were running, the innermost last; made: parts that were not there before; unsaved: what the step
    changed, on which an evaluation depends, and which no checkpoint holds.
    """

    broken: StepFailure | None
    ran: frozenset[int]
    trained: frozenset[int]
    foreign: tuple[tuple[nn.Parameter, tuple[Keys, ...]], ...]
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
    trace = StepTrace(
        {id(each): keys for keys, each in reached(planned) if isinstance(each, nn.Module)}
    )
    used = UsedParameters(trace.inside)
    stance: Any = torch.compiler.set_stance  # compiled parts fail beneath what watches them
    eager = stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    made: tuple[Keys, ...] = ()
    unsaved: tuple[Keys, ...] = ()
    with eager, unchanged(brain.modules, brain.device), trace.hooked():
        broken = _train(brain, batch, trace, used) or _evaluate(brain, batch, trace, used)
        trained = {id(each) for each in brain.modules.parameters() if each.grad is not None}
        if not broken:
            made, unsaved = _not_in_a_checkpoint(planned, batch)
    owned = {id(each) for each in brain.modules.parameters()}
    return DryRun(
        broken=broken,
        ran=frozenset(trace.ran),
        trained=frozenset(trained),
        foreign=tuple(each for key, each in used.found.items() if key not in owned),
        made=made,
        unsaved=unsaved,
    )


def inactive(brain: Any) -> frozenset[int]:
    """Return the ids of the parameters that a Brain declares to be off with the present knobs."""
    return frozenset(id(each) for part in brain.inactive for each in part.parameters())


def _train(
    brain: Any, batch: Any, trace: "StepTrace", used: "UsedParameters"
) -> StepFailure | None:
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
            with used:
                loss = training_loss(brain, batch)
            torch.autograd.backward(loss.sums.sum())
        except SbkitError:
            raise
        except Exception as error:
            return trace.failure(error)
    return None


@torch.no_grad()
def _evaluate(
    brain: Any, batch: Any, trace: "StepTrace", used: "UsedParameters"
) -> StepFailure | None:
    """Evaluate the batch, for what only an evaluation uses."""
    brain.modules.eval()
    brain.on_stage_start(Stage.VALID, 1)
    try:
        with used:
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
    brain, again = planned.brain, planned.build_again()
    lacking = again.modules.load_state_dict(brain.modules.state_dict(), strict=False)
    found, known = (dict(each.modules.named_modules()) for each in (brain, again))
    places = {id(each): keys for keys, each in reached(planned)}

    def named(part: str, own: str) -> Keys:
        return (*places.get(id(found[part]), ("model",)), own)

    if lacking.unexpected_keys:
        made: dict[Keys, None] = {}
        for part in lacking.unexpected_keys:
            own = ""
            while part not in known:
                part, _, own = part.rpartition(".")
            made[named(part, own)] = None
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
    changed = [
        named(name, own)
        for name, part in found.items()
        for own in _changed_attributes(part, known[name])
    ]
    return (), tuple(changed or [("model",)])


def _changed_attributes(one: nn.Module, other: nn.Module) -> Iterator[str]:
    """Yield the names of the numbers, arrays and tensors in which two modules differ."""
    for name, value in vars(one).items():
        if isinstance(value, Tensor | np.ndarray | int | float):
            mine, theirs = (torch.as_tensor(vars(each).get(name, [])) for each in (one, other))
            if not np.array_equal(mine.detach().numpy(), theirs.detach().numpy()):
                yield name


@contextmanager
def unchanged(modules: nn.Module, device: torch.device) -> Iterator[None]:
    """Put back gradients, buffers, modes and random numbers; gradients begin at none."""
    modes = [(each, each.training) for each in modules.modules()]
    buffers = [(each, each.detach().clone()) for each in modules.buffers()]
    gradients = [(each, each.grad) for each in modules.parameters()]
    modules.zero_grad(set_to_none=True)
    try:
        with preserve_rng(device):
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def evaluating(brain: Any) -> Iterator[None]:
    """Let a Brain evaluate; afterwards it is as it was."""
    with unchanged(brain.modules, brain.device):
        brain.modules.eval()
        brain.on_stage_start(Stage.VALID, 1)
        yield


@torch.no_grad()
def losses_of(brain: Any, batch: Any) -> Tensor:
    """Compute the losses of an evaluation, with the same random numbers each time."""
    torch.manual_seed(0)
    outputs = brain.compute_forward(batch, Stage.VALID)
    return as_loss(brain.compute_objectives(outputs, batch, Stage.VALID)).sums


def small_batch(planned: PlannedRun) -> Any:
    """Collate two short utterances of the training data, by the recipe's loader if it can be made.

    One is longer, so that there is padding.
    """
    try:
        loader = planned.loaders.train
        data, collate = loader.dataset, loader.collate_fn
    except MissingPartError:  # as over SpeechBrain's InputNormalization, which is not trained yet
        if not isinstance(planned.labels, Tokenizer):
            raise
        data, collate = UtteranceDataset(planned.splits.train), TextCollate(planned.labels)
    rows = [data[row] for row in range(min(SEEN_ROWS, len(data)))]
    shortest, *others = sorted(rows, key=lambda row: len(row["audio"]))
    enough = LONGER * len(shortest["audio"])
    longer = [row for row in others if len(row["audio"]) >= enough] or others[-1:]
    return collate([shortest, *longer[:1]])


class UsedParameters(TorchFunctionMode):
    """Note each parameter that a step uses, with the modules that are running."""

    def __init__(self, inside: Sequence[Keys]) -> None:
        super().__init__()
        self._inside = inside
        self.found: dict[int, tuple[nn.Parameter, tuple[Keys, ...]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call, and note the parameters among the arguments."""
        for each in tensors_in((*args, *(kwargs or {}).values())):
            if isinstance(each, nn.Parameter) and id(each) not in self.found:
                self.found[id(each)] = each, tuple(self._inside)
        return func(*args, **(kwargs or {}))


class StepTrace:
    """Follow a step from module to module: which ran, and which are running."""

    def __init__(self, names: Mapping[int, Keys]) -> None:
        self._names = names
        self.inside: list[Keys] = []
        self.ran: set[int] = set()

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
        self.inside.append(self._names.get(id(module), (type(module).__name__,)))
        self.ran.add(id(module))

    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self.inside.pop()


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield a tensor, or those in lists and tuples, also nested ones."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
