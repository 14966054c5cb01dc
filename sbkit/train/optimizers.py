"""Which parameters learn at which rate and by which optimizer, by their paths, and how it steps.

A path begins with a key of the YAML and goes on as in PyTorch: `CNN`, `Transformer.encoder.0`,
`Transformer.encoder.0.norm.weight`.

    optimizers:  # in the place of `opt_class`, where there are several
        generator: {parts: [generator], opt_class: !name:torch.optim.AdamW {lr: 0.0002}}
        discriminator: {parts: [discriminator], opt_class: !name:torch.optim.AdamW {lr: 0.0001}}

`compute_objectives` then returns a loss for each of them, by its name, and each steps its own parts
by the gradient of its own loss, all in the same step: the discriminator's loss does not move the
generator, nor the other way round. A single loss moves all. Of `parts`, `*` stands for anything;
the optimizer without `parts` has the rest.

Parts that do not learn, for the whole run or for its first steps, by the paths of their modules.

    freeze: [CNN, Transformer.encoder.0]
    freeze: {CNN: always, Transformer: 10000}  # steps of the optimizer

What is frozen computes in training as it does for inference: without gradients, dropout and new
statistics. Where nothing before it learns, it keeps no activations.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from sbkit.base.errors import SbkitError
from sbkit.base.messages import listed
from sbkit.base.torch_internals import found_inf_tensors
from sbkit.checkpoint.weights import part_names, to_part_name
from sbkit.config.document import did_you_mean
from sbkit.config.ranges import Range
from sbkit.train.schedule import SCHEDULERS

Groups = Iterable[nn.Parameter] | Sequence[dict[str, Any]]
Named = Mapping[str, nn.Parameter]

NUMBER = Range(advice="Pass 1 for the rate of the run.")


def make_optimizers(
    declared: Mapping[str, Mapping[str, Any]],
    named: Named,
    hparams: Mapping[str, Any],
    *,
    remove_vector_weight_decay: bool,
) -> dict[str, Optimizer]:
    """Return the optimizer of each name in `optimizers`, over its parts.

    Raises SbkitError for a part that is not there, and for a parameter that learns by no optimizer
    or by two.
    """
    made = {}
    for name, parameters in assign_parameters(declared, named).items():
        groups: Any = parameters
        if remove_vector_weight_decay:
            vectors = [each for each in parameters if each.ndim == 1]
            others = [each for each in parameters if each.ndim != 1]
            groups = [{"params": vectors, "weight_decay": 0.0}, {"params": others}]
        made[name] = with_lr_scale(declared[name]["opt_class"], hparams)(groups)
    return made


def assign_parameters(
    declared: Mapping[str, Mapping[str, Any]], named: Named
) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of each optimizer that are not frozen; raises SbkitError."""
    owner: dict[int, str] = {}
    for name, each in declared.items():
        for path in each.get("parts") or ():
            found = {n: p for n, p in named.items() if is_at(n, path)}
            if not found:
                raise SbkitError(
                    f"`parts` of the optimizer {name} must name modules of the model by their "
                    f"path, but there is no `{path}`.{did_you_mean(path, [*named])} Correct it."
                )
            for parameter_name, parameter in found.items():
                if owner.setdefault(id(parameter), name) != name:
                    raise SbkitError(
                        f"A parameter must learn by one optimizer, but `{parameter_name}` is in "
                        f"{owner[id(parameter)]} and in {name}. Take it out of one."
                    )
    rest = [name for name, each in declared.items() if not each.get("parts")]
    trainable = {id(p): (n, p) for n, p in named.items() if p.requires_grad}
    left = [name for key, (name, _) in trainable.items() if key not in owner]
    if len(rest) > 1 or (left and not rest):
        came = f"{listed(rest)} have no `parts`" if rest else f"{listed(left)} are in none"
        raise SbkitError(
            f"`optimizers` must have each parameter in one of them, but {came}. Name parts for "
            "all but one, which has the rest, or freeze what does not learn."
        )
    by_optimizer: dict[str, list[nn.Parameter]] = {name: [] for name in declared}
    for key, (_, parameter) in trainable.items():
        by_optimizer[owner.get(key) or rest[0]].append(parameter)
    return by_optimizer


def named_parameters(modules: nn.Module, hparams: Mapping[str, Any]) -> dict[str, nn.Parameter]:
    """Name all parameters by part and path; without a `model`, by the Brain's modules."""
    if not isinstance(hparams.get("model"), nn.ModuleList):
        return dict(modules.named_parameters())
    parts = part_names(hparams)
    named = hparams["model"].named_parameters(remove_duplicate=False)
    return {to_part_name(name, parts): each for name, each in named}


