"""Objects as plain data: from a resolved YAML to JSON, and from JSON to modules.

`!new:torch.nn.Linear {in_features: 2}` becomes `{"new": ..., "arguments": {...}}`, with the class's
name in the module that defines it; a partial `!name:` likewise. Reading it back builds what stands
on the list of `sbkit.config.allowed` for bundles, and nothing else.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ruamel.yaml.comments import CommentedMap, CommentedSeq

from sbkit.base.errors import SbkitError
from sbkit.config.allowed import canonical, is_allowed, load
from sbkit.config.document import TUPLE, read_tuple, tag_of
from sbkit.inference.bundle.config import Plain

ATTRIBUTE = "!apply:getattr"  # what HyperPyYAML makes of `!ref <tokenizer.vocab_size>`
KINDS = ("new", "name")
ARGUMENTS = "arguments"


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


def names_of(plain: Plain) -> Iterator[tuple[str, str]]:
    """List the kind and the name of everything that plain data would build."""
    if (kind := _kind_of(plain)) is not None:
        yield kind, str(plain[kind])
        plain = plain[ARGUMENTS]
    below = plain.values() if isinstance(plain, dict) else plain
    for each in below if isinstance(plain, dict | list) else ():
        yield from names_of(each)


def build(plain: Plain, *, own: frozenset[str] = frozenset()) -> Any:
    """Build what plain data describes: modules and activations of the list, and plain values.

    ``own`` names modules of the user's, imported by --import. Raises SbkitError, and builds
    nothing, where anything else is named.
    """
    for kind, name in names_of(plain):
        if not is_allowed(f"!{kind}", name, own=own):
            raise SbkitError(
                f"A model must be built of modules on sbkit's list, but {name} is not on it. If it "
                f"is a class of yours, or of somebody whom you trust, pass --import "
                f"{name.rpartition('.')[0] or 'MODULE'}."
            )
    return _build(plain)


def _build(plain: Plain) -> Any:
    if isinstance(plain, list):
        return [_build(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if plain.keys() == {"tuple"}:
        return tuple(_build(plain["tuple"]))
    if (kind := _kind_of(plain)) is None:
        return {name: _build(item) for name, item in plain.items()}
    made = load(plain[kind])
    given = _build(plain[ARGUMENTS])
    make = partial(made, **given) if isinstance(given, dict) else partial(made, *given)
    if kind == "name":
        return make if given else made
    return make()


def _kind_of(plain: Plain) -> str | None:
    """Return whether plain data stands for an object ("new") or a class ("name"), or for itself."""
    if not isinstance(plain, dict):
        return None
    return next((kind for kind in KINDS if plain.keys() == {kind, ARGUMENTS}), None)
