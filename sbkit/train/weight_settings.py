"""The settings that decide what weights mean: compared before the weights of another run are used.

A number that changes the shape of a tensor is listed by that tensor. Another setting, such as the
sample rate, the number of heads or an activation, changes what the same weights compute, and only
the YAML shows it. Compared are the features, how each part with loaded tensors is built and, if
output layers are loaded, the text table.
"""

import inspect
import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import reduce
from itertools import chain
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sbkit.base.errors import ConfigError
from sbkit.base.messages import listed, short_value
from sbkit.bundle.config import WEIGHTS_FILE, BundleFiles, Plain
from sbkit.bundle.module_spec import (
    ARGUMENTS_KEY,
    CLASS_MODULES,
    COMPUTED,
    TAG_KEYS,
    build_from_spec,
    node_to_comparable,
)
from sbkit.bundle.task import Task
from sbkit.checkpoint.run_config import read_run_tree
from sbkit.config.document import dotted
from sbkit.text.normalization import TEXT_CHOICES, Orthography, orthography, text_table
from sbkit.text.tokenizer import TOKENIZER_FILE

FEATURES = "compute_features"
DIFFERS = "init_from_differs"  # the key of the YAML
# Settings that take effect in training only, or name where a pretrained encoder came from.
TRAINING_ONLY = re.compile(
    ".*drop.*|mask_(time|channel)_.*|gradient_checkpointing|lora|intermediate_layer|momentum|source"
)

PartSettings = Mapping[str, Plain]  # by key of the YAML; parts as specifications


class SettingDifference(NamedTuple):
    """A setting that differs; ``path`` leads to it, such as Transformer, arguments, nhead."""

    path: tuple[str | int, ...]
    theirs: Plain
    ours: Plain

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(key for key in self.path if isinstance(key, str) and key != ARGUMENTS_KEY)

    def __str__(self) -> str:
        theirs, ours = short_value(self.theirs), short_value(self.ours)
        return f"`{dotted(self.names)}` is {theirs} there and {ours} here"


def settings_of_yaml(root: Mapping[str, Any]) -> PartSettings:
    """Return the settings of a run from its resolved YAML."""
    settings = {str(key): node_to_comparable(node) for key, node in root.items()}
    if "language" in root:
        settings["text"] = _text(text_table(str(root["language"]), settings.get("text")))
    return settings


def _settings_of_source(source: Path) -> PartSettings:
    """Return the settings of a bundle, or of a run; raises SbkitError if they cannot be read."""
    if not (source / WEIGHTS_FILE).is_file():
        return settings_of_yaml(read_run_tree(source))
    config = BundleFiles(source).config
    facts = {"sample_rate": config.sample_rate, "language": config.language}
    return {**config.parts, **facts, "text": _text(config.text_table)}


def _text(table: Orthography) -> dict[str, Plain]:
    case = TEXT_CHOICES["case"][table.keep_case]
    numbers = TEXT_CHOICES["numbers"][bool(table.numbers)]
    return {"case": case, "punctuation": [*table.punctuation], "numbers": numbers}


def check_same_meaning(
    source: Path, ours: PartSettings, task: Task, tensors: Collection[str], loaded: Collection[str]
) -> list[str]:
    """Compare the settings of `init_from` with ours; return lines about declared differences.

    tensors, loaded: the names of our tensors, and of those that are loaded.

    Raises ConfigError if a setting differs that `init_from_differs` does not list.
    """
    names = ours.get(DIFFERS) or []
    declared = {names} if isinstance(names, str) else {*names}
    parts_with_tensors = {name.partition(".")[0] for name in tensors}
    loaded_parts = {name.partition(".")[0] for name in loaded}
    model_parts = inspect.signature(task.model_class()).parameters if task.has_model else {}
    compared = {
        "sample_rate",
        FEATURES,
        *loaded_parts,
        *({*model_parts} - parts_with_tensors - {"model"}),
    }
    differences = [*_all_differences(_settings_of_source(source), ours, compared, task)]
    undeclared = [d for d in differences if declared.isdisjoint(d.names)]
    if undeclared:
        described = listed(_without_repeats(undeclared), separator="; ")
        missing = dict.fromkeys(difference.names[-1] for difference in undeclared)
        raise ConfigError(
            f"`init_from`: the weights of {source} were trained with other settings: {described}. "
            f"Use their values, or declare the difference: `{DIFFERS}: [{', '.join(missing)}]`."
        )
    lines = [f"{DIFFERS}: {difference}" for difference in _without_repeats(differences)]
    unused = declared.difference(*(difference.names for difference in differences))
    return lines + [f"{DIFFERS}: `{name}` does not differ" for name in sorted(unused)]


