"""Values that replace those of a YAML: every key must be there, and every value of its kind."""

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import PurePath
from typing import Any

from ruamel.yaml.comments import CommentedMap, CommentedSeq

from sbkit.base.errors import SbkitError
from sbkit.config.document import (
    REFERENCE_TAGS,
    TUPLE,
    WHOLE_KEYS,
    Document,
    Keys,
    dotted,
    nearest,
    tag_of,
    text_of,
    walk,
)
from sbkit.config.references import resolve_references

ATTRIBUTE = "!apply:getattr"  # what HyperPyYAML makes of `!ref <tokenizer.vocab_size>`
AUTO = {"batch_seconds": "auto"}  # a word that a number may give way to, and the other way round


def apply_overrides(document: Document, overrides: Mapping[str, object]) -> None:
    """Set the overrides in the tree.

    Raises SbkitError: a key that is not there (with the nearest one), or a value of another kind.
    """
    whole = {key for key in overrides if (key,) in WHOLE_KEYS} & document.root.keys()
    for key in whole:  # before references to what is in them are resolved
        document.root[key] = overrides[key]
    if others := {key: value for key, value in overrides.items() if key not in whole}:
        defaults = resolve_references(document, are_filled=False)
        for key, value in others.items():
            _replace(document, document.root, defaults, (key,), value)


def kind(value: object) -> str:
    """Return what sort of plain value this is, in a user's words."""
    if isinstance(value, str):
        return "a list" if TUPLE.fullmatch(value) else "text"
    kinds: dict[type, str] = {
        type(None): "null",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        Mapping: "a mapping",
        Sequence: "a list",
        date: "a date",
    }
    return next((name for each, name in kinds.items() if isinstance(value, each)), "an object")


def converted(default: object, value: object) -> object:
    """Return the value as one of the default's kind; raises TypeError where it is of another."""
    wanted, came = kind(default), kind(value)
    if came == "an object":
        raise TypeError("a plain value")
    if wanted == "a number" and isinstance(value, int) and came == "a whole number":
        return float(value)
    if wanted == "a whole number" and isinstance(value, float) and value.is_integer():
        return int(value)
    if wanted == "text" and came == "a whole number":
        return str(value)
    if wanted not in ("null", came):
        raise TypeError(wanted)
    if isinstance(default, list) and isinstance(value, list):
        kinds, others = ({kind(e).replace("whole ", "") for e in each} for each in (default, value))
        if len(kinds) == 1 and not others <= kinds:
            raise TypeError(f"a list of values that are each {kinds.pop()}")
    return value


def _replace(
    document: Document,
    parent: CommentedMap | CommentedSeq,
    defaults: Any,
    keys: Keys,
    value: object,
) -> None:
    """Replace the value at ``keys[-1]`` of its parent, or what a mapping names inside it."""
    key = _existing_key(document, parent, keys)
    node, default = parent[key], defaults[key]
    if not isinstance(value, Mapping):
        parent[key] = _checked(document, default, keys, value)
    elif tag_of(node) in REFERENCE_TAGS:
        raise SbkitError(
            f"`--{dotted(keys)}` must have keys of its own to override, but refers to "
            f"{text_of(node)} ({document.place(keys)}). Override them there."
        )
    elif tag_of(node) or (node and isinstance(node, CommentedMap | CommentedSeq)):
        # An object without arguments is a scalar: there is no key in it.
        inside = node if isinstance(node, CommentedMap | CommentedSeq) else CommentedMap()
        for inner, each in value.items():
            _replace(document, inside, default, (*keys, inner), each)
    else:
        parent[key] = _checked(document, default, keys, value)


def _existing_key(document: Document, parent: CommentedMap | CommentedSeq, keys: Keys) -> str | int:
    key = keys[-1]
    if isinstance(parent, CommentedMap) and key in parent:
        return key
    if isinstance(parent, CommentedSeq) and str(key).isdecimal() and int(key) < len(parent):
        return int(key)
    beside = nearest(str(key), parent if isinstance(parent, CommentedMap) else ())
    elsewhere = (each for each, _ in walk(document.root) if each[-1:] == (key,))
    found = (*keys[:-1], beside) if beside else next(elsewhere, None)
    advice = f"Did you mean `{dotted(found)}`?" if found else "Correct it, or add it in the YAML."
    holder = f" under `{dotted(keys[:-1])}`" if keys[1:] else ""
    raise SbkitError(
        f"`--{dotted(keys)}` must name a key of {document.path}, but there is none of that "
        f"name{holder}. {advice}"
    )


def _checked(document: Document, default: Any, keys: Keys, value: object) -> object:
    """Return the value as one of the YAML's kind; raises SbkitError for another kind."""
    value = str(value) if isinstance(value, PurePath) else value
    if tag_of(default) == ATTRIBUTE:
        return value  # of an object that is not built yet: of any kind
    if tag_of(default):
        raise SbkitError(
            f"`--{dotted(keys)}` must stay the object of {document.place(keys)}, but {value!r} "
            f"came. Override one of its arguments, as in --{dotted(keys)}.argument=value, or edit "
            "the YAML."
        )
    try:
        word = AUTO.get(str(keys[-1]))
        number = 0.0 if word and default == word else default
        return value if word and value == word else converted(number, value)
    except TypeError as error:
        raise SbkitError(
            f"`--{dotted(keys)}` must be {error}, as in {document.place(keys)}, but is "
            f"{value!r} ({kind(value)}). Pass {error}."
        ) from error