def is_at(name: str, path: str) -> bool:
    """Return whether a parameter is the one at a path, or below it."""
    return fnmatchcase(name, path) or fnmatchcase(name, f"{path}.*")


def with_lr_scale(
    opt_class: Callable[[Groups], Any], hparams: Mapping[str, Any]
) -> Callable[[Groups], Any]:
    """Return ``opt_class`` with groups whose rate is scaled: each has an `lr_scale`.

    Groups that come in, such as those without weight decay, are split, and keep what they declare.
    A schedule sets a group's rate to its own times ``group.get("lr_scale", 1.0)``.
    Raises SbkitError for a path that leads nowhere, what is no mapping, or a scheduler of
    SpeechBrain's that the recipe steps itself: all of them set one rate for all groups.
    """
    scale_of = _scales(hparams)
    for name, each in hparams.items() if scale_of else ():
        if name != "lr_schedule" and type(each).__module__ == SCHEDULERS:
            raise SbkitError(
                f"`lr_scale` must come with a schedule that keeps the rates of parts apart, but "
                f"`{name}` ({type(each).__name__}) sets one rate for all. Call it `lr_schedule`, "
                "so that sbkit steps it, or take a scheduler of torch's."
            )

    def make(groups: Groups) -> Any:
        optimizer = opt_class(list(split_groups(groups, scale_of)))
        for group in optimizer.param_groups:
            group["lr"] *= group.setdefault("lr_scale", 1.0)
        return optimizer

    return make if scale_of else opt_class


def _scales(hparams: Mapping[str, Any]) -> dict[int, float]:
    """Return the factors of the rate by the ids of their parameters.

    The longest path of `lr_scale` decides where several lead to a parameter. `layer_decay` names
    lists of layers: the rate of layer i of n, from 0, is multiplied by its factor n - i times, so
    that the last layer is slower than a new head, and the first one the slowest.
    Source: Clark et al. 2020 (ELECTRA).
    """
    must = "a mapping of paths in `model` to numbers"
    scales, decays = (read_paths(knob, hparams, must=must) for knob in ("lr_scale", "layer_decay"))
    scale_of = {
        id(parameter): float(scales[path])
        for path in sorted(scales, key=depth)
        for parameter in parameters_at(path, hparams, "lr_scale")
    }
    for path, factor in decays.items():
        names = [name for name, _ in named_modules(hparams) if fnmatchcase(name, f"{path}.[0-9]*")]
        layers = [name for name in names if depth(name) == depth(path) + 1]
        if not layers:
            lists = [name for name, each in named_modules(hparams) if type(each) is nn.ModuleList]
            raise SbkitError(
                f"`layer_decay` must name modules that are lists, but there is no `{path}.0`. The "
                f"model has the lists {listed(lists) or '(none)'}."
            )
        for number, layer in enumerate(layers):
            for parameter in parameters_at(layer, hparams, "layer_decay"):
                scale = scale_of.get(id(parameter), 1.0)
                scale_of[id(parameter)] = scale * factor ** (len(layers) - number)
    return scale_of


def split_groups(groups: Groups, scale_of: Mapping[int, float]) -> Iterator[dict[str, Any]]:
    """Split each group by the scales of its parameters; those without one come first."""
    listed: list[Any] = list(groups)
    if not listed or not isinstance(listed[0], dict):
        listed = [{"params": listed}]
    for group in listed:
        by_scale: dict[float, list[nn.Parameter]] = {1.0: []}
        for parameter in group["params"]:
            by_scale.setdefault(scale_of.get(id(parameter), 1.0), []).append(parameter)
        for scale, parameters in by_scale.items():
            if parameters or scale == 1.0:
                yield {**group, "params": parameters, "lr_scale": scale}


def read_paths(
    knob: str, hparams: Mapping[str, Any], *, must: str, values: Range = NUMBER
) -> Mapping[str, Any]:
    """Return what a knob says of each path, nothing where there is no such knob.

    Raises SbkitError for what a recipe of SpeechBrain's may mean by its name.
    """
    value = hparams.get(knob) or {}
    is_of_paths = isinstance(value, Mapping) and all(
        isinstance(path, str) and each in values for path, each in value.items()
    )
    if value and not (is_of_paths and isinstance(hparams.get("model"), nn.Module)):
        raise SbkitError(
            f"`{knob}` must be {must}, but is {value!r}, and `model` is "
            f"{type(hparams.get('model')).__name__}. Correct it, or give a knob of the recipe's "
            "own another name."
        )
    return value


