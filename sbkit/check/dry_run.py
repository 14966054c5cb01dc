"""Small steps of training and an evaluation, watched: two short utterances, on the CPU.

They show whether each part fits the next one, and whether a checkpoint holds all that training
changes: a statistic that is neither parameter nor buffer, as that of SpeechBrain's
InputNormalization, is in none.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from speechbrain import Stage
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from sbkit.audio.draws import seeded_draws
from sbkit.base.errors import SbkitError
from sbkit.base.messages import listed
from sbkit.check.finding import Finding
from sbkit.check.ownership import reached
from sbkit.check.planned_run import STAND_IN, PlannedRun
from sbkit.config.document import Keys, dotted
from sbkit.data.sampler import TrainSampler
from sbkit.logs.handlers import quiet
from sbkit.train.nonfinite import ids_of
from sbkit.train.optimizers import ALWAYS, KNOB
from sbkit.train.step import as_loss, training_loss

SEEN_ROWS = 32  # of which the shortest is taken, and one that is LONGER
LONGER = 4.0  # times as long, where there is one: what starts in the padding is far from the end
# Times the loss before, or 1. Of hparams/ctc.yaml the loss falls to 0.7 at its `lr` of 0.0025; at
# ten times as much it grows to 1.2, at 100 times to 6, at 1,000 times to 600.
MAX_GROWTH = 10.0
TRIES = 5  # steps in which a parameter may get no gradient before it counts as one that gets none


@dataclass(frozen=True)
class StepFailure:
    """A module in which the step broke off, and the error."""

    module: Keys
    error: Exception


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What small steps showed.

    ran: ids of the modules that were called; trained: ids of the parameters that got a gradient;
    made: parts that were not there before; unsaved: what the steps changed, on which an evaluation
    depends, and which no checkpoint holds.
    """

    broken: StepFailure | None
    ran: set[int]
    trained: set[int]
    made: tuple[Keys, ...] = ()
    unsaved: tuple[Keys, ...] = ()


def check_shapes(planned: PlannedRun) -> Iterator[Finding]:
    """Find the part in which a step fails, as where it is given another size than it takes."""
    broken = dry_run(planned).broken
    if broken is not None:
        where = broken.module if broken.module and broken.module[0] in planned.document.root else ()
        name = f"`{dotted(where)}`" if where else "the recipe"
        reason = str(broken.error).strip().partition("\n")[0]
        yield planned.finding(
            "shapes",
            *where,
            declared="a step of training on two short utterances must run",
            effect=f"fails in {name} ({type(broken.error).__name__}: {reason})",
            fix="Correct that part, or what it is given.",
        )


def check_state(planned: PlannedRun) -> Iterator[Finding]:
    """Find what `forward` makes or changes that a checkpoint would not hold."""
    seen = dry_run(planned)
    for found, effect, fix in (
        (seen.made, "made by `forward` when it is first called", "Make it in `__init__`."),
        (
            seen.unsaved,
            "changed by training and neither",
            "Register it with `register_buffer`; for features, sbkit.models.layers.GlobalNorm "
            "has its statistics there.",
        ),
    ):
        if found:
            names = listed(f"`{dotted(keys)}`" for keys in found)
            yield planned.finding(
                "state",
                *found[0],
                declared="all that a model learns must be in its parameters and buffers, made "
                "before training",
                effect=f"{names} {'is' if len(found) == 1 else 'are'} {effect}: a model that is "
                "loaded from a checkpoint would compute something else",
                fix=fix,
            )


def check_rate(planned: PlannedRun) -> Iterator[Finding]:
    """Find a learning rate with which the loss of a batch grows many times in two steps on it.

    They are taken at the highest rate of the schedule, from weights as they are initialized.
    """
    done = dry_run(planned)
    if done.broken or done.made or planned.make_cpu_brain().optimizers_dict is None:
        return
    batch, brain = small_batch(planned), planned.build_again(**STAND_IN)
    brain.modules.load_state_dict(planned.make_cpu_brain().modules.state_dict())
    brain.init_optimizers()
    rate, before = brain.set_highest_rate(), _evaluate(brain, batch).sum()
    for _ in range(2):
        brain.training_step.train_mode()
        brain.on_stage_start(Stage.TRAIN, 1)
        loss = training_loss(brain, batch)
        labels = loss.counts.sum()
        torch.autograd.backward(loss.sums.sum() / labels)
        with quiet():  # a gradient that is not finite is logged
            brain.optimizers_step()
    after = _evaluate(brain, batch).sum()
    if not after - before < MAX_GROWTH * before.abs().max(labels):  # also where it is not a number
        yield planned.finding(
            "rate",
            "lr",
            declared="two steps on a batch must not raise its loss many times",
            effect=f"at a learning rate of {rate:g} they raise it from {before:.3g} to {after:.3g}",
            fix="Lower `lr`.",
        )


