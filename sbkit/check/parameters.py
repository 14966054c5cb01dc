"""Check that the ModuleList owns each parameter, and that it is trained once and saved.

A parameter outside the ModuleList stays on the CPU, in no optimizer and in no checkpoint
(SpeechBrain #2804). A walk visits all that can be reached from the hparams and the Brain.
"""

from collections import Counter
from collections.abc import Iterator, Sequence, Set

from speechbrain.utils.checkpoints import DEFAULT_SAVE_HOOKS, get_default_hook
from torch import Tensor, nn

from sbkit.base.messages import listed, plural
from sbkit.check.checked_run import CheckedRun, Finding
from sbkit.config.document import Keys, dotted
from sbkit.train.ownership import helper_digests, prepare_helpers


def check_ownership(run: CheckedRun) -> Iterator[Finding]:
    """Find parameters outside the ModuleList, and parts that are in it twice."""
    reached = run.reached
    objects = dict(reached)
    model = run.model
    owned_ids = {id(part) for part in (*model.modules(), *model.parameters())}
    owned_paths = {path for path, part in reached if id(part) in owned_ids}
    module_paths = {path for path, part in reached if isinstance(part, nn.Module)}
    helpers = prepare_helpers(run.brain).values()
    owned_ids |= {id(part) for helper in helpers for part in helper.parameters()}
    unowned_sizes = Counter[Keys]()  # numbers of parameters outside the model, by reported path
    trainable: set[Keys] = set()  # the reported paths of parameters that require a gradient
    for path, parameter in reached:
        if isinstance(parameter, nn.Parameter) and id(parameter) not in owned_ids:
            reported = _path_to_report(path, owned_paths, module_paths - owned_paths)
            unowned_sizes[reported] += parameter.numel()
            trainable |= {reported} if parameter.requires_grad else set()
    for path, size in unowned_sizes.items():
        name = dotted(path)
        is_in_yaml = path[0] in run.spec.document.root
        if is_in_yaml and not isinstance(objects[path], list | tuple | dict):
            fix = f"Add `!ref <{path[0]}>` to the list of `model`, or take it out of the YAML."
        else:
            fix = f"Make `{name}` a torch.nn.ModuleList or a part of `model`."
            if path[:2] == ("brain", "network"):
                fix = "Declare it in the YAML, in `model`, and in `parts` of the Brain."
        if path not in trainable and path[:-1] not in owned_paths:
            helper = path[0] if is_in_yaml else path[1]
            fix = f'If it is to stay frozen, declare it in the Brain: `helpers = ("{helper}",)`.'
        place = path if is_in_yaml else ("model",)
        yield run.finding(
            *place,
            problem=f"`{name}` holds {plural(size, 'parameter')} outside `model`: they would stay "
            "on the CPU, in no optimizer and in no checkpoint",
            fix=fix,
        )
    for part_id, count in Counter(map(id, model)).items():
        if count > 1:
            path = next(path for path, part in objects.items() if id(part) == part_id)
            yield run.finding(
                "model",
                problem=f"The list of `model` holds `{dotted(path)}` {count} times",
                fix="Take all but one out of the list.",
            )


def check_helpers(run: CheckedRun) -> Iterator[Finding]:
    """Find helpers that change in small steps, and that no checkpoint holds."""
    for name, digest in helper_digests(run.brain).items():
        if digest != run.helpers.get(name):
            yield run.finding(
                name if name in run.spec.document.root else "model",
                problem=f"`{name}` of `helpers` changes in a step, but is in no checkpoint",
                fix="Make it a part of `model`, or save its module: in `__init__` of the Brain, "
                f'`self.checkpointer.add_recoverable("{name}", MODULE)`.',
            )


