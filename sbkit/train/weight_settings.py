"""The settings that decide what weights mean: compared before the weights of another run are used.

A setting that changes the shape of a tensor is listed by that tensor. Another one, such as the
sample rate, the number of heads or an activation, changes what the same numbers compute, and only
the YAML shows it. So these are compared: features, how each part with loaded tensors was built, and
the text table if the outputs are loaded.
"""

import inspect
import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sbkit.base.errors import ConfigError
from sbkit.base.messages import listed, short_value
from sbkit.bundle.config import WEIGHTS_FILE, BundleFiles, Plain
from sbkit.bundle.module_spec import (
    ARGUMENTS_KEY,
    COMPUTED,
    TAG_KEYS,
    TUPLE_KEY,
    build_from_spec,
    node_to_comparable,
)
from sbkit.checkpoint.run_config import RESOLVED_YAML
from sbkit.config.document import dotted, read_document
from sbkit.tasks.task import Task, import_object
from sbkit.text.normalization import Orthography, orthography, text_table
from sbkit.text.tokenizer import TOKENIZER_FILE

FEATURES = "compute_features"
DIFFERS = "init_from_differs"  # the key of the YAML
# Settings that take effect in training only, or name where a pretrained encoder came from.
TRAINING_ONLY = re.compile(
    ".*drop.*|mask_(time|channel)_.*|gradient_checkpointing|lora|intermediate_layer|momentum|source"
)

Settings = Mapping[str, Plain]  # by key of the YAML; parts as specifications


class Difference(NamedTuple):
    """A setting that differs between two models.

    path: the keys that lead to it, such as Transformer, nhead.
    changed: our part, built with their value of this setting.
    """

    path: tuple[str, ...]
    theirs: Plain
    ours: Plain
    changed: Plain

    def __str__(self) -> str:
        theirs, ours = (short_value(value) for value in (self.theirs, self.ours))
        return f"`{dotted(self.path)}` is {theirs} there and {ours} here"


def settings_of_yaml(root: Mapping[str, Any]) -> Settings:
    """Return the settings of a run from its resolved YAML."""
    settings = {str(key): node_to_comparable(node) for key, node in root.items()}
    if "language" in root:
        table = text_table(str(root["language"]), settings.get("text"))
        settings["text"] = _text_settings(table)
    return settings


def settings_of_source(source: Path) -> Settings:
    """Return the settings of a bundle, or of a run; raises SbkitError if they cannot be read."""
    if not (source / WEIGHTS_FILE).is_file():
        return settings_of_yaml(read_document(source / RESOLVED_YAML).root)
    config = BundleFiles(source).config
    return {
        **config.parts,
        "sample_rate": config.sample_rate,
        "language": config.language,
        "text": _text_settings(config.text_table),
    }


def _text_settings(table: Orthography) -> dict[str, Plain]:
    return {
        "case": "keep" if table.keep_case else "lower",
        "punctuation": sorted(table.punctuation),
        "numbers": "spell" if table.numbers else "keep",
    }


def check_same_meaning(
    source: Path, ours: Settings, task: Task, tensors: Collection[str], loaded: Collection[str]
) -> list[str]:
    """Compare the settings of `init_from` with ours; return lines about declared differences.

    tensors, loaded: the names of our tensors, and of those that are loaded.

    Raises:
        ConfigError: a setting differs that `init_from_differs` does not list.
    """
    theirs = settings_of_source(source)
    names = ours.get(DIFFERS) or []
    declared = {names} if isinstance(names, str) else {*names}
    loaded_parts = {_part(name) for name in loaded}
    without_tensors = _model_parts(task) - {_part(name) for name in tensors}
    differences = [
        difference
        for name in ["sample_rate", FEATURES, *sorted(loaded_parts | without_tensors - {FEATURES})]
        if name in ours and name in theirs
        for difference in _part_differences(name, theirs[name], ours[name])
    ]
    has_texts = task.label_file == TOKENIZER_FILE and "language" in ours and "language" in theirs
    if has_texts and loaded_parts & {*task.heads}:
        differences += _text_differences(theirs, ours)
    by_name = {difference.path[-1]: difference for difference in reversed(differences)}
    undeclared = [n for n, d in reversed(by_name.items()) if declared.isdisjoint(d.path)]
    if undeclared:
        described = listed((str(by_name[name]) for name in undeclared), separator="; ")
        raise ConfigError(
            f"`init_from`: the weights of {source} would not mean the same here: {described}. Use "
            f"their values, or declare the difference: --{DIFFERS}=[{','.join(undeclared)}]."
        )
    lines = [f"{DIFFERS}: {difference}" for difference in reversed(by_name.values())]
    named = {key for difference in differences for key in difference.path}
    return lines + [f"{DIFFERS}: `{name}` does not differ" for name in sorted(declared - named)]


