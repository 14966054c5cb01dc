"""Values that replace those of a YAML: every key must be there, and every value of its kind."""

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path, PurePath

from hyperpyyaml.core import recursive_update
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.tag import Tag

from sbkit.base.errors import SbkitError
from sbkit.config.document import (
    BUILDER_TAGS,
    INCLUDE_TAG,
    PLACEHOLDER_TAG,
    REFERENCE_TAGS,
    TUPLE,
    Document,
    Keys,
    dotted,
    nearest,
    tag_of,
    walk,
)
from sbkit.config.references import BUILT, Scope, check_arithmetic, text_of

OBJECT = "an object"
AUTO = {"batch_seconds": "auto"}  # a word that a number may give way to, and the other way round


def apply_overrides(document: Document, overrides: Mapping[str, object], above: Keys = ()) -> None:
    """Set the overrides in the tree; ``above`` is the key this file is included under.

    Raises SbkitError: a key that is not there (with the nearest one), a value of another kind, or a
    ``!PLACEHOLDER`` that nothing has filled.
    """
    for key, value in overrides.items():
        _replace(document, document.root, (key,), value, above)
    _expand_home(document.root)
    _check_placeholders(document, above)
    check_arithmetic(document)
    for keys, node in walk(document.root):
        if tag_of(node).startswith(INCLUDE_TAG):
            beside = node if isinstance(node, CommentedMap) else {}
            plain = {key: _plain(document, value) for key, value in beside.items()}
            apply_overrides(document.included(node), plain, (*above, *keys))


def _expand_home(node: object) -> None:
    """Write out the home folder: after `=` no shell does, and a folder would be called `~`."""
    if not isinstance(node, dict | list):
        return
    for key, child in [*(node.items() if isinstance(node, dict) else enumerate(node))]:
        if isinstance(child, str) and child.startswith("~/"):
            node[key] = str(Path(child).expanduser())
        elif text_of(child).startswith("~/"):
            child.value = str(Path(text_of(child)).expanduser())
        _expand_home(child)


def _check_placeholders(document: Document, above: Keys) -> None:
    empty = [keys for keys, node in walk(document.root) if tag_of(node) == PLACEHOLDER_TAG]
    if empty:
        names = ", ".join(f"`{dotted((*above, *keys))}`" for keys in empty)
        given = " ".join(f"--{dotted((*above, *keys))}=..." for keys in empty)
        raise SbkitError(
            f"{names} must be given a value, but {document.place(empty[0])} is a !PLACEHOLDER. "
            f"Pass {given}"
        )


def _plain(document: Document, node: object) -> object:
    """Return the value of a key beside an ``!include:``, whose references reach this file."""
    if isinstance(node, CommentedMap) and not tag_of(node):
        return {key: _plain(document, value) for key, value in node.items()}
    return Scope(document).evaluate(node)


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
    return next((name for each, name in kinds.items() if isinstance(value, each)), OBJECT)


def converted(default: object, value: object) -> object:
    """Return the value as one of the default's kind; raises TypeError where it is of another."""
    wanted, came = kind(default), kind(value)
    if came == OBJECT:
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
        _same_elements(default, value)
    return value


def _same_elements(default: list[object], value: list[object]) -> None:
    wanted = {kind(each).replace("whole ", "") for each in default}
    if len(wanted) == 1 and not {kind(each).replace("whole ", "") for each in value} <= wanted:
        raise TypeError(f"a list of values that are each {wanted.pop()}")


def _replace(
    document: Document, parent: CommentedMap | CommentedSeq, keys: Keys, value: object, above: Keys
) -> None:
    """Replace the value at ``keys[-1]`` of its parent, or what a mapping names inside it."""
    key = _existing_key(document, parent, keys, above)
    node = parent[key]
    inside = isinstance(node, CommentedMap | CommentedSeq) or tag_of(node).startswith(BUILDER_TAGS)
    if not isinstance(value, Mapping):
        parent[key] = _checked(document, node, keys, value, above)
    elif tag_of(node).startswith(INCLUDE_TAG):
        parent[key] = _beside(node, value)
    elif tag_of(node) in REFERENCE_TAGS:
        raise SbkitError(
            f"`{_option(keys, above)}` must have keys of its own to override, but refers to "
            f"{text_of(node)} ({document.place(keys)}). Override them there."
        )
    elif inside and (node or tag_of(node)):
        _replace_inside(document, node, keys, value, above)
    else:
        parent[key] = _checked(document, node, keys, value, above)