def _path_to_report(path: Keys, owned_paths: Set[Keys], unowned_modules: Set[Keys]) -> Keys:
    """Return the path of the object that the user must move, for a parameter outside `model`.

    If a part of the ModuleList holds the parameter, torch does not search the attribute that holds
    it, such as a list: report the attribute. Otherwise report the outermost module with the
    parameter, or the parameter itself if no module holds it.
    """
    ancestors = [path[:depth] for depth in range(1, len(path))]
    if owners := [ancestor for ancestor in ancestors if ancestor in owned_paths]:
        return path[: len(owners[-1]) + 1]
    modules = [ancestor for ancestor in ancestors if ancestor in unowned_modules]
    return modules[0] if modules else path


def check_optimizers(run: CheckedRun) -> Iterator[Finding]:
    """Find parameters that a step would update never or twice, and state that is not saved."""
    optimizers, model = run.optimizers, run.model
    grouped = [p for opt in optimizers for group in opt.param_groups for p in group["params"]]
    counts = Counter(map(id, grouped))
    made_by_forward = set(map(id, model.parameters())) - {id(part) for _, part in run.reached}
    trainable = [p for p in model.parameters() if p.requires_grad and id(p) not in made_by_forward]
    model_ids = set(map(id, model.parameters()))
    never_updated = [p for p in trainable if counts[id(p)] == 0]
    updated_twice = [p for p in trainable if counts[id(p)] > 1]
    outside_model = [p for p in grouped if id(p) not in model_ids]
    for parameters, problem in (
        (never_updated, "No optimizer updates"),
        (updated_twice, "More than one group of parameters has"),
        (outside_model, "Outside `model`, an optimizer updates"),
    ):
        if parameters:
            yield run.finding(
                "opt_class",
                problem=f"{problem} {_describe_tensors(run, parameters)}",
                fix="Give each parameter of `model` to one group of one optimizer, and no others.",
            )
    # A checkpoint must have the tensors of the model, the epoch, and the optimizers' states.
    checkpointer = run.brain.checkpointer
    recoverables: dict[str, object] = getattr(checkpointer, "recoverables", {})
    modules = [part for part in recoverables.values() if isinstance(part, nn.Module)]
    saved = {id(t) for part in modules for t in (*part.parameters(), *part.buffers())}
    saved |= set(map(id, recoverables.values()))
    tensors = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in saved]
    unsaved = [_describe_tensors(run, tensors)] if tensors else []
    hooks = getattr(checkpointer, "custom_save_hooks", {})
    unknown = [
        f"`{name}` ({type(part).__name__})"
        for name, part in recoverables.items()
        if name not in hooks and get_default_hook(part, DEFAULT_SAVE_HOOKS) is None
    ]
    if unknown:
        yield run.finding(
            "checkpointer",
            "recoverables",
            problem=f"No checkpoint can hold {listed(unknown)}",
            fix="Make it a torch.nn.Module, or mark its methods by SpeechBrain's `mark_as_saver` "
            "and `mark_as_loader`.",
        )
    states = (run.copy.hparams["epoch_counter"], *optimizers)
    unsaved += dict.fromkeys(type(state).__name__ for state in states if id(state) not in saved)
    if unsaved:
        saved_names = ", ".join(f"`{name}`" for name in recoverables)
        yield run.finding(
            "checkpointer",
            "recoverables",
            problem=f"{listed(unsaved)} would be in no checkpoint: the checkpointer saves "
            f"{saved_names or 'nothing'}",
            fix="Write `model: !ref <model>` and `epochs: !ref <epoch_counter>`; add an optimizer "
            "in `init_optimizers` by `self.checkpointer.add_recoverable(NAME, OPTIMIZER)`.",
        )


def _describe_tensors(run: CheckedRun, tensors: Sequence[Tensor]) -> str:
    """Name the first of the tensors, and count the others."""
    paths = (path for path, value in run.reached if value is tensors[0])
    name = next((f"`{dotted(path)}`" for path in paths), "a parameter outside the YAML")
    return name if len(tensors) == 1 else f"{name} and {len(tensors) - 1:,} more"
