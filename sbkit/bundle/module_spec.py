"""Objects as plain data: from a resolved YAML to JSON, and from JSON to modules.

`!new:torch.nn.Linear {in_features: 2}` becomes `{"new": ..., "arguments": {...}}`, with the class's
name in the module that defines it; a partial `!name:` likewise. The grammar, in JSON:

    value    null, true, false, a text, a finite number, list, mapping, tuple or object
    list     [value, ...]
    mapping  {key: value, ...}, where no key is "new", "tuple" or "arguments"
    tuple    {"tuple": list}
    object   {"new": NAME, "arguments": list or mapping}, which is made by calling NAME
             {"name": NAME, "arguments": list or mapping}, NAME itself or a partial of it

NAME is a text on the list of `sbkit.bundle.allowed`, and MAX_DEPTH levels are nested at most. One
traversal reads and builds: a name becomes an object by `find_allowed` or not at all, and whatever
is outside of the grammar is refused.
"""

import math
import reprlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from ruamel.yaml.comments import CommentedMap, CommentedSeq

from sbkit.base.errors import SbkitError
from sbkit.bundle.allowed import canonical, find_allowed
from sbkit.bundle.config import Plain
from sbkit.config.document import TUPLE, read_tuple, tag_of

ATTRIBUTE = "!apply:getattr"  # what HyperPyYAML makes of `!ref <tokenizer.vocab_size>`
TAGS = ("new", "name")
ARGUMENTS = "arguments"
RESERVED = {"new", "tuple", ARGUMENTS}  # `name` is a usual key of plain data, too
MAX_DEPTH = 32


def to_plain(node: object, *, key: str, objects: Mapping[int, object]) -> Plain:
    """Turn a node of a resolved YAML into plain data.

    ``objects`` gives, by the identity of their node, the objects whose attributes may be used.
    Raises SbkitError for what only running code could tell.
    """
    tag = tag_of(node)
    if tag == ATTRIBUTE:
        return _attribute(node, key, objects)
    if tag.startswith(("!new:", "!name:")):
        kind, name = tag[1:].split(":", 1)
        arguments: object = {} if not isinstance(node, CommentedMap | CommentedSeq) else node
        return {kind: canonical(name), ARGUMENTS: _children(arguments, key, objects)}
    if tag and tag != "!tuple":
        raise SbkitError(
            f"`{key}` must be made of !new:, !name: and plain values to be exported, but holds "
            f"{tag}. Write the value itself, or a class, in its place."
        )
    return _children(getattr(node, "value", node), key, objects)


def _children(node: object, key: str, objects: Mapping[int, object]) -> Plain:
    if isinstance(node, dict):
        below = node.items()
        return {str(name): to_plain(child, key=key, objects=objects) for name, child in below}
    if isinstance(node, list):
        return [to_plain(child, key=key, objects=objects) for child in node]
    if isinstance(node, str) and TUPLE.fullmatch(node):
        return {"tuple": list(read_tuple(node))}
    return node


def _attribute(node: object, key: str, objects: Mapping[int, object]) -> Plain:
    match node:
        case [target, str(name)] if id(target) in objects and not name.startswith("_"):
            value = getattr(objects[id(target)], name, None)
            if isinstance(value, bool | int | float | str):
                return value
    raise SbkitError(
        f"`{key}` must take nothing but data of the task's labels to be exported, but holds "
        f"{ATTRIBUTE} of something else. Write the value."
    )


def build(plain: Plain, *, user_modules: frozenset[str] = frozenset(), depth: int = 0) -> Any:
    """Build what plain data describes: modules and activations of the list, and plain values.

    ``user_modules``: those that --import names; ``depth``: how many levels are above.
    Raises SbkitError for a name that is not on the list, and for anything outside of the grammar.
    """
    match plain:
        case None | bool() | int() | str():
            return plain
        case float() if math.isfinite(plain):
            return plain
        case {"tuple": list(items), **others} if not others:
            return tuple(_build_collection(items, user_modules, depth))
        case {"new": str(name), "arguments": arguments, **others} if not others:
            return _bind(
                find_allowed("!new", name, user_modules=user_modules),
                arguments,
                user_modules,
                depth,
            )()
        case {"name": str(name), "arguments": arguments, **others} if not others:
            return _bind(
                find_allowed("!name", name, user_modules=user_modules),
                arguments,
                user_modules,
                depth,
            )
    return _build_collection(plain, user_modules, depth)


def _bind(target: Any, arguments: Plain, user_modules: frozenset[str], depth: int) -> Any:
    given = _build_collection(arguments, user_modules, depth)
    if not given:
        return target
    return partial(target, **given) if isinstance(given, dict) else partial(target, *given)


def _build_collection(plain: Plain, user_modules: frozenset[str], depth: int) -> Any:
    """Build the values of a list or a mapping; raise SbkitError for anything else."""
    if isinstance(plain, list | dict) and depth < MAX_DEPTH:
        if isinstance(plain, list):
            return [build(item, user_modules=user_modules, depth=depth + 1) for item in plain]
        if not RESERVED & plain.keys():
            return {
                key: build(item, user_modules=user_modules, depth=depth + 1)
                for key, item in plain.items()
            }
    raise SbkitError(
        f"A part of a model must be described by the grammar of {__name__}, but holds "
        f"{reprlib.repr(plain)}. Export the model again."
    )