def _part(tensor: str) -> str:
    return tensor.partition(".")[0]


def _model_parts(task: Task) -> set[str]:
    """Name the parts that the model of a task is made of."""
    if task.export is None:
        return set()
    return {*inspect.signature(task.export.import_model_class()).parameters} - {"model"}


def _text_differences(theirs: Settings, ours: Settings) -> Iterator[Difference]:
    """Yield the differences of the text tables: the language and the keys of `text`."""
    languages = [str(settings.get("language") or "und") for settings in (theirs, ours)]
    if orthography(languages[0]) != orthography(languages[1]):
        yield Difference(("language",), languages[0], languages[1], None)
    yield from _differences(("text",), theirs.get("text"), ours.get("text"))


# ---- how a part is built


def _part_differences(name: str, theirs: Plain, ours: Plain) -> Iterator[Difference]:
    """Yield the differences that matter: all but numbers that change the shape of a tensor."""
    shapes: object = None
    for difference in _differences((name,), theirs, ours):
        if any(map(TRAINING_ONLY.fullmatch, difference.path)):
            continue
        values = (difference.theirs, difference.ours)
        is_size = not any(isinstance(value, str | bool | dict) for value in values)
        if is_size and name != FEATURES and isinstance(ours, dict):
            modules = frozenset(
                re.findall(r'"(?:new|name)": "([\w.]+)\.\w+"', json.dumps(ours, default=str))
            )
            shapes = shapes or _shapes(ours, modules)
            if shapes and (_shapes(difference.changed, modules) or shapes) != shapes:
                continue
        yield difference


def _shapes(spec: Plain, user_modules: frozenset[str]) -> Mapping[str, torch.Size] | None:
    """Return the shapes of a part's tensors; None if it cannot be built without memory."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            part = build_from_spec(spec, user_modules=user_modules)
        return {name: tensor.shape for name, tensor in part.state_dict().items()}
    except Exception:  # whatever a class raises for values that do not go together
        return None


def _differences(path: tuple[str, ...], theirs: Plain, ours: Plain) -> Iterator[Difference]:
    """Yield where two values differ, down to the arguments of objects and the keys of mappings."""
    if theirs is COMPUTED or ours is COMPUTED or theirs == ours:
        return
    are_lists = isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours)
    if are_lists and any(isinstance(item, dict) for item in ours):
        for index, (their_item, our_item) in enumerate(zip(theirs, ours, strict=True)):
            for difference in _differences(path, their_item, our_item):
                changed = [*ours[:index], difference.changed, *ours[index + 1 :]]
                yield difference._replace(changed=changed)
    elif not isinstance(theirs, dict) or not isinstance(ours, dict):
        yield Difference(path, theirs, ours, theirs)
    elif ARGUMENTS_KEY not in ours or ARGUMENTS_KEY not in theirs:
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            for difference in _differences((*path, key), theirs.get(key), ours.get(key)):
                yield difference._replace(changed={**ours, key: difference.changed})
    elif _class(theirs) != _class(ours):
        yield Difference(path, _class(theirs), _class(ours), theirs)
    else:
        for difference in _differences(path, *_arguments(_class(ours), theirs, ours)):
            yield difference._replace(changed={**ours, ARGUMENTS_KEY: difference.changed})


def _class(spec: Mapping[str, Plain]) -> str:
    return next(str(spec[key]) for key in TAG_KEYS if key in spec)


def _arguments(class_name: str, *specs: Mapping[str, Plain]) -> list[Plain]:
    """Return the arguments by name; where one specification leaves one out, its default."""
    parameters = inspect.signature(import_object(class_name)).parameters
    by_name: list[dict[str, Plain]] = []
    for written in (spec[ARGUMENTS_KEY] for spec in specs):
        if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters.values()):
            return [spec[ARGUMENTS_KEY] for spec in specs]
        is_list = isinstance(written, list)
        by_name.append(dict(zip(parameters, written, strict=False)) if is_list else written)
    defaults = {
        name: _plain(parameters[name].default)
        for name in by_name[0].keys() ^ by_name[1].keys()
        if name in parameters and parameters[name].default is not inspect.Parameter.empty
    }
    return [{**defaults, **arguments} for arguments in by_name]


def _plain(default: Any) -> Plain:
    if isinstance(default, tuple):
        return {TUPLE_KEY: [*default]}
    if callable(default):
        return {"name": f"{default.__module__}.{default.__qualname__}", ARGUMENTS_KEY: {}}
    return default
