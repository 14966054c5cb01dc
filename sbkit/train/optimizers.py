"""Optimizers by parameter path: which one steps a part, at which rate, and which parts are frozen.

A path begins with a key of the YAML and continues as in PyTorch: `CNN`, `Transformer.encoder.0`,
`Transformer.encoder.0.norm.weight`.

    optimizers:  # several, instead of `opt_class`
        generator: {parts: [generator], opt_class: !name:torch.optim.AdamW {lr: 0.0002}}
        discriminator: {parts: [discriminator], opt_class: !name:torch.optim.AdamW {lr: 0.0001}}

`compute_objectives` then returns a loss for each of them, by name. Each optimizer steps its own
parts by the gradient of its own loss, all in the same step: the discriminator's loss does not move
the generator, nor the other way round. A single loss moves all. In `parts`, `*` matches anything;
the optimizer without `parts` takes all other parameters.

`freeze` names modules that do not learn, for the whole run or for its first steps:

    freeze: [CNN, Transformer.encoder.0]
    freeze: {CNN: always, Transformer: 10000}  # steps of the optimizer

A frozen module computes in training as in inference: without gradients, dropout and new
statistics. If nothing before it learns, it keeps no activations.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from sbkit.base.errors import ConfigError
from sbkit.base.messages import listed
from sbkit.base.torch_internals import found_inf_tensors
from sbkit.checkpoint.weights import part_names_of_model, to_part_name
from sbkit.config.document import did_you_mean
from sbkit.config.ranges import Range
from sbkit.train.schedule import SPEECHBRAIN_SCHEDULERS

Groups = Iterable[nn.Parameter] | Sequence[dict[str, Any]]
OptimizerClass = Callable[[Groups], Optimizer]
Named = Mapping[str, nn.Parameter]

RATE_FACTOR = Range(advice="Pass 1 for the rate of the run.")


def make_optimizers(
    declared: Mapping[str, Mapping[str, Any]],
    named: Named,
    hparams: Mapping[str, Any],
    *,
    remove_vector_weight_decay: bool,
) -> dict[str, Optimizer]:
    """Make the optimizers of the knob `optimizers`, each over its parts.

    Raises ConfigError for a part that does not exist, and for a parameter in no optimizer or two.
    """
    optimizers = {}
    for name, parameters in assign_parameters(declared, named).items():
        groups: Any = parameters
        if remove_vector_weight_decay:
            vectors = [p for p in parameters if p.ndim == 1]
            matrices = [p for p in parameters if p.ndim != 1]
            groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices}]
        optimizers[name] = with_lr_scale(declared[name]["opt_class"], hparams)(groups)
    return optimizers


def assign_parameters(
    declared: Mapping[str, Mapping[str, Any]], named: Named
) -> dict[str, list[nn.Parameter]]:
    """Return the unfrozen parameters of each optimizer; raises ConfigError as `make_optimizers`."""
    owner: dict[int, str] = {}
    for name, settings in declared.items():
        for path in settings.get("parts") or ():
            matches = {n: p for n, p in named.items() if is_at(n, path)}
            if not matches:
                raise ConfigError(
                    f"`parts` of the optimizer {name} must name modules of the model by their "
                    f"path, but there is no `{path}`.{did_you_mean(path, [*named])} Correct it."
                )
            for parameter_name, parameter in matches.items():
                if owner.setdefault(id(parameter), name) != name:
                    raise ConfigError(
                        f"A parameter must learn by one optimizer, but `{parameter_name}` is in "
                        f"{owner[id(parameter)]} and in {name}. Remove it from one."
                    )
    without_parts = [name for name, settings in declared.items() if not settings.get("parts")]
    trainable = {id(p): (n, p) for n, p in named.items() if p.requires_grad}
    unowned = [name for key, (name, _) in trainable.items() if key not in owner]
    if len(without_parts) > 1 or (unowned and not without_parts):
        without = f"{listed(without_parts)} have no `parts`" if without_parts else ""
        raise ConfigError(
            "Each parameter must be in one of `optimizers`, but "
            f"{without or f'{listed(unowned)} are in none'}. Name parts for all but one, which "
            "takes the other parameters, or freeze what does not learn."
        )
    by_optimizer: dict[str, list[nn.Parameter]] = {name: [] for name in declared}
    for key, (_, parameter) in trainable.items():
        by_optimizer[owner.get(key) or without_parts[0]].append(parameter)
    return by_optimizer


def named_parameters(modules: nn.Module, hparams: Mapping[str, Any]) -> dict[str, nn.Parameter]:
    """Return all parameters by part and path; without a `model`, by the names of the modules."""
    if not isinstance(hparams.get("model"), nn.ModuleList):
        return dict(modules.named_parameters())
    parts = part_names_of_model(hparams)
    named = hparams["model"].named_parameters(remove_duplicate=False)
    return {to_part_name(name, parts): parameter for name, parameter in named}


def is_at(name: str, path: str) -> bool:
    """Return whether a parameter is at a path or below it."""
    return fnmatchcase(name, path) or fnmatchcase(name, f"{path}.*")


def with_lr_scale(opt_class: OptimizerClass, hparams: Mapping[str, object]) -> OptimizerClass:
    """Return ``opt_class`` with a group for each factor of the rate, its `lr_scale`.

    Groups that it is called with, such as the one without weight decay, are split, and keep their
    settings. A schedule multiplies its rate by ``group.get("lr_scale", 1.0)``.
    Raises ConfigError for a path that leads nowhere, a value that is no mapping, or a scheduler of
    SpeechBrain's that the recipe steps itself: all of them set one rate for all groups.
    """
    scale_of = _scales(hparams)
    for name, value in hparams.items() if scale_of else ():
        if name != "lr_schedule" and type(value).__module__ == SPEECHBRAIN_SCHEDULERS:
            raise ConfigError(
                "`lr_scale` needs a schedule that keeps the rates of parts apart, but "
                f"`{name}` ({type(value).__name__}) sets one rate for all. Call it `lr_schedule`, "
                "so that sbkit steps it, or use a scheduler of torch's."
            )

    def make(groups: Groups) -> Optimizer:
        optimizer = opt_class(list(split_groups(groups, scale_of)))
        for group in optimizer.param_groups:
            group["lr"] *= group.setdefault("lr_scale", 1.0)
        return optimizer

    return make if scale_of else opt_class


def _scales(hparams: Mapping[str, Any]) -> dict[int, float]:
    """Return the factors of the rate by the ids of their parameters.

    If several paths of `lr_scale` lead to a parameter, the longest decides. `layer_decay` names
    lists of layers: the rate of layer i of n, from 0, is multiplied by its factor n - i times, so
    that the last layer is slower than a new head, and the first one is the slowest.
    Source: Clark et al. 2020 (ELECTRA).
    """
    kind = "a mapping of paths in `model` to numbers"
    scales, decays = (read_paths(knob, hparams, kind=kind) for knob in ("lr_scale", "layer_decay"))
    modules = dict(named_modules(hparams)) if decays else {}
    scale_of = {
        id(parameter): float(scales[path])
        for path in sorted(scales, key=depth)
        for parameter in parameters_at(path, hparams, "lr_scale")
    }
    for path, factor in decays.items():
        names = [name for name in modules if fnmatchcase(name, f"{path}.[0-9]*")]
        layers = [name for name in names if depth(name) == depth(path) + 1]
        if not layers:
            lists = [name for name, module in modules.items() if type(module) is nn.ModuleList]
            raise ConfigError(
                f"`layer_decay` must name modules that are lists, but there is no `{path}.0`. The "
                f"model has the lists {listed(lists) or '(none)'}."
            )
        for index, layer in enumerate(layers):
            for parameter in parameters_at(layer, hparams, "layer_decay"):
                scale = scale_of.get(id(parameter), 1.0)
                scale_of[id(parameter)] = scale * factor ** (len(layers) - index)
    return scale_of


def split_groups(groups: Groups, scale_of: Mapping[int, float]) -> Iterator[dict[str, Any]]:
    """Split each group by the scales of its parameters; unscaled parameters come first."""
    group_list: list[Any] = list(groups)
    if not group_list or not isinstance(group_list[0], dict):
        group_list = [{"params": group_list}]
    for group in group_list:
        by_scale: dict[float, list[nn.Parameter]] = {1.0: []}
        for parameter in group["params"]:
            by_scale.setdefault(scale_of.get(id(parameter), 1.0), []).append(parameter)
        for scale, parameters in by_scale.items():
            if parameters or scale == 1.0:
                yield {**group, "params": parameters, "lr_scale": scale}


def read_paths(
    knob: str, hparams: Mapping[str, Any], *, kind: str, values: Range = RATE_FACTOR
) -> Mapping[str, Any]:
    """Return the value of each path in a knob; an empty mapping without the knob.

    Raises ConfigError, which says what ``kind`` of value is needed, for any other: a recipe of
    SpeechBrain's may use the name differently.
    """
    value = hparams.get(knob) or {}
    has_paths = isinstance(value, Mapping) and all(
        isinstance(path, str) and number in values for path, number in value.items()
    )
    if value and not (has_paths and isinstance(hparams.get("model"), nn.Module)):
        raise ConfigError(
            f"`{knob}` must be {kind}, but is {value!r}, and `model` is "
            f"{type(hparams.get('model')).__name__}. Correct it, or give the recipe's own knob "
            "another name."
        )
    return value


def depth(path: str) -> int:
    """Return how far below its part a module is."""
    return path.count(".")


def named_modules(hparams: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of the model by their paths."""
    parts, model = part_names_of_model(hparams), hparams["model"]
    for name, module in model.named_modules(remove_duplicate=False):  # two parts may share one
        if name:
            yield to_part_name(f"{name}.", parts).rstrip("."), module


