"""Objects as plain data: from a resolved YAML to JSON, and from JSON to modules.

`!new:torch.nn.Linear {in_features: 2}` becomes `{"new": ..., "arguments": {...}}`, with the class's
name in the module that defines it; so does a partial `!name:`. The grammar, in JSON:

    value    null, true, false, a text, a finite number, list, mapping, tuple or object
    list     [value, ...]
    mapping  {key: value, ...}, where no key is "new", "tuple" or "arguments"
    tuple    {"tuple": list}
    object   {"new": NAME, "arguments": list or mapping}, built by calling NAME
             {"name": NAME, "arguments": list or mapping}, NAME itself or a partial of it

NAME must be on the list of `sbkit.bundle.allowed`, and at most MAX_DEPTH levels may be nested. One
traversal reads and builds: only `find_allowed` turns a name into an object, and anything outside
the grammar is refused.
"""

import math
import reprlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ruamel.yaml.comments import CommentedMap, CommentedSeq

from sbkit.base.errors import BundleError, ConfigError
from sbkit.bundle.allowed import canonical, find_allowed
from sbkit.bundle.config import Plain
from sbkit.config.document import TUPLE, read_tuple, tag_of

ATTRIBUTE = "!apply:getattr"  # HyperPyYAML turns `!ref <tokenizer.vocab_size>` into it
TAGS = ("new", "name")
ARGUMENTS = "arguments"
RESERVED = {"new", "tuple", ARGUMENTS}  # `name` is also a usual key of plain data
MAX_DEPTH = 32


def to_plain(node: object, *, key: str, objects: Mapping[int, object]) -> Plain:
    """Turn a node of a resolved YAML into plain data.

    key: the YAML key that errors name.
    objects: the built objects whose attributes the node may refer to, by the `id` of their nodes.

    Raises:
        ConfigError: code would have to run to know the value.
    """
    tag = tag_of(node)
    if tag == ATTRIBUTE:
        return _attribute(node, key, objects)
    if tag.startswith(("!new:", "!name:")):
        keyword, name = tag[1:].split(":", 1)
        arguments: object = node if isinstance(node, CommentedMap | CommentedSeq) else {}
        return {keyword: canonical(name), ARGUMENTS: _children(arguments, key, objects)}
    if tag and tag != "!tuple":
        raise ConfigError(
            f"`{key}` cannot be exported, because it holds {tag}. Write the value itself, or a "
            "class by !new: or !name:."
        )
    return _children(getattr(node, "value", node), key, objects)


def _children(node: object, key: str, objects: Mapping[int, object]) -> Plain:
    if isinstance(node, dict):
        return {
            str(name): to_plain(child, key=key, objects=objects) for name, child in node.items()
        }
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
    raise ConfigError(
        f"`{key}` cannot be exported, because it holds {ATTRIBUTE} of an object other than the "
        "task's labels. Write the value."
    )


def build(plain: Plain, *, user_modules: frozenset[str] = frozenset(), depth: int = 0) -> Any:
    """Build the modules, activations and plain values that plain data describes.

    >>> build({"new": "torch.nn.modules.linear.Linear", "arguments": [2, 3]})
    Linear(in_features=2, out_features=3, bias=True)

    plain: data in the grammar above.
    user_modules: the modules that `--import` names.
    depth: how deep ``plain`` is nested in the data.

    Raises:
        BundleError: a name is not on the list, or the data is outside the grammar.
    """
    match plain:
        case None | bool() | int() | str():
            return plain
        case float() if math.isfinite(plain):
            return plain
        case {"tuple": list(items), **others} if not others:
            return tuple(_build_collection(items, user_modules, depth))
        case {"new": str(name), "arguments": arguments, **others} if not others:
            return _bind("!new", name, arguments, user_modules, depth)()
        case {"name": str(name), "arguments": arguments, **others} if not others:
            return _bind("!name", name, arguments, user_modules, depth)
    return _build_collection(plain, user_modules, depth)


def _bind(
    tag: str, name: str, arguments: Plain, user_modules: frozenset[str], depth: int
) -> Callable[..., Any]:
    """Return the class or activation that a name stands for, with its arguments bound."""
    target = find_allowed(tag, name, user_modules=user_modules)
    built = _build_collection(arguments, user_modules, depth)
    if not built:
        return target  # type: ignore[no-any-return]
    return partial(target, **built) if isinstance(built, dict) else partial(target, *built)


def _build_collection(plain: Plain, user_modules: frozenset[str], depth: int) -> Any:
    """Build the values of a list or a mapping; raises BundleError for anything else."""
    if isinstance(plain, list | dict) and depth < MAX_DEPTH:
        if isinstance(plain, list):
            return [build(item, user_modules=user_modules, depth=depth + 1) for item in plain]
        if not RESERVED & plain.keys():
            return {
                key: build(item, user_modules=user_modules, depth=depth + 1)
                for key, item in plain.items()
            }
    raise BundleError(
        f"A part of the model holds {reprlib.repr(plain)}, which is outside the grammar of "
        f"{__name__}. Export the model again."
    )
