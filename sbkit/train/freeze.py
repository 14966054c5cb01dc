"""Parts that do not learn, and parts that learn slower, both by the paths of their modules.

A path begins with a key of the YAML and goes on as in PyTorch: `CNN`, `Transformer.encoder.0`,
`Transformer.encoder.0.norm.weight`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.part_names import part_names, to_part_name
from sbkit.config.document import did_you_mean

SCHEDULERS = "speechbrain.nnet.schedulers"  # where they are defined
Groups = Iterable[nn.Parameter] | Sequence[dict[str, Any]]


class Frozen:
    """The modules of `freeze`: without gradient, and in evaluation mode in training too.

    Their dropout is off and their batch normalization keeps its statistics: what does not learn
    computes the same for training as for inference.
    """

    def __init__(self, paths: Iterable[str], hparams: Mapping[str, Any]) -> None:
        """Find the modules and take their parameters' gradients away.

        Raises SbkitError for a path that leads nowhere, or what is no list.
        """
        _refuse_other("freeze", paths, (list, tuple), "a list of paths in `model`", hparams)
        self.paths = tuple(paths)
        self._modules = list[nn.Module]()
        for path in self.paths:
            for parameter in _parameters_at(path, hparams, "freeze"):
                parameter.requires_grad_(False)
            self._modules += [each for name, each in _modules(hparams) if name == path]

    def eval(self) -> None:
        """Put the frozen modules into evaluation mode; for `StepBrain.train_mode`."""
        for module in self._modules:
            module.eval()


def with_lr_scale(
    opt_class: Callable[[Groups], Any], scales: Mapping[str, float], hparams: Mapping[str, Any]
) -> Callable[[Groups], Any]:
    """Return ``opt_class`` with groups whose rate is scaled: each has an `lr_scale`.

    The longest path decides where several lead to a parameter. Groups that come in, such as those
    without weight decay, are split, and keep what they declare. A schedule sets a group's rate to
    its own times ``group.get("lr_scale", 1.0)``.
    Raises SbkitError for a path that leads nowhere, a scale that is no number of at least 0, what
    is no mapping, or a scheduler of SpeechBrain's, all of which set one rate for all groups.
    """
    _refuse_other("lr_scale", scales, Mapping, "a mapping of paths in `model` to numbers", hparams)
    scale_of: dict[int, float] = {}
    for path, scale in sorted(scales.items(), key=lambda item: item[0].count(".")):
        is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
        if not is_number or not 0 <= scale < math.inf:
            raise SbkitError(
                f"`lr_scale` must give each path a number of at least 0, but gives {path} "
                f"{scale!r}. Write 0.1 for a tenth of `lr`, and use `freeze` for none."
            )
        for parameter in _parameters_at(path, hparams, "lr_scale"):
            scale_of[id(parameter)] = float(scale)
    for name, each in hparams.items() if scale_of else ():
        if type(each).__module__ == SCHEDULERS:
            raise SbkitError(
                f"`lr_scale` must come with a schedule that keeps the rates of parts apart, but "
                f"`{name}` ({type(each).__name__}) sets one rate for all. Take "
                "sbkit.train.schedule.WarmupCosine as `lr_schedule`, or a scheduler of torch's."
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


def _refuse_other(knob: str, value: Any, kind: Any, must: str, hparams: Mapping[str, Any]) -> None:
    """Refuse what a recipe of SpeechBrain's may mean by the name of a knob."""
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
    parts = part_names(hparams)
    parameters = hparams["model"].named_parameters(remove_duplicate=False)
    named = {to_part_name(name, parts): each for name, each in parameters}
    modules = [name for name, _ in _modules(hparams)]
    if path not in modules and path not in named:
        raise SbkitError(
            f"`{knob}` must name modules of the model by their path, but there is no `{path}`."
            f"{did_you_mean(path, [*modules, *named])} Its parts are {', '.join(parts)}."
        )
    return [each for name, each in named.items() if name == path or name.startswith(f"{path}.")]