def _without_repeats(differences: Sequence[SettingDifference]) -> list[str]:
    """Describe differences; of one setting that several parts have, only the first."""
    first: dict[str, str] = {}
    for difference in differences:
        setting = json.dumps([difference.names[-1], *difference[1:]], default=str)
        first.setdefault(setting, str(difference))
    return [*first.values()]


def _all_differences(
    theirs: PartSettings, ours: PartSettings, compared: Collection[str], task: Task
) -> Iterator[SettingDifference]:
    for name in [name for name in ours if name in compared and name in theirs]:
        for difference in _differences((name,), theirs[name], ours[name]):
            is_training_only = any(map(TRAINING_ONLY.fullmatch, difference.names))
            if not is_training_only and not _is_size(ours, difference):
                yield difference
    has_texts = task.label_file == TOKENIZER_FILE and "language" in ours and "language" in theirs
    if has_texts and not {*task.heads}.isdisjoint(compared):
        languages = [str(settings["language"] or "und") for settings in (theirs, ours)]
        if orthography(languages[0]) != orthography(languages[1]):
            yield SettingDifference(("language",), languages[0], languages[1])
        yield from _differences(("text",), theirs["text"], ours["text"])


def _is_size(ours: PartSettings, difference: SettingDifference) -> bool:
    """Return whether a setting is a number that changes the shapes of a part's tensors."""
    name = str(difference.path[0])
    values = [value if isinstance(value, list) else [value] for value in difference[1:]]
    # Whatever the source writes in the place of a number is not built.
    is_number = all(item is None or type(item) in (int, float) for item in chain(*values))
    if name == FEATURES or not isinstance(ours[name], dict) or not is_number:
        return False
    with_theirs = deepcopy(dict(ours))
    *parents, last = difference.path
    reduce(getitem, parents, with_theirs)[last] = difference.theirs  # type: ignore[index, arg-type]
    shapes, their_shapes = _shapes(ours, name), _shapes(with_theirs, name)
    return shapes is not None and their_shapes is not None and shapes != their_shapes


def _shapes(settings: PartSettings, name: str) -> Mapping[str, torch.Size] | None:
    """Return the shapes of a part's tensors; None if it cannot be built without memory."""
    modules = frozenset(CLASS_MODULES.findall(json.dumps(settings[name], default=str)))
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            part = build_from_spec(settings[name], user_modules=modules)
        return {name: tensor.shape for name, tensor in part.state_dict().items()}
    except Exception:  # whatever a class raises for values that do not go together
        return None


def _differences(
    path: tuple[str | int, ...], theirs: Plain, ours: Plain
) -> Iterator[SettingDifference]:
    """Yield where two values differ, down to the arguments of objects and the keys of mappings."""
    are_lists = isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours)
    if theirs is COMPUTED or ours is COMPUTED or theirs == ours:
        return
    if are_lists and any(isinstance(item, dict) for item in ours):
        for index, items in enumerate(zip(theirs, ours, strict=True)):
            yield from _differences((*path, index), *items)
    elif not isinstance(theirs, dict) or not isinstance(ours, dict):
        yield SettingDifference(path, theirs, ours)
    elif _class_name(theirs) != _class_name(ours):
        yield SettingDifference(path, _class_name(theirs), _class_name(ours))
    elif (name := _class_name(ours)) is not None:
        arguments = (theirs[ARGUMENTS_KEY], ours[ARGUMENTS_KEY])
        yield from _differences((*path, ARGUMENTS_KEY), *_with_defaults(name, *arguments))
    else:
        for key in {**ours, **theirs}:
            yield from _differences((*path, key), theirs.get(key), ours.get(key))


def _class_name(spec: Mapping[str, Plain]) -> str | None:
    return next((str(spec[key]) for key in TAG_KEYS if ARGUMENTS_KEY in spec and key in spec), None)


def _with_defaults(class_name: str, *arguments: Plain) -> Sequence[Plain]:
    """Return arguments by name, with defaults for those that only another list writes."""
    if all(isinstance(written, list) for written in arguments):
        return arguments
    module, _, name = class_name.rpartition(".")
    class_ = getattr(sys.modules.get(module), name, None)  # our part is built: it is imported
    parameters = inspect.signature(class_).parameters if inspect.isclass(class_) else {}
    named = [
        a if isinstance(a, dict) else dict(zip(parameters, a, strict=False)) for a in arguments
    ]
    missing = named[0].keys() ^ named[1].keys()
    defaults = {
        n: p.default for n, p in parameters.items() if n in missing and p.default != p.empty
    }
    return [{**defaults, **written} for written in named]
