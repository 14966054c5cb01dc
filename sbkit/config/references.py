"""The tree of a HyperPyYAML file with every ``!ref <key>`` and ``!copy <key>`` resolved.

HyperPyYAML writes an unresolved node into text in silence, and leaves ``-1 * 2`` as text:
both are refused here.
"""

import re
from copy import deepcopy
from datetime import date
from pathlib import Path
from typing import Any

from hyperpyyaml.core import recursive_resolve
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from sbkit.base.errors import SbkitError
from sbkit.config.document import (
    REFERENCE,
    REFERENCE_TAGS,
    TUPLE,
    Document,
    Keys,
    did_you_mean,
    dotted,
    read_tuple,
    referenced,
    tag_of,
    text_of,
)

PLACEHOLDER_TAG = "!PLACEHOLDER"
OBJECT = object()  # stands where an object would be built
ARITHMETIC = re.compile(r"[-+*/%().\deE\s]*")
NEGATIVE = re.compile(r"(?:^|[-+*/%(])\s*-\s*[\d.(]")


def resolve_references(document: Document, *, are_filled: bool = True) -> CommentedMap:
    """Resolve a copy of the document's tree; an object that is referred to is the node itself.

    are_filled: every ``!PLACEHOLDER`` has a value by now; otherwise it is null.
    Raises SbkitError: with the key, the line, and the nearest key that is there.
    """
    root = deepcopy(document.root)

    def resolve(node: Any, keys: Keys) -> object:
        if isinstance(node, CommentedMap | CommentedSeq):
            for key in [*node] if isinstance(node, CommentedMap) else range(len(node)):
                node[key] = resolve(node[key], (*keys, key))
        where = f"`{dotted(keys)}: {tag_of(node)} {text_of(node)}` ({document.place(keys)})"
        if tag_of(node) == PLACEHOLDER_TAG and are_filled:
            raise SbkitError(f"{where} must be given a value. Pass --{dotted(keys)}=...")
        if tag_of(node) == PLACEHOLDER_TAG:
            return None
        value = _follow(root, node, where) if tag_of(node) in REFERENCE_TAGS else node
        if isinstance(value, str) and value.startswith("~/"):  # after `=` no shell expands it
            return str(Path(value).expanduser())
        return value

    resolve(root, ())
    return root


def _follow(root: CommentedMap, node: object, where: str) -> object:
    text = text_of(node)
    if not referenced(node):
        raise SbkitError(f"{where} must name a key. Write it in angle brackets: `!ref <key>`.")
    is_whole = REFERENCE.fullmatch(text) is not None
    for keys in referenced(node):
        target = _reach(root, keys, where)
        if target is None and is_whole:
            return None  # of what becomes known when a run begins, such as `encoder_config`
        if tag_of(target) in REFERENCE_TAGS:
            raise SbkitError(
                f"{where} must name what is resolved, but that is itself resolved later. Move "
                f"`{dotted(keys)}` above."
            )
        if not is_whole and (tag_of(target) or isinstance(target, dict | list)):
            raise SbkitError(
                f"{where} must have values in its text, but `{dotted(keys)}` is an object. Name a "
                "value."
            )
    try:
        value: object = recursive_resolve(text, [], root, tag_of(node) == "!copy")
    except ArithmeticError as error:
        raise SbkitError(
            f"{where} must come to a number, but fails: {error}. Correct it."
        ) from error
    is_number = isinstance(value, str) and not is_whole and ARITHMETIC.fullmatch(value)
    if is_number and NEGATIVE.search(str(value)):
        raise SbkitError(
            f"{where} must come to a number, but stays the text {value!r}: HyperPyYAML does not "
            "compute with negative numbers. Write the result."
        )
    return value


def _reach(root: CommentedMap, keys: Keys, where: str) -> object:
    node: object = root
    for key in keys:
        if node is None:
            return None
        if not isinstance(node, dict) or key not in node:
            near = did_you_mean(str(key), node if isinstance(node, dict) else ())
            advice = near or " Correct the name."
            raise SbkitError(f"{where} must reach a key, but there is no `{key}`.{advice}")
        node = node[key]
    return node


def plain_value(node: Any) -> Any:
    """Turn a resolved node into Python's own values; what would build an object is `OBJECT`."""
    if tag_of(node):
        return OBJECT
    if isinstance(node, dict):
        return {key: plain_value(value) for key, value in node.items()}
    if isinstance(node, list):
        return [plain_value(value) for value in node]
    if isinstance(node, str):
        return read_tuple(node) if TUPLE.fullmatch(node) else str(node)
    if node is None or isinstance(node, bool | date):
        return node
    return int(node) if isinstance(node, int) else float(node)


def holds_object(value: object) -> bool:
    """Return whether a plain value has an object in it."""
    if isinstance(value, dict | list):
        return any(map(holds_object, value.values() if isinstance(value, dict) else value))
    return value is OBJECT