def depth(path: str) -> int:
    """Return how far below its part a module is."""
    return path.count(".")


def named_modules(hparams: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of the model by their paths."""
    parts, model = part_names(hparams), hparams["model"]
    for name, module in model.named_modules(remove_duplicate=False):  # two parts may share one
        if name:
            yield to_part_name(f"{name}.", parts).rstrip("."), module


def parameters_at(path: str, hparams: Mapping[str, Any], knob: str) -> list[nn.Parameter]:
    """List the parameters at or below a path; a module may have none."""
    named = named_parameters(hparams["model"], hparams)
    modules = [name for name, _ in named_modules(hparams)]
    if path not in modules and path not in named:
        raise SbkitError(
            f"`{knob}` must name modules of the model by their path, but there is no `{path}`."
            f"{did_you_mean(path, [*modules, *named])} Its parts are "
            f"{', '.join(part_names(hparams))}."
        )
    return [each for name, each in named.items() if is_at(name, path)]


def clip(optimizer: Optimizer, max_norm: float) -> Tensor:
    """Clip the groups of an optimizer by one norm over all of them; return the norm before: ().

    Each optimizer by its own, as SpeechBrain does: that of a pretrained encoder, say, is not held
    back by the gradients of a new head. A ``max_norm`` that is not positive clips nothing; PyTorch
    would reverse the gradient.
    """
    limit = max_norm if max_norm > 0 else math.inf
    return nn.utils.clip_grad_norm_(list(with_gradient(optimizer)), limit)


def step_unless(skipped: Tensor, optimizer: Optimizer, scaler: GradScaler) -> None:
    """Step, unless the gradient is not finite; then parameters and optimizer stay as they are.

    skipped (): on the device. A fused optimizer reads it there, by the protocol that GradScaler has
    with it; for another one the host has to wait for it, which costs nothing on the CPU.
    """
    if scaler.is_enabled():
        for found_inf in found_inf_tensors(scaler, optimizer):
            found_inf.copy_(skipped)
        scaler.step(optimizer)
    elif getattr(optimizer, "_step_supports_amp_scaling", False):
        device: Any = optimizer
        device.grad_scale, device.found_inf = None, skipped.to(torch.float32)
        scaler.step(optimizer)
        del device.grad_scale, device.found_inf
    elif not bool(skipped):
        scaler.step(optimizer)


def with_gradient(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Yield the parameters that have a gradient, over all groups."""
    for group in optimizer.param_groups:
        yield from (each for each in group["params"] if each.grad is not None)


KNOB, ALWAYS = "freeze", "always"
STEPS = Range(low=0, whole=True, word=ALWAYS, advice="Pass always, or a number of steps.")


class Freezing:
    """What is frozen in a step, by the steps before it: nothing to save or restore.

    The longest path decides where several lead to a parameter; one that never learns stays so. At
    first only what is frozen for good is: optimizers are made with all that will learn.
    Raises SbkitError for a path that leads nowhere, and for what is neither list nor mapping.
    """

    def __init__(self, hparams: Mapping[str, Any]) -> None:
        listed = hparams.get(KNOB) or ()
        if isinstance(listed, list | tuple):
            hparams = dict(hparams.items()) | {KNOB: dict.fromkeys(listed, ALWAYS)}
        must = f"a list of paths in `model`, or a mapping of them to {ALWAYS} or a number of steps"
        steps = read_paths(KNOB, hparams, must=must, values=STEPS)
        modules = dict(named_modules(hparams)) if steps else {}
        paths = sorted(steps, key=depth)
        self.ends = [math.inf if steps[path] == ALWAYS else steps[path] for path in paths]
        self._modules = [modules.get(path) for path in paths]  # None: of a parameter
        self._parameters = [
            [each for each in parameters_at(path, hparams, KNOB) if each.requires_grad]
            for path in paths
        ]
        self._frozen: list[bool] = []
        self.advance(max((end for end in self.ends if end < math.inf), default=0))

    def advance(self, step: float) -> bool:
        """Freeze and unfreeze for what comes after so many steps; return whether that changes."""
        before, self._frozen = self._frozen, [step < end for end in self.ends]
        if before == self._frozen:
            return False
        for is_frozen, parameters in zip(self._frozen, self._parameters, strict=True):
            for each in parameters:
                each.requires_grad_(not is_frozen)
        return True

    def set_mode(self) -> None:
        """Put what is frozen into evaluation mode, and what learns within it into training mode."""
        for is_frozen, module in zip(self._frozen, self._modules, strict=True):
            if module is not None:
                module.train(not is_frozen)
