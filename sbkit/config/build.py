"""Build the objects of a resolved HyperPyYAML text, and name the key of the one that fails."""

import inspect
import pydoc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml
from hyperpyyaml import load_hyperpyyaml
from ruamel.yaml import constructor, resolver
from ruamel.yaml.loader import Loader, SafeLoader
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from sbkit.base.errors import SbkitError
from sbkit.config.document import (
    BUILDER_TAGS,
    TUPLE,
    Document,
    Keys,
    did_you_mean,
    dotted,
    read_tuple,
    tag_of,
    walk,
)


class _BuildError(Exception):
    """An object that could not be built, and where it stands."""

    def __init__(self, node: Node, cause: Exception) -> None:
        super().__init__(str(cause))
        self.node = node
        self.cause = cause
        self.keys: Keys = ()


class _Loader(Loader):
    """HyperPyYAML's loader, which knows the key of the object that fails."""

    def construct_object(self, node: Node, deep: bool = True) -> Any:
        try:
            return super().construct_object(node, deep)
        except _BuildError:
            raise
        except Exception as error:
            raise _BuildError(node, error) from error

    def construct_document(self, node: Node) -> Any:
        try:
            return super().construct_document(node)
        except _BuildError as failure:
            failure.keys = next(_keys_to(failure.node, node, set()), ())
            raise


class _KnobLoader(SafeLoader):
    """Reads plain values as HyperPyYAML does and builds nothing."""


class _Object:
    """Stands where an object would be built."""


_OBJECT = _Object()
for _prefix in ("!", "tag:yaml.org,2002:python/"):
    _KnobLoader.add_multi_constructor(_prefix, lambda *_: _OBJECT)
_KnobLoader.add_constructor("!tuple", lambda reader, node: reader.construct_scalar(node))


@contextmanager
def clean_ruamel() -> Iterator[None]:
    """Restore ruamel afterwards: HyperPyYAML changes it for the whole process.

    Its tuple rule goes into ruamel's global table, and after a failure every constructor stays
    deep. The rule is also taken out while reading, for callers outside sbkit leave it behind.
    """
    rules = list(resolver.implicit_resolvers)
    resolver.implicit_resolvers[:] = [rule for rule in rules if rule[1] != "!tuple"]
    defaults = [
        (each.BaseConstructor.construct_object, each.BaseConstructor.construct_object.__defaults__)
        for each in (yaml.constructor, constructor)
    ]
    try:
        yield
    finally:
        resolver.implicit_resolvers[:] = rules
        for function, default in defaults:
            function.__defaults__ = default


def plain_values(text: str) -> dict[str, object]:
    """Read the root-level values of a resolved text that hold no object."""
    values: dict[str, object] = _KnobLoader(text).get_single_data()
    return {
        key: _tuples(value)
        for key, value in values.items()
        if not key.startswith("__") and not _holds_object(value)
    }


def build(document: Document, text: str) -> dict[str, object]:
    """Build the resolved text of a document.

    Raises SbkitError: with the key, the file and the line of the object that cannot be built.
    """
    _check_names(document)
    try:
        hparams: dict[str, object] = load_hyperpyyaml(text, loader=_Loader)
    except _BuildError as error:
        raise SbkitError(_sentence(document, error)) from error.cause
    return hparams


def _sentence(document: Document, error: _BuildError) -> str:
    name = str(error.node.tag).partition(":")[2]
    where = f"`{dotted(error.keys) or name}` ({document.place(error.keys)})"  # a copy has no key
    if isinstance(error.cause, SbkitError):
        return f"{error.cause} ({where})"
    text = str(error.cause.args[-1] if error.cause.args else error.cause).partition("\n")[0]
    wrong = re.search(r"unexpected keyword argument '(\w+)'", text)
    advice = did_you_mean(wrong[1], _arguments(name)) if wrong else ""
    if "missing" in text and str(error.node.tag).startswith("!new:"):
        advice = " Add them, or write `!name:` where the recipe gives them."
    return (
        f"{where} must have arguments that `{name}` takes, but it raised "
        f"{type(error.cause).__name__}: {text}.{advice or ' Correct them.'}"
    )


def _arguments(name: str) -> list[str]:
    found = pydoc.locate(name)
    try:
        return list(inspect.signature(found).parameters) if callable(found) else []
    except ValueError:  # a builtin without a signature
        return []


def _check_names(document: Document) -> None:
    """Find every class and function that the file names, before the first is called."""
    for above, each in document.family():
        for keys, node in walk(each.root):
            if tag_of(node).startswith(BUILDER_TAGS):
                kind, _, name = tag_of(node).partition(":")
                problem = _name_problem(kind, name)
                if problem:
                    raise SbkitError(
                        f"`{dotted((*above, *keys))}: {kind}:{name}` ({each.place(keys)}) {problem}"
                    )


def _name_problem(kind: str, name: str) -> str:
    try:
        found = pydoc.locate(name)
    except pydoc.ErrorDuringImport as error:
        return f"must be importable, but raised {error}. Correct it."
    if found is None:
        return f"must name something that can be imported, but {_nearest_name(name)}"
    if kind == "!new" and not inspect.isclass(found):
        return "must name a class, but it is none. Use `!apply:` for a function."
    if kind == "!apply" and not inspect.isroutine(found):
        return "must name a function, but it is none. Use `!new:` for a class."
    return ""


def _nearest_name(name: str) -> str:
    """Offer the nearest attribute of the longest part of the name that is there."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        holder = pydoc.locate(".".join(parts[:end]))
        if holder is not None:
            near = did_you_mean(parts[end], dir(holder))
            return f"`{'.'.join(parts[:end])}` has no `{parts[end]}`.{near or ' Correct the name.'}"
    return (
        f"there is no module `{parts[0]}`. Correct the name; the folder of a file of your own must "
        "be on PYTHONPATH."
    )


def _keys_to(wanted: Node, node: Node, seen: set[int]) -> Iterator[Keys]:
    """Find the keys that lead from one YAML node to another below it."""
    if node is wanted:
        yield ()
    if id(node) in seen:
        return
    seen.add(id(node))
    children: list[tuple[str | int, Node]] = []
    if isinstance(node, MappingNode):
        children = [(key.value, value) for key, value in node.value]
    elif isinstance(node, SequenceNode):
        children = list(enumerate(node.value))
    for key, child in children:
        yield from ((key, *below) for below in _keys_to(wanted, child, seen))


def _holds_object(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_object, value.values()))
    if isinstance(value, list):
        return any(map(_holds_object, value))
    return value is _OBJECT


def _tuples(value: object) -> object:
    """Turn text such as ``(1, 2)`` into a tuple, as HyperPyYAML does."""
    if isinstance(value, dict):
        return {key: _tuples(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_tuples(each) for each in value]
    if isinstance(value, str) and TUPLE.fullmatch(value):
        return read_tuple(value)
    return value
