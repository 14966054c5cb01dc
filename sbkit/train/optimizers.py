"""Which parameters learn, at which rate and by which optimizer, by the paths of their modules.

A path begins with a key of the YAML and goes on as in PyTorch: `CNN`, `Transformer.encoder.0`,
`Transformer.encoder.0.norm.weight`.

    optimizers:  # in the place of `opt_class`, where there are several
        generator: {parts: [generator], opt_class: !name:torch.optim.AdamW {lr: 0.0002}}
        discriminator: {parts: [discriminator], opt_class: !name:torch.optim.AdamW {lr: 0.0001}}

`compute_objectives` then returns a loss for each of them, by its name, and each steps its own parts
by the gradient of its own loss, all in the same step: the discriminator's loss does not move the
generator, nor the other way round. A single loss moves all. Of `parts`, `*` stands for anything;
the optimizer without `parts` has the rest.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.optim import Optimizer

from sbkit.base.errors import SbkitError
from sbkit.base.text import listed
from sbkit.checkpoint.part_names import part_names, to_part_name
from sbkit.config.document import did_you_mean
from sbkit.train.schedule import SCHEDULERS

Groups = Iterable[nn.Parameter] | Sequence[dict[str, Any]]
Named = Mapping[str, nn.Parameter]


def freeze(paths: Iterable[str], hparams: Mapping[str, Any]) -> list[nn.Module]:
    """Take the gradients of parameters away, and return the modules that were named.

    They belong into evaluation mode in training too: what does not learn computes the same for
    training as for inference, without dropout and with the statistics that it has.
    Raises SbkitError for a path that leads nowhere, or what is no list.
    """
    _check_knob("freeze", paths, (list, tuple), "a list of paths in `model`", hparams)
    for path in paths:
        for parameter in _parameters_at(path, hparams, "freeze"):
            parameter.requires_grad_(False)
    return [each for name, each in (_modules(hparams) if paths else ()) if name in paths]


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
        scales = hparams.get("lr_scale") or {}
        made[name] = with_lr_scale(declared[name]["opt_class"], scales, hparams)(groups)
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
    opt_class: Callable[[Groups], Any], scales: Mapping[str, float], hparams: Mapping[str, Any]
) -> Callable[[Groups], Any]:
    """Return ``opt_class`` with groups whose rate is scaled: each has an `lr_scale`.

    The longest path decides where several lead to a parameter. Groups that come in, such as those
    without weight decay, are split, and keep what they declare. A schedule sets a group's rate to
    its own times ``group.get("lr_scale", 1.0)``.
    Raises SbkitError for a path that leads nowhere, what is no mapping, or a scheduler of
    SpeechBrain's that the recipe steps itself: all of them set one rate for all groups.
    """
    _check_knob("lr_scale", scales, Mapping, "a mapping of paths in `model` to numbers", hparams)
    scale_of: dict[int, float] = {}
    for path, scale in sorted(scales.items(), key=lambda item: item[0].count(".")):
        for parameter in _parameters_at(path, hparams, "lr_scale"):
            scale_of[id(parameter)] = float(scale)
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


def _check_knob(knob: str, value: Any, kind: Any, must: str, hparams: Mapping[str, Any]) -> None:
    """Raise SbkitError for what a recipe of SpeechBrain's may mean by the name of a knob."""
    is_of_paths = isinstance(value, kind) and all(isinstance(each, str) for each in value)
    if value and not (is_of_paths and isinstance(hparams.get("model"), nn.Module)):
        raise SbkitError(
            f"`{knob}` must be {must}, but is {value!r}, and `model` is "
            f"{type(hparams.get('model')).__name__}. Correct it, or give a knob of the recipe's "
            "own another name."
        )


def _modules(hparams: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    parts, model = part_names(hparams), hparams["model"]
    for name, module in model.named_modules(remove_duplicate=False):  # two parts may share one
        if name:
            yield to_part_name(f"{name}.", parts).rstrip("."), module


def _parameters_at(path: str, hparams: Mapping[str, Any], knob: str) -> list[nn.Parameter]:
    """List the parameters at or below a path; a module may have none."""
    named = named_parameters(hparams["model"], hparams)
    modules = [name for name, _ in _modules(hparams)]
    if path not in modules and path not in named:
        raise SbkitError(
            f"`{knob}` must name modules of the model by their path, but there is no `{path}`."
            f"{did_you_mean(path, [*modules, *named])} Its parts are "
            f"{', '.join(part_names(hparams))}."
        )
    return [each for name, each in named.items() if is_at(name, path)]
