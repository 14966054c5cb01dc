"""Module specifications: how a bundle describes the parts of its model in JSON.

`SpecWriter` turns a node of a resolved YAML into a specification, and `build_from_spec` builds
the part from it. `!new:torch.nn.Linear {in_features: 2}` becomes

    {"new": "torch.nn.modules.linear.Linear", "arguments": {"in_features": 2}}

which names the class by the module that defines it. This is the grammar of a specification:

    value    null, true, false, a text, a finite number, list, mapping, tuple or object
    list     [value, ...]
    mapping  {text: value, ...}, where no key is "new", "tuple" or "arguments"
    tuple    {"tuple": list}
    object   {"new": NAME, "arguments": list or mapping}, the result of calling NAME
             {"name": NAME, "arguments": list or mapping}, NAME itself if there are no arguments,
             else a functools.partial of NAME

NAME must be on the list of `allowed_classes`, and at most MAX_SPEC_DEPTH lists and mappings may be
nested. Only `find_allowed` turns a name into an object. Export and loading both refuse anything
outside the grammar.
"""

import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

from ruamel.yaml.comments import CommentedMap, CommentedSeq

from sbkit.base.errors import BundleError, ConfigError
from sbkit.bundle.allowed_classes import canonical, find_allowed
from sbkit.bundle.config import Plain
from sbkit.config.document import TUPLE, read_tuple, tag_of

GETATTR_TAG = "!apply:getattr"  # HyperPyYAML's form of `!ref <labels.size>`
ARGUMENTS_KEY = "arguments"
TUPLE_KEY = "tuple"
RESERVED_KEYS = {"new", TUPLE_KEY, ARGUMENTS_KEY}  # a mapping may have a key `name`
MAX_SPEC_DEPTH = 32
CLASS_MODULES = re.compile(r'"(?:new|name)": "([\w.]+)\.\w+"')  # in the JSON of a specification


# ---- export


@dataclass(frozen=True)
class SpecWriter:
    """Turn the node of a key of a resolved YAML into a specification.

    objects: built objects by the `id` of their node. The YAML may refer to their attributes.
    """

    key: str
    objects: Mapping[int, object]

    def write(self, node: object) -> Plain:
        """Raise ConfigError for values outside the grammar, and for values computed by code."""
        tag = tag_of(node)
        value = getattr(node, "value", node)
        if tag == GETATTR_TAG:
            return self._read_attribute(node)
        if tag.startswith(("!new:", "!name:")):
            keyword, name = tag[1:].split(":", 1)
            arguments: Plain = {}
            if isinstance(node, CommentedMap | CommentedSeq):
                arguments = self._write_collection(node)
            elif value not in (None, ""):
                raise self._refusal(f"{tag} has the single argument {value!r}")
            return {keyword: canonical(name), ARGUMENTS_KEY: arguments}
        if tag and tag != "!tuple":
            raise self._refusal(f"it holds {tag}")
        if isinstance(value, dict | list):
            return self._write_collection(value)
        if isinstance(value, str) and TUPLE.fullmatch(value):
            return {TUPLE_KEY: self._write_collection(list(read_tuple(value)))}
        if value is None or _is_scalar(value):
            return value
        raise self._refusal(f"it holds {value!r}")

    def _write_collection(self, node: dict[object, object] | list[object]) -> Plain:
        if isinstance(node, list):
            return [self.write(child) for child in node]
        for name in node:
            if not isinstance(name, str) or name in RESERVED_KEYS:
                raise self._refusal(f"a mapping has the key {name!r}")
        return {str(name): self.write(child) for name, child in node.items()}

    def _read_attribute(self, node: object) -> Plain:
        """Return the value of `!apply:getattr [object, name]`."""
        match node:
            case [target, str(name)] if id(target) in self.objects and not name.startswith("_"):
                value = getattr(self.objects[id(target)], name, None)
                if _is_scalar(value):
                    return value
        raise self._refusal("it refers to an attribute that is neither a text nor a number")

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(f"`{self.key}` cannot be exported, because {reason}.", keys=(self.key,))


def _is_scalar(value: object) -> TypeGuard[bool | int | float | str]:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, bool | int | str)


# ---- loading


def build_from_spec(spec: Plain, *, user_modules: frozenset[str] = frozenset()) -> Any:
    """Build the module, activation or plain value that a specification describes.

    >>> build_from_spec({"new": "torch.nn.modules.linear.Linear", "arguments": [2, 3]})
    Linear(in_features=2, out_features=3, bias=True)

    user_modules: the modules that the user named with `--import`.
    """
    return _build(spec, user_modules, 0)


def _build(spec: Plain, user_modules: frozenset[str], depth: int) -> Any:
    if spec is None or _is_scalar(spec):
        return spec
    if isinstance(spec, dict):
        if spec.keys() == {TUPLE_KEY} and isinstance(spec[TUPLE_KEY], list):
            return tuple(_build_collection(spec[TUPLE_KEY], user_modules, depth))
        if spec.keys() == {"new", ARGUMENTS_KEY}:
            return _resolve_callable("new", spec, user_modules, depth)()
        if spec.keys() == {"name", ARGUMENTS_KEY}:
            return _resolve_callable("name", spec, user_modules, depth)
    return _build_collection(spec, user_modules, depth)


def _resolve_callable(
    tag_key: str, spec: dict[str, Plain], user_modules: frozenset[str], depth: int
) -> Callable[..., Any]:
    """Return the class or activation of an object, with its arguments bound."""
    if not isinstance(spec[tag_key], str):
        raise _refusal(spec)
    target: Callable[..., Any] = find_allowed(
        f"!{tag_key}", spec[tag_key], user_modules=user_modules
    )
    arguments = _build_collection(spec[ARGUMENTS_KEY], user_modules, depth)
    if not arguments:
        return target
    if isinstance(arguments, dict):
        return partial(target, **arguments)
    return partial(target, *arguments)


def _build_collection(spec: Plain, user_modules: frozenset[str], depth: int) -> Any:
    """Build the values of a list or a mapping; raise BundleError for anything else."""
    if depth >= MAX_SPEC_DEPTH:
        raise _refusal(spec)
    if isinstance(spec, list):
        return [_build(item, user_modules, depth + 1) for item in spec]
    if isinstance(spec, dict) and not RESERVED_KEYS & spec.keys():
        return {name: _build(item, user_modules, depth + 1) for name, item in spec.items()}
    raise _refusal(spec)


def _refusal(spec: Plain) -> BundleError:
    return BundleError(f"config.json has an invalid specification of a part: {reprlib.repr(spec)}")
