"""Objects as plain data: from a resolved YAML to JSON, and from JSON to modules.

`!new:torch.nn.Linear {in_features: 2}` becomes `{"new": "torch.nn.Linear", "arguments": {...}}`,
a partial `!name:` likewise. Reading it back builds modules and nothing else.
"""

import functools
import pydoc
import sys
from collections.abc import Mapping
from typing import Any

from ruamel.yaml.comments import CommentedMap, CommentedSeq
from torch import nn

from sbkit.base.errors import SbkitError
from sbkit.config.document import tag_of
from sbkit.config.tuples import read_tuple

# What may be built without asking: places that hold modules and no side effects.
TRUSTED = (
    "torch.nn.",
    "sbkit.models.",
    "sbkit.audio.",
    "speechbrain.nnet.",
    "speechbrain.lobes.",
    "speechbrain.processing.",
)
ATTRIBUTE = "!apply:getattr"  # what HyperPyYAML makes of `!ref <tokenizer.vocab_size>`

Plain = Any  # what JSON can hold


def to_plain(node: object, *, key: str, objects: Mapping[int, object]) -> Plain:
    """Turn a node of a resolved YAML into plain data.

    ``objects`` gives, by the identity of their node, the objects whose attributes may be used.
    Raises SbkitError for what only running code could tell.
    """
    inner = functools.partial(to_plain, key=key, objects=objects)
    tag = tag_of(node)
    if tag == ATTRIBUTE and isinstance(node, CommentedSeq) and id(node[0]) in objects:
        return getattr(objects[id(node[0])], node[1])
    if tag.startswith(("!new:", "!name:")):
        kind, name = tag[1:].split(":", 1)
        return {kind: name, "arguments": _arguments(node, inner)}
    if tag and tag != "!tuple":
        raise SbkitError(
            f"`{key}` must be made of !new:, !name: and plain values to be exported, but holds "
            f"{tag}. Give it a class instead."
        )
    if isinstance(node, CommentedMap):
        return {name: inner(child) for name, child in node.items()}
    if isinstance(node, CommentedSeq):
        return [inner(child) for child in node]
    text = getattr(node, "value", node)
    if isinstance(text, str) and text.startswith("(") and text.endswith(")"):
        return {"tuple": list(read_tuple(text))}
    return text


def _arguments(node: object, inner: Any) -> Plain:
    if isinstance(node, CommentedMap):
        return {name: inner(child) for name, child in node.items()}
    if isinstance(node, CommentedSeq):
        return [inner(child) for child in node]
    return {}


def build(plain: Plain) -> Any:
    """Build what plain data describes; only modules, and functions of trusted places."""
    if isinstance(plain, list):
        return [build(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if "tuple" in plain:
        return tuple(plain["tuple"])
    for kind in ("new", "name"):
        if kind in plain:
            return _construct(kind, plain[kind], build(plain["arguments"]))
    return {name: build(item) for name, item in plain.items()}


def _construct(kind: str, name: str, arguments: Any) -> Any:
    made = _locate(kind, name)
    positional = arguments if isinstance(arguments, list) else []
    keywords = {} if isinstance(arguments, list) else arguments
    if kind == "new":
        return made(*positional, **keywords)
    return functools.partial(made, *positional, **keywords) if arguments else made


def _locate(kind: str, name: str) -> Any:
    """Find a class by its name; what counts is where the object found was defined.

    A name may lie: `speechbrain.core.os.system` is `posix.system`.
    """
    module_name = name.rsplit(".", 1)[0]
    made = pydoc.locate(name) if name.startswith(TRUSTED) or module_name in sys.modules else None
    home = f"{getattr(made, '__module__', None)}."
    is_module = isinstance(made, type) and issubclass(made, nn.Module)
    trusted = home.startswith(TRUSTED) and (kind == "name" or is_module) and callable(made)
    if not (trusted or is_module):
        raise SbkitError(
            f"A bundle may build only modules of {', '.join(place[:-1] for place in TRUSTED)}, or "
            f"of code that was imported before, but names {name}. Import its module first."
        )
    return made
