"""Parse ``--key=value`` arguments, and replace values of a YAML by values of the same type."""

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import YAMLError

from sbkit.base.errors import ConfigError
from sbkit.config.document import (
    REFERENCE_TAGS,
    TUPLE,
    WHOLE_KEYS,
    Document,
    Keys,
    dotted,
    nearest,
    remove_tuple_rule,
    resolve_references,
    tag_of,
    text_of,
    walk,
)
from sbkit.config.ranges import RANGES

OPTION = re.compile(r"--(?P<path>[^=]+)(?:=(?P<value>.*))?", re.DOTALL)
PATH = re.compile(r"[^.\[\]\s]+(?:\.[^.\[\]\s]+)*")
NEGATIVE_NUMBER = re.compile(r"-(?:[\d.]+(?:[eE][-+]?\d+)?|\.inf)")  # values that look like options
ATTRIBUTE_TAG = "!apply:getattr"  # the tag that HyperPyYAML gives `!ref <tokenizer.vocab_size>`
NAMED_VALUES = {"manifest": "train=a.csv", "where": "gender=female_feminine"}  # keys, an example
NON_NUMERIC_CHOICES = {"batch_seconds": "auto"}  # keys whose value is a number or this word
TYPE_NAMES: dict[type, str] = {
    type(None): "null",
    bool: "true or false",  # before int, its base
    int: "a whole number",
    float: "a number",
    str: "text",  # before Sequence, its base
    Mapping: "a mapping",
    Sequence: "a list",
}

Container = CommentedMap | CommentedSeq

USAGE = """\
usage: train.py FILE.yaml [--key=value ...]

Trains the model that FILE.yaml declares. Every key of the file can be overridden:
  --lr=0.001               a value: a number, text, true, false, null, [a list] or {a mapping}
  --Transformer.dropout=0  a key inside another
  --check=False            do not check the run before its first step

`sbkit check FILE.yaml [--key=value ...]` checks a run without starting it."""


# -- reading arguments -----------------------------------------------------------------------------


def parse_command(arguments: Sequence[str]) -> tuple[Path, dict[str, object]]:
    """Read ``FILE.yaml --key=value ...``, or print the usage for `--help` and exit."""
    if {"--help", "-h"} & {*arguments}:
        print(USAGE)
        raise SystemExit(0)
    if not arguments or arguments[0].startswith("-"):
        first = f", not `{arguments[0]}`" if arguments else ""
        raise ConfigError(
            f"The first argument must be a YAML file{first}. Write: python train.py "
            "hparams/ctc.yaml [--key=value ...]"
        )
    return Path(arguments[0]), parse_overrides(arguments[1:])


def parse_overrides(arguments: Sequence[str]) -> dict[str, object]:
    """Read ``--key value``, ``--key=value`` and ``--flag``; ``--a.b`` nests.

    ``--manifest NAME=FILE`` and ``--where COLUMN=VALUE`` may be repeated; several values of a name
    become a list.

    >>> parse_overrides(["--lr=1e-3", "--Transformer.dropout", "0", "--compile"])
    {'lr': 1e-3, 'Transformer': {'dropout': 0}, 'compile': True}
    """
    overrides: dict[str, object] = {}
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        option = OPTION.fullmatch(argument)
        if option is None or not PATH.fullmatch(option["path"]):
            raise ConfigError(f"`{argument}` is not of the form --key=value or --key.inner=value.")
        text = option["value"]
        if text is None:
            text = "true"
            next_argument = remaining[0] if remaining else "--"
            if not next_argument.startswith("-") or NEGATIVE_NUMBER.fullmatch(next_argument):
                text = remaining.pop(0)
        if option["path"] in NAMED_VALUES and text != "null" and not text.startswith("{"):
            _add_named_value(overrides, option["path"], text)
            continue
        _set_nested(overrides, option["path"].split("."), _read_value(argument, text))
    return overrides


def nest_overrides(values: Mapping[str, object]) -> dict[str, object]:
    """Return overrides given in Python as those of the command line: plain, and nested.

    >>> nest_overrides({"output_folder": Path("runs/a"), "Transformer.dropout": 0.2})
    {'output_folder': 'runs/a', 'Transformer': {'dropout': 0.2}}
    """
    leaves: dict[Keys, object] = {}
    for path, value in values.items():
        for keys, leaf in _leaves(tuple(str(path).split(".")), value):
            if keys in leaves:
                raise ConfigError(
                    f"`{dotted(keys)}` is overridden twice, by {leaves[keys]!r} and {leaf!r}. Pass "
                    "only one of them."
                )
            leaves[keys] = leaf
    overrides: dict[str, object] = {}
    for keys in sorted(leaves, key=len):
        _set_nested(overrides, [*map(str, keys)], leaves[keys])
    return overrides