def dry_run(planned: PlannedRun) -> DryRun:
    """Return what small steps show; they run once.

    Raises MissingPartError where there is no Brain, or the recipe refuses before the step.
    """
    return planned.take("dry_run", lambda: _dry_run(planned))


def _dry_run(planned: PlannedRun) -> DryRun:
    brain, batch = planned.make_cpu_brain(), small_batch(planned)
    trace = StepTrace(
        {id(each): keys for keys, each in reached(planned) if isinstance(each, nn.Module)}
    )
    stance: Any = torch.compiler.set_stance  # compiled parts fail beneath what watches them
    eager = stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    made: tuple[Keys, ...] = ()
    unsaved: tuple[Keys, ...] = ()
    with eager, trace.hooked():
        broken = None
        try:
            _train(brain, batch)
            _evaluate(brain, batch)
        except SbkitError:
            raise
        except Exception as error:  # whatever a part raises
            broken = StepFailure(trace.inside[-1] if trace.inside else (), error)
        trained = {id(each) for each in brain.modules.parameters() if each.grad is not None}
        brain.modules.zero_grad(set_to_none=True)  # as large as the model
        if broken is None:
            made, unsaved = _not_in_a_checkpoint(planned, batch)
    return DryRun(broken=broken, ran=trace.ran, trained=trained, made=made, unsaved=unsaved)


def inactive(brain: Any) -> set[int]:
    """Return the ids of the parameters that a Brain declares to be off with the present knobs."""
    return {id(each) for part in brain.inactive for each in part.parameters()}


def _train(brain: Any, batch: Any) -> None:
    """Take two steps, as the first may break the second, and more where layers were dropped."""
    off = inactive(brain)
    for number in range(TRIES):
        parameters = list(brain.modules.parameters())
        missing = (each for each in parameters if each.requires_grad and each.grad is None)
        if number > 1 and all(id(each) in off for each in missing):
            break
        brain.training_step.train_mode()
        brain.on_stage_start(Stage.TRAIN, 1)
        torch.autograd.backward(training_loss(brain, batch).sums.sum())


def _not_in_a_checkpoint(
    planned: PlannedRun, batch: Any
) -> tuple[tuple[Keys, ...], tuple[Keys, ...]]:
    """Load the model's state into a second one, and return the parts and attributes that it lacks.

    Attributes count where the second one computes other losses.
    """
    brain, again = planned.make_cpu_brain(), planned.build_again(**STAND_IN)
    lacking = again.modules.load_state_dict(brain.modules.state_dict(), strict=False)
    found, known = (dict(each.modules.named_modules()) for each in (brain, again))
    places = {id(each): keys for keys, each in reached(planned)}

    def named(part: str, own: str) -> Keys:
        return (*places.get(id(found[part]), ("model",)), own)

    made: dict[Keys, None] = {}
    for part in lacking.unexpected_keys:
        own = ""
        while part not in known:
            part, _, own = part.rpartition(".")
        made[named(part, own)] = None
    if made:
        return tuple(made), ()
    try:
        is_same = torch.allclose(losses_of(brain, batch), _evaluate(again, batch), rtol=1e-4)
    except Exception:  # whatever a part raises that lacks what it has learned
        is_same = False
    changed = [
        named(name, own)
        for name, part in found.items()
        for own in _changed_attributes(part, known[name])
        if not is_same
    ]
    return (), () if is_same else tuple(changed or [("model",)])


def _changed_attributes(one: nn.Module, other: nn.Module) -> Iterator[str]:
    """Yield the names of the numbers, arrays and tensors in which two modules differ."""
    for name, value in vars(one).items():
        if isinstance(value, Tensor | np.ndarray | int | float):
            mine, theirs = (torch.as_tensor(vars(each).get(name, [])) for each in (one, other))
            if not np.array_equal(mine.detach().numpy(), theirs.detach().numpy()):
                yield name