def _replace_inside(
    document: Document, node: object, keys: Keys, values: Mapping[str, object], above: Keys
) -> None:
    # An object without arguments is a scalar: there is no key in it.
    parent = node if isinstance(node, CommentedMap | CommentedSeq) else CommentedMap()
    for key, value in values.items():
        _replace(document, parent, (*keys, key), value, above)


def _beside(node: object, values: Mapping[str, object]) -> CommentedMap:
    """Write the overrides of an included file beside its ``!include:``."""
    beside = node
    if not isinstance(beside, CommentedMap):
        beside = CommentedMap()
        beside.yaml_set_ctag(Tag(suffix=tag_of(node)))
    recursive_update(beside, values)
    return beside


def _existing_key(
    document: Document, parent: CommentedMap | CommentedSeq, keys: Keys, above: Keys
) -> str | int:
    key = keys[-1]
    if isinstance(parent, CommentedMap) and key in parent:
        return key
    # HyperPyYAML overrides a list of an included file as a whole, or not at all.
    is_list = isinstance(parent, CommentedSeq) and not above
    if is_list and str(key).isdecimal() and int(key) < len(parent):
        return int(key)
    holder = "" if len(keys) == 1 else f" under `{dotted(keys[:-1])}`"
    raise SbkitError(
        f"`{_option(keys, above)}` must name a key of {document.path}, but there is none of that "
        f"name{holder}.{_advice(document, parent, keys)}"
    )


def _advice(document: Document, parent: CommentedMap | CommentedSeq, keys: Keys) -> str:
    """Offer the nearest key beside it, or the same key elsewhere in the file."""
    known = parent if isinstance(parent, CommentedMap) else range(len(parent))
    beside = nearest(str(keys[-1]), known)
    elsewhere = (each for each, _ in walk(document.root) if each[-1:] == keys[-1:])
    found = next(elsewhere, None) if beside is None else (*keys[:-1], beside)
    if found:
        return f" Did you mean `{dotted(found)}`?"
    return " Add it in the YAML if it belongs there." if len(keys) > 1 else " Correct the name."


def _option(keys: Keys, above: Keys) -> str:
    return dotted((*above, *keys)) if above else f"--{dotted(keys)}"


def _checked(document: Document, node: object, keys: Keys, value: object, above: Keys) -> object:
    """Return the value as one of the YAML's kind; raises SbkitError for another kind."""
    if value is BUILT:
        return None
    if isinstance(value, PurePath):
        value = str(value)
    if tag_of(node) in REFERENCE_TAGS and "." in text_of(node):
        return value  # an attribute of an object that is not built yet: of any kind
    scope = Scope(document)
    default = {} if tag_of(node).startswith(INCLUDE_TAG) else scope.evaluate(node)
    parts = default if isinstance(default, CommentedSeq) else [default]
    if any(scope.evaluate(part) is BUILT for part in parts):
        raise SbkitError(
            f"`{_option(keys, above)}` must stay the object of {document.place(keys)}, but "
            f"{value!r} came. Override one of its arguments, as in --{dotted(keys)}.argument="
            "value, or edit the YAML."
        )
    try:
        number = 0.0 if keys[-1] in AUTO and default == AUTO[str(keys[-1])] else default
        return value if AUTO.get(str(keys[-1])) == value else converted(number, value)
    except TypeError as error:
        raise SbkitError(
            f"`{_option(keys, above)}` must be {error}, as in {document.place(keys)}, but is "
            f"{value!r} ({kind(value)}). Pass {error}."
        ) from error