def _leaves(keys: Keys, value: object) -> Iterator[tuple[Keys, object]]:
    """Yield the values inside nested mappings, and the keys that lead to them."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves((*keys, str(key)), inner)
    else:
        yield keys, _from_python(value)


def _from_python(value: Any) -> object:
    """Return a value without types that no YAML has: those of NumPy and torch, and paths."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, list | tuple | range | Set):
        return [_from_python(item) for item in (sorted(value) if isinstance(value, Set) else value)]
    if hasattr(value, "tolist"):  # numbers and arrays of NumPy, tensors
        return value.tolist()
    is_device = type(value).__module__ == "torch"  # which the command line does not import
    return str(value) if is_device or isinstance(value, PurePath) else value


def _set_nested(overrides: dict[str, object], keys: Sequence[str], value: object) -> None:
    """Set the value at a path of keys; raises ConfigError if an outer key has another value."""
    parent = overrides
    for depth, key in enumerate(keys[:-1], start=1):
        inner = parent.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(
                f"`{'.'.join(keys)}` is a key inside `{'.'.join(keys[:depth])}`, which another "
                f"override sets to {inner!r}. Pass only one of them."
            )
        parent = inner
    parent[keys[-1]] = value


def _add_named_value(overrides: dict[str, object], key: str, text: str) -> None:
    name, equals, value = text.partition("=")
    if not name or not equals or (key == "manifest" and not value):
        raise ConfigError(
            f"`--{key}` needs NAME=VALUE, not {text!r}. Write --{key} {NAMED_VALUES[key]}."
        )
    mapping = overrides.get(key)
    earlier = mapping.get(name) if isinstance(mapping, dict) else None
    if earlier is None:
        values: object = value
    elif isinstance(earlier, list):
        values = [*earlier, value]
    else:
        values = [earlier, value]
    _set_nested(overrides, (key, name), values)


def _read_value(argument: str, text: str) -> object:
    """Read null, true, false and numbers; a list, mapping or quoted text; else plain text.

    Whole numbers in another form, such as 007, stay text.
    """
    if not text:
        raise ConfigError(f"`{argument}` needs a value. Write '\"\"' for empty text.")
    if text.startswith("!"):
        raise ConfigError(f"`{argument}` needs a plain value. To change an object, edit the YAML.")
    is_yaml_syntax = text[0] in "[{\"'"
    if "#" in text and not is_yaml_syntax:
        return text  # YAML would drop what follows as a comment
    remove_tuple_rule()
    try:
        value: object = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError) as error:  # ValueError for an impossible date
        if not is_yaml_syntax:
            return text
        raise ConfigError(
            f"`{argument}`: {text!r} is not a list, mapping or quoted text in YAML. Close its "
            "brackets and quotes."
        ) from error
    is_written_as_usual = value is None or isinstance(value, bool | float) or str(value) == text
    return value if is_yaml_syntax or is_written_as_usual else text


# -- replacing values ------------------------------------------------------------------------------


def apply_overrides(document: Document, overrides: Mapping[str, object]) -> None:
    """Set the overrides in the tree; refuse a missing key or a value of another type."""
    remaining = dict(overrides)
    for key in WHOLE_KEYS:  # first, so that references into these mappings see the new values
        if key in remaining and key in document.root:
            document.root[key] = remaining.pop(key)
    if remaining:
        defaults = resolve_references(document, needs_values=False)
        for key, value in remaining.items():
            _replace(document, document.root, defaults, (key,), value)


def _replace(
    document: Document, parent: Container, defaults: Container, keys: Keys, value: object
) -> None:
    """Replace the value at ``keys[-1]`` of its parent.

    If both values are mappings, replace only the keys that the new one has. If the old value is an
    object, the keys are its arguments.
    """
    key = _existing_key(document, parent, keys)
    node = parent[key]
    default = defaults[key]
    if not isinstance(value, Mapping):
        parent[key] = _convert_override(document, default, keys, value)
        return
    if tag_of(node) in REFERENCE_TAGS:
        raise ConfigError(
            f"`{dotted(keys)}` has no keys to override, because it refers to {text_of(node)} "
            f"({document.place(keys)}). Override the keys of {text_of(node)}."
        )
    if isinstance(node, Container) and (node or tag_of(node)):
        children = node
    elif tag_of(node):
        children = CommentedMap()  # an object without arguments: every key is refused as missing
    else:
        parent[key] = _convert_override(document, default, keys, value)
        return
    for inner_key, inner_value in value.items():
        _replace(document, children, default, (*keys, inner_key), inner_value)