def _evaluate(brain: Any, batch: Any) -> Tensor:
    """Return the losses of an evaluation, which begins as one of a run does."""
    brain.modules.eval()
    brain.on_stage_start(Stage.VALID, 1)
    return losses_of(brain, batch)


@torch.no_grad()
def losses_of(brain: Any, batch: Any) -> Tensor:
    """Compute the losses of an evaluation, with the same random numbers each time."""
    with seeded_evaluation(batch):
        outputs = brain.compute_forward(batch, Stage.VALID)
        return as_loss(brain.compute_objectives(outputs, batch, Stage.VALID)).sums


def seeded_evaluation(batch: Any) -> AbstractContextManager[None]:
    """Seed torch's generator, and in this context the random numbers of each utterance."""
    torch.manual_seed(0)
    return seeded_draws(ids_of(batch))


def small_batch(planned: PlannedRun) -> Any:
    """Collate two short utterances of the training data; one is longer, to have padding."""
    loader: Any = planned.make_loaders().train
    data = loader.dataset
    rows = [data[row] for row in range(min(SEEN_ROWS, len(data)))]
    shortest, *others = sorted(rows, key=lambda row: len(row["audio"]))
    enough = LONGER * len(shortest["audio"])
    longer = [row for row in others if len(row["audio"]) >= enough] or others[-1:]
    return loader.collate_fn([shortest, *longer[:1]])


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

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.inside.append(self._names.get(id(module), (type(module).__name__,)))
        self.ran.add(id(module))

    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self.inside.pop()


UNUSED_CHECK = "unused"


def check_unused(planned: PlannedRun) -> Iterator[Finding]:
    """Find what of the model small steps leave without a gradient.

    A knob may turn a part off (`ctc_weight: 1.0` runs no decoder): the Brain declares
    it in `inactive`.
    """
    seen = dry_run(planned)
    if seen.broken is not None:
        return
    used = seen.trained | inactive(planned.make_cpu_brain())
    dead = {
        id(p) for p in planned.require_model().parameters() if p.requires_grad and id(p) not in used
    }
    groups: dict[tuple[str | int, bool], list[Keys]] = {}
    for keys, part in _topmost(planned, dead):
        inside = part.modules() if isinstance(part, nn.Module) else ()
        ran = not inside or any(id(each) in seen.ran for each in inside)
        groups.setdefault((keys[0], ran), []).append(keys)
    for (_, ran), found in groups.items():
        yield planned.finding(
            UNUSED_CHECK,
            *found[0],
            declared=f"{', '.join(f'`{dotted(keys)}`' for keys in found)} must be trained",
            effect=f"{'does not reach the loss' if ran else 'is never run'}, so that it gets no "
            "gradient and stays as it was made",
            fix="Use it in the recipe, or take it out of the YAML. What a knob turns off belongs "
            "into `inactive` of the Brain.",
        )


def check_freezing(planned: PlannedRun) -> Iterator[Finding]:
    """Find what `freeze` frees after the last step only: more steps than a small corpus has."""
    declared, sampler = planned.knobs.get(KNOB), planned.make_loaders().train.batch_sampler
    if not (isinstance(declared, Mapping) and isinstance(sampler, TrainSampler)):
        return
    steps = len(sampler.steps()) * planned.knobs["number_of_epochs"]
    late = [path for path, end in declared.items() if end != ALWAYS and end >= steps]
    if late:
        yield planned.finding(
            UNUSED_CHECK,
            KNOB,
            declared=f"`freeze` of {', '.join(late)} must end within the run",
            effect=f"the run has about {steps:,} steps, so that nothing of it ever learns",
            fix=f"Lower its steps, or write `{ALWAYS}`.",
            stops=False,
        )


def _topmost(planned: PlannedRun, dead: set[int]) -> Iterator[tuple[Keys, object]]:
    """Yield the largest modules all of whose parameters are dead, then the parameters left."""
    left = set(dead)
    for keys, each in reached(planned):
        inside = {id(p) for p in each.parameters()} if isinstance(each, nn.Module) else {id(each)}
        if inside and inside <= left:
            left -= inside
            yield keys, each