def parameters_at(path: str, hparams: Mapping[str, Any], knob: str) -> list[nn.Parameter]:
    """List the parameters at or below a path; a module may have none."""
    named = named_parameters(hparams["model"], hparams)
    modules = [name for name, _ in named_modules(hparams)]
    if path not in modules and path not in named:
        raise ConfigError(
            f"`{knob}` must name modules of the model by their path, but there is no `{path}`."
            f"{did_you_mean(path, [*modules, *named])} Its parts are "
            f"{', '.join(part_names_of_model(hparams))}."
        )
    return [parameter for name, parameter in named.items() if is_at(name, path)]


def clip(optimizer: Optimizer, max_norm: float) -> Tensor:
    """Clip all groups of an optimizer by one norm; return the norm before clipping: ().

    Each optimizer is clipped on its own, as in SpeechBrain: the optimizer of a pretrained encoder,
    for example, is not held back by the gradients of a new head. A ``max_norm`` that is not
    positive clips nothing; PyTorch would reverse the gradient.
    """
    limit = max_norm if max_norm > 0 else math.inf
    return nn.utils.clip_grad_norm_(list(parameters_with_gradient(optimizer)), limit)


def step_unless(skipped: Tensor, optimizer: Optimizer, scaler: GradScaler) -> None:
    """Step, unless the gradient is not finite; then parameters and optimizer stay as they are.

    skipped (): on the device. A fused optimizer reads it there, as it does for a GradScaler; for
    another optimizer the host has to wait for it, which costs nothing on the CPU.
    """
    if scaler.is_enabled():
        for found_inf in found_inf_tensors(scaler, optimizer):
            found_inf.copy_(skipped)
        scaler.step(optimizer)
    elif getattr(optimizer, "_step_supports_amp_scaling", False):
        fused: Any = optimizer
        fused.grad_scale, fused.found_inf = None, skipped.to(torch.float32)
        scaler.step(optimizer)
        del fused.grad_scale, fused.found_inf
    elif not bool(skipped):
        scaler.step(optimizer)


