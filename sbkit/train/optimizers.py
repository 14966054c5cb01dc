"""Choose for each parameter by its path: its optimizer, its learning rate, and when it is frozen.

A path begins with a key of the YAML and continues as in PyTorch: `CNN`, `Transformer.encoder.0`,
`Transformer.encoder.0.norm.weight`. In `parts`, a word of `DIMENSIONS` chooses among all parameters
or, as in `Transformer.matrices`, among those at a path.

All optimizers step at the same time, each with the gradient of its own loss: the discriminator's
loss does not change the generator, nor the generator's loss the discriminator.

During training, a frozen module computes as in inference: without gradients or dropout, and with
its normalization statistics unchanged. If no earlier module learns, it stores no activations.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.optim import Optimizer

from sbkit.base.errors import ConfigError, concerning, translate
from sbkit.base.libraries import place_of
from sbkit.base.messages import did_you_mean, listed
from sbkit.base.ranges import Either, OneOf, Range
from sbkit.checkpoint.weights import part_names_of_model, to_part_name
from sbkit.train.schedule import DECLARED_RATE, SPEECHBRAIN_SCHEDULERS

Groups = Iterable[nn.Parameter] | Sequence[dict[str, Any]]
OptimizerClass = Callable[[Groups], Optimizer]
NamedParameters = Mapping[str, nn.Parameter]

FREEZE = "freeze"
ALWAYS = "always"
FREEZE_STEP = Either(
    parts=(OneOf(values=(ALWAYS,)), Range(low=0, integer=True)),
    advice="Pass always, or a number of steps.",
)
RATE_FACTOR = Range(low=0, advice="Pass 1 for the rate of the run.")  # below 0, training climbs
DIMENSIONS = {"matrices": (2,), "vectors": (0, 1)}  # of a parameter's shape, by a word in `parts`


# ---- paths


def named_parameters(modules: nn.Module, hparams: Mapping[str, Any]) -> dict[str, nn.Parameter]:
    """Return all parameters by their paths; without `model`, paths begin with a module's name."""
    if not isinstance(hparams.get("model"), nn.ModuleList):
        return dict(modules.named_parameters())
    parts = part_names_of_model(hparams)
    named = hparams["model"].named_parameters(remove_duplicate=False)
    return {to_part_name(name, parts): parameter for name, parameter in named}