def _existing_key(document: Document, parent: Container, keys: Keys) -> str | int:
    """Return ``keys[-1]`` as a key or an index of the parent; raises ConfigError without it."""
    key = keys[-1]
    if isinstance(parent, CommentedMap) and key in parent:
        return key
    if isinstance(parent, CommentedSeq) and str(key).isdecimal() and int(key) < len(parent):
        return int(key)
    sibling = nearest(str(key), parent if isinstance(parent, CommentedMap) else ())
    same_key_paths = [path for path, _ in walk(document.root) if path[-1:] == (key,)]
    if sibling:
        advice = f"Did you mean `{dotted((*keys[:-1], sibling))}`?"
    elif same_key_paths:
        advice = f"Did you mean `{dotted(same_key_paths[0])}`?"
    else:
        advice = "Correct it, or add it in the YAML."
    where = f" under `{dotted(keys[:-1])}`" if len(keys) > 1 else ""
    raise ConfigError(
        f"`{dotted(keys)}` overrides nothing: {document.path} has no such key{where}. {advice}"
    )


def _convert_override(document: Document, default: object, keys: Keys, value: object) -> object:
    """Convert a value to the type of the YAML's value; raises ConfigError if it has another."""
    if tag_of(default) == ATTRIBUTE_TAG:
        return value  # the type is not known before the object is built
    if tag_of(default):
        raise ConfigError(
            f"`{dotted(keys)}` would replace the object at {document.place(keys)} by {value!r}. "
            f"Override an argument, such as `{dotted(keys)}.NAME`, or edit the YAML."
        )
    allowed_word = NON_NUMERIC_CHOICES.get(str(keys[-1]))
    if allowed_word is not None:
        if value == allowed_word:
            return value
        if default == allowed_word:
            default = 0.0
    range_ = RANGES.get(str(keys[0])) if len(keys) == 1 else None
    if range_ is not None and not range_.integer and isinstance(value, float):
        default = 0.0 if _type_of(default) is int else default  # minutes, as in `15`
    if isinstance(default, list) and isinstance(value, list):
        return [
            _convert_override(document, _item_default(default, item), (*keys, index), item)
            for index, item in enumerate(value)
        ]
    try:
        return convert_to_type_of(default, value)
    except TypeError as error:
        expected = "a plain value" if _type_of(value) is object else _type_name(default)
        raise ConfigError(
            f"`{dotted(keys)}` must be {expected}, as in {document.place(keys)}, not {value!r} "
            f"({_type_name(value)})."
        ) from error


def _item_default(default: Sequence[object], item: object) -> object:
    """Return a value whose type an item of a list must have; None if it may have any.

    A list of whole numbers also takes fractions, as ``snr_db: [0, 30]`` must.
    """
    types = {_type_of(default_item) for default_item in default}
    if types == {int, float} or (types == {int} and isinstance(item, float)):
        return 0.0
    return default[0] if len(types) == 1 else None


def convert_to_type_of(default: object, value: Any) -> object:
    """Return a value in the type of the default; raises TypeError for another type.

    A default of null accepts any plain value.
    """
    if isinstance(value, PurePath):
        value = str(value)
    default_type, value_type = _type_of(default), _type_of(value)
    if value_type is object:
        raise TypeError
    if default_type is str and value_type is int:
        return str(value)
    if default_type is float and value_type is int:
        return float(value)
    if default_type is int and value_type is float and value.is_integer():
        return int(value)
    if default_type not in (type(None), value_type):
        raise TypeError
    return value


def _type_of(value: object) -> type:
    """Return the type of `TYPE_NAMES` that a value has; ``object`` for any other."""
    if isinstance(value, str) and TUPLE.fullmatch(value):
        return Sequence  # HyperPyYAML reads text in parentheses as a tuple
    return next((type_ for type_ in TYPE_NAMES if isinstance(value, type_)), object)


def _type_name(value: object) -> str:
    return TYPE_NAMES.get(_type_of(value), "an object")