def parameters_with_gradient(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Yield the parameters of all groups that have a gradient."""
    for group in optimizer.param_groups:
        yield from (p for p in group["params"] if p.grad is not None)


FREEZE, ALWAYS = "freeze", "always"
STEPS = Range(low=0, integer=True, word=ALWAYS, advice="Pass always, or a number of steps.")


class Freezing:
    """Freeze parts of the model by the number of steps so far, so that there is no state to save.

    If several paths lead to a parameter, the longest decides; a parameter that never learns stays
    frozen. At first only parts that never learn are frozen: optimizers are made with the others.
    Raises ConfigError for a path that leads nowhere, and for neither a list nor a mapping.
    """

    def __init__(self, hparams: Mapping[str, Any]) -> None:
        declared = hparams.get(FREEZE) or ()
        if isinstance(declared, list | tuple):
            hparams = dict(hparams.items()) | {FREEZE: dict.fromkeys(declared, ALWAYS)}
        kind = f"a list of paths in `model`, or a mapping of them to {ALWAYS} or a number of steps"
        steps = read_paths(FREEZE, hparams, kind=kind, values=STEPS)
        modules = dict(named_modules(hparams)) if steps else {}
        paths = sorted(steps, key=depth)
        self._ends = [math.inf if steps[path] == ALWAYS else steps[path] for path in paths]
        self._modules = [modules.get(path) for path in paths]  # None for a parameter
        self._parameters = [
            [p for p in parameters_at(path, hparams, FREEZE) if p.requires_grad] for path in paths
        ]
        self._frozen: list[bool] = []
        self.advance(max((end for end in self._ends if end < math.inf), default=0))

    def advance(self, step: float) -> bool:
        """Freeze and unfreeze for what follows step ``step``; return whether anything changed."""
        before, self._frozen = self._frozen, [step < end for end in self._ends]
        if before == self._frozen:
            return False
        for is_frozen, parameters in zip(self._frozen, self._parameters, strict=True):
            for parameter in parameters:
                parameter.requires_grad_(not is_frozen)
        return True

    def set_mode(self) -> None:
        """Put frozen modules into evaluation mode, and their learning parts into training mode."""
        for is_frozen, module in zip(self._frozen, self._modules, strict=True):
            if module is not None:
                module.train(not is_frozen)
