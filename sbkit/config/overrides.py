"""The command line: overrides of a YAML's values, which keep their keys and kinds."""

import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path, PurePath

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
    clean_ruamel,
    dotted,
    nearest,
    resolve_references,
    tag_of,
    text_of,
    walk,
)

OPTION = re.compile(r"--(?P<path>[^=]+)(?:=(?P<value>.*))?", re.DOTALL)
PATH = re.compile(r"[^.\[\]\s]+(?:\.[^.\[\]\s]+|\[[^.\[\]\s]+\])*")
NEGATIVE_NUMBER = re.compile(r"-[\d.]+(?:[eE][-+]?\d+)?")  # a value that looks like an option
ATTRIBUTE_TAG = "!apply:getattr"  # the tag that HyperPyYAML gives `!ref <tokenizer.vocab_size>`
WORDS_FOR_NUMBERS = {"batch_seconds": "auto"}  # by key; a number and its word replace each other
KINDS: dict[type, str] = {
    type(None): "null",
    bool: "true or false",  # before int, its base
    int: "a whole number",
    float: "a number",
    Mapping: "a mapping",
    Sequence: "a list",
    date: "a date",
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
            f"The first argument must be a YAML file{first}. Write: torchrun train.py "
            "hparams/ctc.yaml [--key=value ...]"
        )
    return Path(arguments[0]), parse_overrides(arguments[1:])


