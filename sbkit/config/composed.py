"""Foreign YAML as nodes with their tags and lines: composed, which constructs nothing.

Limits stand before each step, for a file may be written to be costly: its size before it is read,
its depth before it is composed, and what its references and aliases grow to before they are used.
"""

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hyperpyyaml.core import parse_arithmetic
from ruamel.yaml import YAML
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_regular
from sbkit.config.document import INCLUDE_TAG, PLACEHOLDER_TAG, REFERENCE_TAGS, no_yaml
from sbkit.config.references import REFERENCE, key_parts
from sbkit.config.tuples import TUPLE

LARGEST = 1 << 18  # bytes; SpeechBrain's largest is 30 kB
DEEPEST = 50  # levels
LONGEST = 10_000  # characters that references may make of one text
MOST = 100_000  # nodes that references and aliases may make of one file
MOST_FILES = 50
ROUNDS = 50  # of references that lead to references
STANDARD = "tag:yaml.org,2002:"
PLAIN = {f"{STANDARD}{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")}


class UnsafeError(Exception):
    """Something in a node that may not be followed; the reason completes a sentence."""


@dataclass(frozen=True)
class Scope:
    """A composed file, and what its includer writes beside the `!include:`, which wins."""

    path: Path
    root: Node
    beside: Node | None = None
    above: "Scope | None" = None
    opened: list[Path] = field(default_factory=list)  # by the whole family
    inner: "dict[int, Scope]" = field(default_factory=dict)  # by the id of their `!include:`
    texts: dict[int, tuple[str, int]] = field(default_factory=dict)

    def place(self, node: Node) -> str:
        """Name the file and the line of a node."""
        return f"{self.path}:{node.start_mark.line + 1}"

    def included(self, node: Node) -> "Scope":
        """Compose the file that an `!include:` names, once."""
        if id(node) not in self.inner:
            name = str(node.tag).removeprefix(INCLUDE_TAG)
            path = (self.path.parent / name).resolve()
            *_, outermost = self._family()
            if not path.is_relative_to(outermost.parent) or ".." in Path(name).parts:
                raise UnsafeError("leaves the folder of the YAML")
            if path in self._family() or len(self.opened) >= MOST_FILES:
                raise UnsafeError("includes itself, or too many files")
            self.opened.append(path)
            self.inner[id(node)] = Scope(path, compose(path), node, self, self.opened)
        return self.inner[id(node)]

    def reach(self, name: str) -> "tuple[Scope, Node]":
        """Follow `a[b][c]`, first in what stands beside the `!include:`, then in the file."""
        parts = key_parts(name)
        starts = [(self.above, self.beside), (self, self.root)]
        for scope, node in starts:
            found = None if scope is None or node is None else scope._follow(node, parts)
            if found is not None:
                return found
        raise UnsafeError(f"refers to `{name}`, which is not there")

    def settled(self, node: Node) -> "tuple[Scope, Node]":
        """Replace a whole reference by its target, and an include by its file."""
        scope = self
        for _ in range(ROUNDS):
            name = whole_reference(node)
            if name is not None and "." not in name:
                scope, node = scope.reach(name)
            elif str(node.tag).startswith(INCLUDE_TAG):
                scope = scope.included(node)
                node = scope.root
            else:
                return scope, node
        raise UnsafeError("refers to itself, or through too many references")

    def expand(self, node: Node) -> tuple[str, int]:
        """Return the text that HyperPyYAML would make of a node, and all characters it takes."""
        scope, node = self.settled(node)
        if id(node) not in scope.texts:
            is_reference = str(node.tag) in REFERENCE_TAGS and isinstance(node, ScalarNode)
            scope.texts[id(node)] = scope._join(node) if is_reference else _plain_text(node)
        return scope.texts[id(node)]

    def _join(self, node: Node) -> tuple[str, int]:
        source = str(_value(node))
        _refuse_hiding(source)
        pieces = REFERENCE.split(source)
        size = len(source)
        for index in range(1, len(pieces), 2):
            name = pieces[index].strip("<>")
            scope, target = self.reach(name) if "." not in name else (self, self.root)
            pieces[index], more = scope.expand(target)
            size += more
            if size > LONGEST:
                raise UnsafeError(f"grows to more than {LONGEST} characters")
        text = "".join(pieces)
        if REFERENCE.search(text):
            raise UnsafeError("builds a reference out of pieces")
        return compute(text), size

    def _follow(self, node: Node, parts: tuple[str, ...]) -> "tuple[Scope, Node] | None":
        scope = self
        for depth, part in enumerate(parts):
            scope, node = scope.settled(node) if depth else (scope, node)
            found = [value for key, value in members(node) if key.value == part]
            if not found:
                return None
            node = found[0]
        return scope, node

    def _family(self) -> Iterator[Path]:
        yield self.path.resolve()
        if self.above is not None:
            yield from self.above._family()