def named_modules(hparams: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of the model by their paths."""
    parts = part_names_of_model(hparams)
    named = hparams["model"].named_modules(remove_duplicate=False)  # two parts may share one
    for name, module in named:
        if name:
            yield to_part_name(name, parts), module


def matches_path(name: str, path: str) -> bool:
    """Return whether a parameter is at a path or below it."""
    return fnmatchcase(name, path) or fnmatchcase(name, f"{path}.*")


def parameters_at(path: str, hparams: Mapping[str, Any], key: str) -> list[nn.Parameter]:
    """List the parameters at or below a path; a module may have none."""
    named = named_parameters(hparams["model"], hparams)
    modules = [name for name, _ in named_modules(hparams)]
    if path not in modules and path not in named:
        raise ConfigError(
            f"`{key}`: there is no `{path}`.{did_you_mean(path, [*modules, *named])} The parts of "
            f"the model are {', '.join(part_names_of_model(hparams))}.",
            keys=(key,),
        )
    return [parameter for name, parameter in named.items() if matches_path(name, path)]


def check_paths(
    key: str, declared: Any, *, kind: str, read: Callable[[Any], Any]
) -> Mapping[str, Any]:
    """Read a mapping of paths to values; an empty mapping if nothing is declared.

    kind: describes what is allowed. A SpeechBrain recipe may use the key for something else.
    read: returns None for a value that is not allowed.
    """
    if not declared:
        return {}
    items = declared.items() if isinstance(declared, Mapping) else [(None, None)]
    values: dict[Any, Any] = {path: read(value) for path, value in items}
    if None in values.values() or not all(isinstance(path, str) for path in values):
        raise ConfigError(
            f"`{key}` must be {kind}, but is {declared!r}. Give a key of your own another name.",
            keys=(key,),
        )
    return values


# ---- several optimizers


def make_optimizers(
    declared: Mapping[str, Mapping[str, Any]],
    named: NamedParameters,
    hparams: Mapping[str, Any],
    *,
    remove_vector_weight_decay: bool,
) -> dict[str, Optimizer]:
    """Make the optimizers of the key `optimizers`, each with its own parameters."""
    optimizers = {}
    for name, own in assign_parameters(declared, named).items():
        parameters = [*own.values()]
        groups: Any = parameters
        if remove_vector_weight_decay:
            # As SpeechBrain does for a single optimizer; scalars keep their weight decay.
            vectors = [p for p in parameters if p.ndim == 1]
            decayed = [p for p in parameters if p.ndim != 1]
            groups = [{"params": vectors, "weight_decay": 0.0}, {"params": decayed}]
        make = with_rates(declared[name]["opt_class"], hparams)
        with naming_parameters(f"optimizers.{name}", make, own):
            optimizers[name] = make(groups)
    return optimizers


def naming_parameters(
    key: str, opt_class: OptimizerClass, named: NamedParameters
) -> AbstractContextManager[None]:
    """Name in an error of making an optimizer its key, and the parameters that it refuses."""

    def describe(error: Exception) -> str:
        refused = {path: p for path, p in named.items() if p.requires_grad}
        fix = ""
        for path, parameter in [*refused.items()]:
            with suppress(Exception):  # whatever an optimizer raises
                opt_class([parameter])
                del refused[path]
                fix = " In `optimizers`, give it `parts: [matrices]`, and the rest to another."
        names = listed(refused)
        if not fix:
            names = f"all parameters, such as {next(iter(refused))}" if refused else "their groups"
        fault = f"{type(error).__name__} ({error}{place_of(error)})"
        return f"`{key}` raised {fault} for {names}.{fix}"

    keys = tuple(key.split("."))
    return translate(Exception, lambda text: ConfigError(text, keys=keys), describe)


@concerning("optimizers")
def assign_parameters(
    declared: Mapping[str, Mapping[str, Any]], named: NamedParameters
) -> dict[str, dict[str, nn.Parameter]]:
    """Return the parameters of each optimizer, without those that are frozen for the whole run."""
    owner = _owners(declared, named)
    without_parts = [name for name, settings in declared.items() if not settings.get("parts")]
    trainable = {name: p for name, p in named.items() if p.requires_grad}
    unowned = [name for name, p in trainable.items() if id(p) not in owner]
    if unowned and not without_parts:
        raise ConfigError(
            f"Each parameter must be in one of `optimizers`, but {listed(unowned)} are in none. "
            "Leave out the `parts` of one optimizer, which then takes all other parameters."
        )
    by_optimizer: dict[str, dict[str, nn.Parameter]] = {name: {} for name in declared}
    unique = {id(p): (path, p) for path, p in trainable.items()}  # a shared one only once
    for path, parameter in unique.values():
        by_optimizer[owner.get(id(parameter)) or without_parts[0]][path] = parameter
    for name, parameters in by_optimizer.items():
        if not parameters:
            raise ConfigError(
                f"The optimizer {name} has nothing to step: its parts are frozen, or taken."
            )
    return by_optimizer


def _owners(declared: Mapping[str, Mapping[str, Any]], named: NamedParameters) -> dict[int, str]:
    owner: dict[int, str] = {}
    for name, settings in declared.items():
        for path in settings.get("parts") or []:
            matches = _parameters_of_part(path, named)
            if not matches:
                raise ConfigError(
                    f"`parts` of the optimizer {name}: there is no `{path}`."
                    f"{did_you_mean(path, [*named])}"
                )
            for parameter_name, parameter in matches.items():
                if owner.setdefault(id(parameter), name) != name:
                    raise ConfigError(
                        f"`optimizers`: `{parameter_name}` is in {owner[id(parameter)]} and in "
                        f"{name}, but may have only one optimizer."
                    )
    return owner


def _parameters_of_part(path: str, named: NamedParameters) -> NamedParameters:
    """Return the parameters of an entry of `parts`: a path that may end in a word."""
    matches = {name: p for name, p in named.items() if matches_path(name, path)}
    parent, _, word = path.rpartition(".")
    if word not in DIMENSIONS:
        return matches
    if matches:
        raise ConfigError(f"`parts`: `{path}` is also a part. Write `{path}*` if you mean it.")
    below = {name: p for name, p in named.items() if matches_path(name, parent or "*")}
    return {name: p for name, p in below.items() if p.ndim in DIMENSIONS[word]}


# ---- learning rates by path


def with_rates(opt_class: OptimizerClass, hparams: Mapping[str, object]) -> OptimizerClass:
    """Return ``opt_class``, made to scale learning rates as `lr_scale` and `layer_decay` declare.

    It splits the groups that it is called with, such as the one without weight decay: all
    parameters of a group then have the same scale, the group's entry `lr_scale`. The declared rate
    of a group is its entry `initial_lr`, as for torch's schedulers; `lr` is the present one.
    """
    scale_by_id = _lr_scales_by_parameter(hparams)
    for name, value in hparams.items():
        is_scheduler = type(value).__module__ == SPEECHBRAIN_SCHEDULERS
        if scale_by_id and is_scheduler and name != "lr_schedule":
            raise ConfigError(
                f"`{name}` ({type(value).__name__}) sets one rate for all parts, against "
                "`lr_scale`. Call it `lr_schedule`.",
                keys=(name,),
            )

    def make(groups: Groups) -> Optimizer:
        if not scale_by_id:
            return keep_declared_rates(opt_class(groups))
        optimizer = opt_class(list(split_groups(groups, scale_by_id)))
        for group in optimizer.param_groups:
            scale = group.setdefault("lr_scale", 1.0)  # an optimizer may add groups of its own
            group["lr"] *= scale
        return keep_declared_rates(optimizer)

    return make


def keep_declared_rates(optimizer: Optimizer) -> Optimizer:
    """Keep the declared rate of each group, also if a checkpoint with another one is loaded.

    The present rate, which is loaded, keeps its ratio to the declared one.
    """
    declared = [group.get("lr") for group in optimizer.param_groups]

    def restore(optimizer: Optimizer) -> None:
        # A recipe may have added groups.
        for group, rate in zip(optimizer.param_groups, declared, strict=False):
            if rate is None:  # the optimizer has none
                continue
            before = group.get(DECLARED_RATE, rate)
            if before != rate:
                group["lr"] = group["lr"] * rate / before if before else rate
            group[DECLARED_RATE] = rate

    restore(optimizer)
    optimizer.register_load_state_dict_post_hook(restore)
    return optimizer


def _lr_scales_by_parameter(hparams: Mapping[str, Any]) -> dict[int, float]:
    """Return the factor of the learning rate by the id of each parameter that has one.

    If several paths of `lr_scale` lead to a parameter, the longest decides. `layer_decay` names
    lists of layers: the rate of layer i of n, from 0, is multiplied by its factor n - i times, so
    that the last layer is slower than a new head, and the first one is the slowest.
    Source: Clark et al. 2020 (ELECTRA).
    """
    kind = "a mapping of paths in `model` to numbers of at least 0"

    def read(key: str) -> Mapping[str, float]:
        declared = hparams.get(key)
        return check_paths(key, declared, kind=kind, read=lambda v: v if v in RATE_FACTOR else None)

    declared_scales = read("lr_scale")
    decays = read("layer_decay")
    scale_by_id = {
        id(parameter): float(declared_scales[path])
        for path in sorted(declared_scales, key=lambda path: path.count("."))
        for parameter in parameters_at(path, hparams, "lr_scale")
    }
    for path, factor in decays.items():
        layers = _layers_at(path, hparams)
        for index, layer in enumerate(layers):
            for parameter in parameters_at(layer, hparams, "layer_decay"):
                scale = scale_by_id.get(id(parameter), 1.0)
                scale_by_id[id(parameter)] = scale * factor ** (len(layers) - index)
    return scale_by_id


def _layers_at(path: str, hparams: Mapping[str, Any]) -> list[str]:
    modules = dict(named_modules(hparams))
    layers = [name for name in modules if re.fullmatch(rf"{re.escape(path)}\.\d+", name)]
    if not layers:
        lists = [name for name, module in modules.items() if type(module) is nn.ModuleList]
        raise ConfigError(
            f"`layer_decay`: there is no `{path}.0`. The model's lists: {listed(lists) or 'none'}.",
            keys=("layer_decay",),
        )
    return layers


def split_groups(groups: Groups, scale_by_id: Mapping[int, float]) -> Iterator[dict[str, Any]]:
    """Split each group by the scales of its parameters.

    The unscaled parameters come first, even if there are none: logs show the rate of the first
    group, which must be the rate of the run.
    """
    group_list: list[Any] = list(groups)
    if not group_list or not isinstance(group_list[0], dict):
        group_list = [{"params": group_list}]
    for group in group_list:
        by_scale: dict[float, list[nn.Parameter]] = {1.0: []}
        for parameter in group["params"]:
            by_scale.setdefault(scale_by_id.get(id(parameter), 1.0), []).append(parameter)
        for scale, parameters in by_scale.items():
            yield {**group, "params": parameters, "lr_scale": scale}


# ---- freezing


def frozen_steps(declared: Any) -> tuple[float, float] | None:
    """Read END or [START, END], the steps between which a part is frozen; else return None."""
    is_pair = isinstance(declared, list | tuple) and len(declared) == 2
    start, end = declared if is_pair else (0, declared)
    if start == ALWAYS or start not in FREEZE_STEP or end not in FREEZE_STEP:
        return None
    last = math.inf if end == ALWAYS else end
    return (start, last) if start <= last else None


class Freezing:
    """Freeze parts of the model, depending on the number of steps so far.

    If several paths lead to a parameter, the longest decides. A parameter that does not require a
    gradient at the start never learns. At first, only the parts frozen for the whole run are
    frozen, because the optimizers are made with all the other parameters. While such a parameter
    is frozen it has no gradient, so no optimizer moves or decays it.

    steps: in which each path of `freeze` is frozen.
    """

    def __init__(self, hparams: Mapping[str, Any]) -> None:
        declared = hparams.get(FREEZE)
        if isinstance(declared, list | tuple) and all(isinstance(p, str) for p in declared):
            declared = dict.fromkeys(declared, ALWAYS)
        kind = (
            f"a list of paths in `model`, or a mapping of them to {ALWAYS}, to a number of steps, "
            f"or to the steps [START, END], such as [1000, {ALWAYS}]"
        )
        self.steps = steps = check_paths(FREEZE, declared, kind=kind, read=frozen_steps)
        modules = dict(named_modules(hparams)) if steps else {}
        paths = sorted(steps, key=lambda path: path.count("."))
        self._modules = {path: modules[path] for path in paths if path in modules}
        self._parameters = {  # without those that never learn, such as adapted weights
            path: [p for p in parameters_at(path, hparams, FREEZE) if p.requires_grad]
            for path in paths
        }
        self._frozen_paths: set[str] = set()
        self._set({path for path in paths if steps[path] == (0, math.inf)})

    def advance(self, step: int) -> bool:
        """Freeze and unfreeze parts after ``step`` steps; return whether anything changed."""
        return self._set({path for path, (start, end) in self.steps.items() if start <= step < end})

    def is_always_frozen(self, name: str) -> bool:
        """Return whether the parameter of this path is frozen for a whole run of any length."""
        paths = [path for path in self._parameters if matches_path(name, path)]
        return bool(paths) and self.steps[paths[-1]] == (0, math.inf)

    def _set(self, frozen_paths: set[str]) -> bool:
        if frozen_paths == self._frozen_paths:
            return False
        self._frozen_paths = frozen_paths
        for path, parameters in self._parameters.items():
            for parameter in parameters:
                parameter.requires_grad_(path not in frozen_paths)
        return True

    def set_mode(self) -> None:
        for path, module in self._modules.items():
            module.train(path not in self._frozen_paths)