def parse_overrides(arguments: Sequence[str]) -> dict[str, object]:
    """Read ``--key value``, ``--key=value`` and ``--flag``; ``--a.b`` and ``--a[b]`` nest.

    ``--manifest NAME=FILE`` may be repeated; several files of one name become a list.

    >>> parse_overrides(["--lr=1e-3", "--Transformer.dropout", "0", "--compile"])
    {'lr': 0.001, 'Transformer': {'dropout': 0}, 'compile': True}
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
            following = remaining[0] if remaining else "-"
            is_value = following[:1] != "-" or NEGATIVE_NUMBER.fullmatch(following)
            text = remaining.pop(0) if is_value else "true"
        if option["path"] == "manifest" and text != "null" and not text.startswith("{"):
            _add_manifest(overrides, argument, text)
            continue
        _put(overrides, re.findall(r"[^.\[\]]+", option["path"]), _read_value(argument, text))
    return overrides


def _put(overrides: dict[str, object], keys: Sequence[str], value: object) -> None:
    *above, last = keys
    for key in above:
        inner = overrides.get(key)
        overrides[key] = inner = inner if isinstance(inner, dict) else {}
        overrides = inner
    overrides[last] = value


def _add_manifest(overrides: dict[str, object], argument: str, text: str) -> None:
    name, _, file = text.partition("=")
    if not name or not file:
        raise ConfigError(
            f"`{argument}` needs NAME=FILE, not {text!r}. Write --manifest train=a.csv."
        )
    manifest = overrides.get("manifest")
    earlier = manifest.get(name, []) if isinstance(manifest, dict) else []
    files = [*(earlier if isinstance(earlier, list) else [earlier]), file]
    _put(overrides, ("manifest", name), files if earlier else file)


def _read_value(argument: str, text: str) -> object:
    if not text or text.startswith("!"):
        raise ConfigError(
            f"`{argument}` needs a plain value. Pass null for none and '\"\"' for empty text; to "
            "change an object, edit the YAML."
        )
    is_quoted = text[0] in "[{\"'"
    try:
        with clean_ruamel():
            value: object = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError) as error:  # ValueError for an impossible date
        if not is_quoted:
            return text
        raise ConfigError(
            f"`{argument}`: {text!r} is not a list, mapping or quoted text in YAML. Close its "
            "brackets and quotes."
        ) from error
    return value if is_quoted or value is None or isinstance(value, int | float) else text


# -- replacing values ------------------------------------------------------------------------------


def apply_overrides(document: Document, overrides: Mapping[str, object]) -> None:
    """Set the overrides in the tree; refuse a missing key or a value of another kind."""
    remaining = dict(overrides)
    for (key,) in WHOLE_KEYS:  # before references into their values are resolved
        if key in remaining and key in document.root:
            document.root[key] = remaining.pop(key)
    if remaining:
        defaults = resolve_references(document, needs_values=False)
        for key, value in remaining.items():
            _replace(document, document.root, defaults, (key,), value)


def _replace(
    document: Document, parent: Container, defaults: Container, keys: Keys, value: object
) -> None:
    """Replace the value at ``keys[-1]`` of its parent; a mapping replaces values inside it."""
    key = _existing_key(document, parent, keys)
    node, default = parent[key], defaults[key]
    if isinstance(value, Mapping) and tag_of(node) in REFERENCE_TAGS:
        raise ConfigError(
            f"`--{dotted(keys)}` has no keys to override, because it refers to {text_of(node)} "
            f"({document.place(keys)}). Override them there."
        )
    is_container = isinstance(node, Container)
    if isinstance(value, Mapping) and (tag_of(node) or (node and is_container)):
        arguments = node if is_container else CommentedMap()  # an object without arguments
        for inner_key, inner_value in value.items():
            _replace(document, arguments, default, (*keys, inner_key), inner_value)
    else:
        parent[key] = _checked(document, default, keys, value)


def _existing_key(document: Document, parent: Container, keys: Keys) -> str | int:
    key = keys[-1]
    if isinstance(parent, CommentedMap) and key in parent:
        return key
    if isinstance(parent, CommentedSeq) and str(key).isdecimal() and int(key) < len(parent):
        return int(key)
    sibling = nearest(str(key), parent if isinstance(parent, CommentedMap) else ())
    elsewhere = (path for path, _ in walk(document.root) if path[-1:] == (key,))
    path = (*keys[:-1], sibling) if sibling else next(elsewhere, None)
    advice = f"Did you mean `{dotted(path)}`?" if path else "Correct it, or add it in the YAML."
    where = f" under `{dotted(keys[:-1])}`" if keys[1:] else ""
    raise ConfigError(
        f"`--{dotted(keys)}` overrides nothing: {document.path} has no such key{where}. {advice}"
    )


def _checked(document: Document, default: object, keys: Keys, value: object) -> object:
    """Convert a value to the kind of the YAML's value, or refuse it."""
    value = str(value) if isinstance(value, PurePath) else value
    if tag_of(default) == ATTRIBUTE_TAG:
        return value  # the kind is not known before the object is built
    if tag_of(default):
        raise ConfigError(
            f"`--{dotted(keys)}` would replace the object at {document.place(keys)} by {value!r}. "
            f"Override an argument, as in --{dotted(keys)}.argument=value, or edit the YAML."
        )
    word = WORDS_FOR_NUMBERS.get(str(keys[-1]))
    if word and value == word:
        return value
    try:
        return converted(0.0 if word and default == word else default, value)
    except TypeError as error:
        raise ConfigError(
            f"`--{dotted(keys)}` must be {error}, as in {document.place(keys)}, not {value!r} "
            f"({kind_of(value)})."
        ) from error


def kind_of(value: object) -> str:
    """Name the kind of a plain value for a user."""
    if isinstance(value, str):
        return "a list" if TUPLE.fullmatch(value) else "text"
    return next((name for type_, name in KINDS.items() if isinstance(value, type_)), "an object")


def converted(default: object, value: object) -> object:
    """Convert a value to the kind of the default, or raise TypeError with that kind."""
    default_kind, value_kind = kind_of(default), kind_of(value)
    if value_kind == "an object":
        raise TypeError("a plain value")
    if default_kind == "a number" and isinstance(value, int) and value_kind == "a whole number":
        return float(value)
    if default_kind == "a whole number" and isinstance(value, float) and value.is_integer():
        return int(value)
    if default_kind == "text" and value_kind == "a whole number":
        return str(value)
    if default_kind not in ("null", value_kind):
        raise TypeError(default_kind)
    if isinstance(default, list) and isinstance(value, list):
        default_kinds, value_kinds = (
            {kind_of(item).replace("whole ", "") for item in items} for items in (default, value)
        )
        if len(default_kinds) == 1 and not value_kinds <= default_kinds:
            raise TypeError(f"a list of values that are each {default_kinds.pop()}")
    return value
