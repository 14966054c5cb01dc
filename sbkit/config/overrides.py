"""Parse ``--key=value`` arguments, and override values of a YAML by values of the same type."""

import re
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path, PurePath
from typing import Any

from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import YAMLError

from sbkit.base.errors import ConfigError
from sbkit.base.messages import nearest
from sbkit.base.ranges import as_flag, constraint_of, takes_mapping
from sbkit.config.document import (
    BUILDER_TAGS,
    ONLY_TAG,
    REFERENCE_TAGS,
    REPLACED_WHOLE,
    TUPLE,
    Document,
    Keys,
    Only,
    dotted,
    holds_object,
    merges,
    parse_yaml,
    plain_value,
    remove_tuple_rule,
    resolve_references,
    tag_of,
    text_of,
    walk,
)
from sbkit.config.keys import KEYS, Key

OPTION = re.compile(r"--(?P<path>[^=]+)(?:=(?P<value>.*))?", re.DOTALL)
KEY_PATH = re.compile(r"[^.\[\]\s]+(?:\.[^.\[\]\s]+)*")
NEGATIVE_NUMBER = re.compile(r"-(?:[\d.]+(?:[eE][-+]?\d+)?|\.inf)")  # values that look like options
NAMED_VALUES = {"manifest": "train=a.csv", "where": "gender=female_feminine"}  # keys and examples
KIND_NAMES: dict[type, str] = {
    type(None): "null",
    bool: "true or false",  # before Real, because Python's bool is a number
    Real: "a number",
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


# ---- reading arguments


def parse_command(arguments: Sequence[str]) -> tuple[Path, dict[str, object]]:
    """Read ``FILE.yaml --key=value ...``, or print the usage for `--help` and exit."""
    if {"--help", "-h"} & {*arguments}:
        print(USAGE)
        raise SystemExit(0)
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError("The first argument must be a YAML file: train.py FILE.yaml --key=value")
    return Path(arguments[0]), parse_overrides(arguments[1:])


def parse_overrides(arguments: Sequence[str]) -> dict[str, object]:
    """Read ``--key value``, ``--key=value`` and ``--flag``; ``--a.b`` nests.

    ``--manifest NAME=FILE`` and ``--where COLUMN=VALUE`` may be repeated; several values of a name
    become a list.

    >>> parse_overrides(["--lr=1e-3", "--Transformer.dropout", "0", "--compile"])
    {'lr': 0.001, 'Transformer': {'dropout': 0}, 'compile': True}
    """
    overrides: dict[str, object] = {}
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        option = OPTION.fullmatch(argument)
        if option is None or not KEY_PATH.fullmatch(option["path"]):
            raise ConfigError(f"`{argument}` is not of the form --key=value or --key.inner=value.")
        text = option["value"]
        if text is None:
            text = "true"
            next_argument = remaining[0] if remaining else "--"
            if not next_argument.startswith("-") or NEGATIVE_NUMBER.fullmatch(next_argument):
                text = remaining.pop(0)
        path = option["path"]
        if path in NAMED_VALUES and text != "null" and not text.startswith(("{", ONLY_TAG)):
            _add_named_value(overrides, path, text)
        else:
            _set_nested(overrides, (*path.split("."),), _read_value(argument, path, text))
    return overrides


def nest_overrides(values: Mapping[str, object]) -> dict[str, object]:
    """Convert overrides from Python to the form of the command line: plain values, nested.

    >>> nest_overrides({"output_folder": Path("runs/a"), "Transformer.dropout": 0.2})
    {'output_folder': 'runs/a', 'Transformer': {'dropout': 0.2}}
    """
    leaves: dict[Keys, object] = {}
    for path, value in values.items():
        for keys, leaf in _leaves(tuple(str(path).split(".")), value):
            if keys in leaves:
                raise ConfigError(
                    f"`{dotted(keys)}` is overridden twice, by {leaves[keys]!r} and {leaf!r}."
                )
            leaves[keys] = leaf
    overrides: dict[str, object] = {}
    for keys in sorted(leaves, key=len):
        outer = [keys[:n] for n in range(1, len(keys)) if leaves.get(keys[:n], {}) != {}]
        if outer:
            raise ConfigError(
                f"`{dotted(keys)}` is a key inside `{dotted(outer[0])}`, which another override "
                f"sets to {leaves[outer[0]]!r}."
            )
        _set_nested(overrides, keys, leaves[keys])
    return overrides


def _leaves(keys: Keys, value: object) -> Iterator[tuple[Keys, object]]:
    """Yield the values inside nested mappings, with the keys that lead to them.

    An empty mapping is a value that removes all keys; `Only` first removes them, then sets its own.
    """
    if not isinstance(value, Mapping):
        yield keys, _from_python(value)
        return
    if isinstance(value, Only) or not value:
        yield keys, type(value)()
    for key, inner in value.items():
        yield from _leaves((*keys, str(key)), inner)


def _from_python(value: Any) -> object:
    """Convert paths and the types of NumPy and torch to types that a YAML has."""
    if isinstance(value, list | tuple):
        return [_from_python(item) for item in value]
    if hasattr(value, "tolist"):  # numbers and arrays of NumPy, tensors
        return value.tolist()
    is_device = type(value).__module__ == "torch"  # the command line does not import torch
    return str(value) if is_device or isinstance(value, PurePath) else value


def _set_nested(overrides: dict[str, Any], keys: Keys, value: object) -> None:
    """Set a value after earlier overrides: a mapping changes some of their keys, `{}` drops all."""
    for (*parents, name), leaf in _leaves(keys, value):
        mapping = overrides
        for key in map(str, parents):
            if not (isinstance(inner := mapping.get(key), dict) and inner):
                inner = mapping[key] = Only() if key in mapping else {}
            mapping = inner
        mapping[str(name)] = leaf


def _add_named_value(overrides: dict[str, object], key: str, text: str) -> None:
    name, equals, value = text.partition("=")
    if not name or not equals or (key == "manifest" and not value):
        example = f"--{key} {NAMED_VALUES[key]}"
        raise ConfigError(f"`--{key}` needs NAME=VALUE, not {text!r}. Write {example}.")
    mapping = overrides.get(key)
    earlier = mapping.get(name) if isinstance(mapping, dict) else None
    if earlier is not None:
        values = [*earlier, value] if isinstance(earlier, list) else [earlier, value]
    _set_nested(overrides, (key, name), value if earlier is None else values)


def _read_value(argument: str, path: str, text: str) -> object:
    """Read null, true, false, a number, a list, a mapping or quoted text; else plain text.

    Dates and whole numbers in an unusual form, such as 007, stay text.
    """
    if not text:
        raise ConfigError(f"`{argument}` needs a value. Write null for none.")
    if text.startswith("!") and not text.startswith(f"{ONLY_TAG} "):
        raise ConfigError(f"`{argument}` needs a plain value. To change an object, edit the YAML.")
    is_yaml_syntax = text[0] in "![{\"'"
    if "#" in text and not is_yaml_syntax:
        return text  # YAML would drop what follows as a comment
    remove_tuple_rule()
    try:
        value = plain_value(parse_yaml(f"{path}: {text}")[path])
        if holds_object(value):
            raise ValueError(text)
    except (YAMLError, ValueError, LookupError) as error:  # an impossible date, a tag
        if not is_yaml_syntax:
            return text
        fault = f"`{argument}`: {text!r} is not a list, mapping or quoted text in YAML."
        raise ConfigError(fault) from error
    if is_yaml_syntax or value is None or isinstance(value, bool | float):
        return value
    return value if isinstance(value, int) and str(value) == text else text


# ---- replacing values


def apply_overrides(document: Document, overrides: Mapping[str, object]) -> None:
    """Set the overrides in the tree; refuse a missing key or a value of another type."""
    remaining = dict(overrides)
    for key in REPLACED_WHOLE:  # first, so that references into these mappings see the new values
        if key in remaining and key in document.root:
            document.root[key] = remaining.pop(key)
    if remaining:
        defaults = resolve_references(document, needs_values=False)
        for key, value in remaining.items():
            _replace(document, document.root, defaults, (key,), value)


def _replace(
    document: Document, parent: Container, defaults: Container, keys: Keys, value: object
) -> None:
    """Replace the value at ``keys[-1]`` of its parent; of a mapping, only some keys."""
    parent_key = KEYS.get(dotted(keys[:-1]), Key())
    if takes_mapping(parent_key.values):  # the user chooses its keys
        parent[keys[-1]] = value
        return
    key = _existing_key(document, parent, keys)
    node = parent[key]
    default = defaults[key]
    if value is None and len(keys) == 1 and tag_of(node).startswith(BUILDER_TAGS):
        del parent[key]
        return
    is_plain = isinstance(value, Mapping) and not isinstance(value, Only)
    if is_plain and tag_of(node) in REFERENCE_TAGS:
        raise ConfigError(
            f"`{dotted(keys)}` ({document.place(keys)}) refers to {text_of(node)}. Override the "
            f"keys of {text_of(node)}."
        )
    has_keys = tag_of(node) or (isinstance(node, Container) and node)
    if not (isinstance(value, Mapping) and merges(value, keys) and has_keys):
        parent[key] = _convert_override(document, default, keys, value)
        return
    # In an object without arguments, every key is refused as missing.
    children = node if isinstance(node, Container) else CommentedMap()
    for inner_key, inner_value in value.items():
        _replace(document, children, default, (*keys, inner_key), inner_value)


def _existing_key(document: Document, parent: Container, keys: Keys) -> str | int:
    """Return ``keys[-1]`` as a key or an index of the parent."""
    key = keys[-1]
    if isinstance(parent, CommentedMap) and key in parent:
        return key
    if isinstance(parent, CommentedSeq) and str(key).isdecimal() and int(key) < len(parent):
        return int(key)
    sibling = nearest(str(key), parent if isinstance(parent, CommentedMap) else ())
    candidates = [(*keys[:-1], sibling)] if sibling else []
    candidates += [path for path, _ in walk(document.root) if path[-1:] == (key,)]
    advice = f" Did you mean `{dotted(candidates[0])}`?" if candidates else ""
    where = f" under `{dotted(keys[:-1])}`" if len(keys) > 1 else ""
    raise ConfigError(
        f"`{dotted(keys)}` overrides nothing: {document.path} has no such key{where}.{advice}"
    )


def _convert_override(document: Document, default: object, keys: Keys, value: object) -> object:
    """Convert a value to the type of the YAML's value; null accepts any plain value."""
    if tag_of(default) == "!apply:getattr":  # how HyperPyYAML reads `!ref <tokenizer.vocab_size>`
        return value  # its type is unknown until the object is built
    if tag_of(default):
        raise ConfigError(
            f"`{dotted(keys)}` would replace the object at {document.place(keys)} by {value!r}. "
            f"Override an argument: `{dotted(keys)}.NAME`."
        )
    if isinstance(default, list) and isinstance(value, list):
        item_default = default[0] if len({*map(_kind, default)}) == 1 else None
        return [
            _convert_override(document, item_default, (*keys, index), item)
            for index, item in enumerate(value)
        ]
    if isinstance(value, PurePath):
        value = str(value)
    if isinstance(default, bool):
        value = as_flag(value)
    kind, value_kind = _kind(default), _kind(value)
    if kind is str and value_kind is Real:
        return str(value)
    if kind is value_kind is Real:
        number: Any = value
        if isinstance(default, float):
            return float(number)
        return int(number) if float(number).is_integer() else number  # 1000 for 1e3
    if value_kind is not object and kind in (type(None), value_kind):
        return value
    if dotted(keys) in KEYS and value in KEYS[dotted(keys)].values:  # such as null
        return value
    expected = "a plain value" if value_kind is object else KIND_NAMES.get(kind, "an object")
    type_ = list[str] if kind is Sequence else int if isinstance(default, int) else float
    is_advised = kind in (Real, Sequence) and value_kind is str
    advice = f" {constraint_of(type_).advice_for(value)}" if is_advised else ""
    raise ConfigError(
        f"`{dotted(keys)}` must be {expected}, as in {document.place(keys)}, not {value!r} "
        f"({KIND_NAMES.get(value_kind, 'an object')}).{advice.rstrip()}"
    )


def _kind(value: object) -> type:
    """Return the key of `KIND_NAMES` that fits a value; ``object`` for any other."""
    if isinstance(value, str) and TUPLE.fullmatch(value):
        return Sequence  # HyperPyYAML reads text in parentheses as a tuple
    return next((kind for kind in KIND_NAMES if isinstance(value, kind)), object)