def compose(path: Path) -> Node:
    """Read one file into nodes; raises SbkitError for one too large, too deep, or no YAML."""
    text = _text(path)
    try:
        _refuse_depth(path, text)
        root: Node | None = YAML().compose(text)
    except SbkitError:
        raise
    except Exception as error:  # ruamel.yaml meets some bad YAML with errors of many kinds
        raise no_yaml(path, error) from error
    if root is None:
        raise SbkitError(f"{path} must hold YAML, but is empty. Name another file.")
    return root


def _plain_text(node: Node) -> tuple[str, int]:
    if not isinstance(node, ScalarNode) or str(node.tag) not in (*PLAIN, PLACEHOLDER_TAG):
        raise UnsafeError("puts an object or a list into a text")
    text = str(None if str(node.tag) == PLACEHOLDER_TAG else _value(node))
    if REFERENCE.search(text):
        raise UnsafeError("names a text with a reference in it")
    return text, len(text)


def _value(node: Node) -> object:
    """Construct a plain value as HyperPyYAML does, whose text it takes: `x:` is None, 017 is 17."""
    constructor = YAML().constructor
    try:
        if str(node.tag) in PLAIN:
            value: object = constructor.construct_object(node, deep=True)
            str(value)  # Python refuses whole numbers of more than 4300 digits
            return value
        return constructor.construct_scalar(node)
    except Exception as error:  # ruamel.yaml meets what is no number with errors of many kinds
        raise UnsafeError(f"holds a value that cannot be read ({type(error).__name__})") from error


def members(node: Node) -> Iterator[tuple[Node, Node]]:
    """Yield the pairs of a mapping, then those it merges, which its own hide."""
    pairs = node.value if isinstance(node, MappingNode) else []
    yield from pairs
    for key, value in pairs:
        if str(key.tag) == f"{STANDARD}merge":
            for each in value.value if isinstance(value, SequenceNode) else [value]:
                yield from members(each)


def children(node: Node) -> list[Node]:
    """List what stands right below a node, the keys of a mapping too."""
    if isinstance(node, MappingNode):
        return [each for pair in node.value for each in pair]
    return list(node.value) if isinstance(node, SequenceNode) else []


def whole_reference(node: Node) -> str | None:
    """Return the name when a node is a reference and nothing else."""
    if str(node.tag) not in REFERENCE_TAGS or not isinstance(node, ScalarNode):
        return None
    match = REFERENCE.fullmatch(node.value)
    return match[1].strip("<>") if match else None


def compute(text: str) -> str:
    """Do the arithmetic of a reference: of numbers, and nothing that could take forever."""
    _refuse_hiding(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            parts = list(ast.walk(ast.parse(text, mode="eval")))
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return text
        constants = (part.value for part in parts if isinstance(part, ast.Constant))
        if not all(value is None or isinstance(value, int | float) for value in constants):
            raise UnsafeError("computes with quoted text")
        try:
            return str(parse_arithmetic(text))
        except (ArithmeticError, ValueError):
            return text


def _refuse_hiding(text: str) -> None:
    """Refuse what HyperPyYAML computes to something else than it shows, before it is parsed."""
    if any(quote in text for quote in "'\"\\"):
        raise UnsafeError("computes with quoted text, which can hide what it comes to")
    if "**" in text or re.search(r"\*\s+\*", text):
        raise UnsafeError("computes a power, which may take forever")


def unsafe_tuple(text: str) -> str | None:
    """Name the tag inside `(...)`, which HyperPyYAML gives to a loader that builds anything."""
    if not re.fullmatch(TUPLE.pattern, text.strip(), re.DOTALL):
        return None
    if len(text) > LONGEST:
        return f"of {len(text)} characters"
    try:
        root = yaml.compose(f"[{text.strip()[1:-1]}]", Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return "that cannot be read"
    tags = (node.tag for node in _each(root, set()))
    return next((f"with {tag.replace(STANDARD, '!!')}" for tag in tags if tag not in PLAIN), None)


def _each(node: Any, seen: set[int]) -> Iterator[Any]:
    """Visit every node of PyYAML's once, keys too."""
    if isinstance(node, tuple | list):
        for each in node:
            yield from _each(each, seen)
    elif id(node) not in seen:
        seen.add(id(node))
        yield node
        if not isinstance(node, yaml.ScalarNode):
            yield from _each(node.value, seen)


def _text(path: Path) -> str:
    try:
        return read_regular(path.resolve(), largest=LARGEST, what="Foreign YAML").decode()
    except UnicodeDecodeError as error:
        raise SbkitError(
            f"The YAML must be readable, but {path} is not (it is no UTF-8 text). Save it as UTF-8."
        ) from error


def _refuse_depth(path: Path, text: str) -> None:
    depth = 0
    for event in YAML().parse(text):
        depth += isinstance(event, CollectionStartEvent)
        depth -= isinstance(event, CollectionEndEvent)
        if depth > DEEPEST:
            line = event.start_mark.line + 1
            raise SbkitError(
                f"{path}:{line} must be at most {DEEPEST} levels deep, but is deeper. "
                "Read it before you use it."
            )
