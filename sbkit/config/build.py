"""Build the objects of a resolved HyperPyYAML text, and name the key of the one that fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml
from hyperpyyaml import load_hyperpyyaml
from ruamel.yaml import constructor, resolver
from ruamel.yaml.loader import Loader
from ruamel.yaml.nodes import MappingNode, Node

from sbkit.base.errors import SbkitError
from sbkit.config.document import Document, Keys, dotted


class _BuildError(Exception):
    """An object that could not be built, and the keys that lead to it from ``above``."""

    def __init__(self, node: Node, cause: Exception) -> None:
        super().__init__(str(cause))
        self.node, self.cause = node, cause
        self.above, self.keys = node, Keys()


class _Loader(Loader):
    """HyperPyYAML's loader, which knows the key of the object that fails."""

    def construct_object(self, node: Node, deep: bool = True) -> Any:
        try:
            return super().construct_object(node, deep)
        except _BuildError as failure:
            is_map = isinstance(node, MappingNode)
            below = (
                ((key.value, each) for key, each in node.value) if is_map else enumerate(node.value)
            )
            failure.keys = (*(key for key, each in below if each is failure.above), *failure.keys)
            failure.above = node
            raise
        except Exception as error:
            raise _BuildError(node, error) from error


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


def build(document: Document, text: str) -> dict[str, object]:
    """Build the resolved text of a document.

    Raises SbkitError: with the key, the file and the line of the object that cannot be built.
    """
    try:
        hparams: dict[str, object] = load_hyperpyyaml(text, loader=_Loader)
    except _BuildError as error:
        raise SbkitError(_sentence(document, error)) from error.cause
    return hparams


def _sentence(document: Document, error: _BuildError) -> str:
    kind, _, name = str(error.node.tag).partition(":")
    where = f"`{dotted(error.keys)}` ({document.place(error.keys)})"
    if isinstance(error.cause, SbkitError):
        return f"{error.cause} ({where})"
    text = str(error.cause.args[-1] if error.cause.args else error.cause).partition("\n")[0]
    advice = "Correct it; a module of your own must lie beside the YAML, or on PYTHONPATH."
    if isinstance(error.cause, TypeError):
        advice = "Correct its arguments."
        if "missing" in text and kind == "!new":
            advice = "Add them, or write `!name:` where the recipe gives them."
    return (
        f"{where} must be something that `{name or kind}` can make, but it raised "
        f"{type(error.cause).__name__}: {text}. {advice}"
    )
