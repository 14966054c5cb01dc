"""Refuse YAML of others that would do more than describe a model; nothing in it is built.

Loading HyperPyYAML runs code: `!new:`, `!apply:` and `!applyref:` call what they name,
`!!python/...` builds anything, and so does a text in parentheses. Here the composed nodes are
walked, and what is not on the list of `sbkit.config.allowed` is refused.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ruamel.yaml.nodes import Node, ScalarNode, SequenceNode

from sbkit.base.errors import SbkitError
from sbkit.base.text import printable
from sbkit.config.allowed import is_data, refusal
from sbkit.config.composed import (
    MOST,
    PLAIN,
    STANDARD,
    Scope,
    UnsafeError,
    children,
    compose,
    unsafe_tuple,
    whole_reference,
)
from sbkit.config.document import INCLUDE_TAG, PLACEHOLDER_TAG, REFERENCE_TAGS
from sbkit.config.tuples import TUPLE

Refuse = Callable[[Scope, Node], None]

DATA_TAGS = PLAIN | {f"{STANDARD}{name}" for name in ("merge", "timestamp")}
TEXT_TAGS = (*PLAIN, *REFERENCE_TAGS)
TUPLE_TAG = "!tuple"  # as a run's own YAML writes `(0.9, 0.98)`
WRITTEN_TAGS = (PLACEHOLDER_TAG, TUPLE_TAG)
NAMING_KINDS = ("!new", "!name", "!apply")
ATTRIBUTE = "!apply:getattr"  # what a run's own YAML holds for `!ref <tokenizer.vocab_size>`
LONGEST_TEXT = 60  # characters that are shown
LONGEST_NUMBER = 1000  # digits; no knob has so many, and Python refuses 4300


@dataclass(frozen=True)
class Refused:
    """One node that may not be built: FILE:LINE, what stands there, and why."""

    where: str
    tag: str
    text: str
    reason: str


def judge(yaml_file: Path, *, own: frozenset[str] = frozenset()) -> list[Refused]:
    """List every node that is refused, of a file and of those that it includes.

    ``own`` names modules whose classes and functions the user vouches for.
    Raises SbkitError when a file cannot be read as YAML within its limits.
    """
    return list(_Walk(own).over(Scope(yaml_file, compose(yaml_file))))


def refuse_foreign(yaml_file: Path, *, own: frozenset[str] = frozenset()) -> None:
    """Raise SbkitError for the first node of a YAML that would do more than describe a model."""
    first = next(iter(judge(yaml_file, own=own)), None)
    if first is not None:
        raise SbkitError(
            f"{first.where} must only name what is on sbkit's list, because loading YAML runs "
            f"what it names, but `{first.tag}` {first.reason}. Read it; if it is a module of your "
            "own or one that you trust, pass --import MODULE."
        )


def refuse_bomb(yaml_file: Path) -> None:
    """Raise SbkitError for a YAML that grows without bound when read, or is no regular file."""
    scope = Scope(yaml_file, compose(yaml_file))
    try:
        _Walk().refuse_size(scope, scope.root)
    except (UnsafeError, RecursionError) as error:
        why = str(error) if isinstance(error, UnsafeError) else "refers to itself"
        raise SbkitError(
            f"{yaml_file} must be a run's YAML of ordinary size, but it {why}. Restore it."
        ) from error


@dataclass
class _Walk:
    """One look at every node; what one expands to is counted once."""

    own: frozenset[str] = frozenset()
    sizes: dict[int, int] = field(default_factory=dict)  # by the id of the node

    def over(self, scope: Scope) -> Iterator[Refused]:
        """Yield from a file, then from those it includes."""
        yield from self._judge(scope, scope.root, self.refuse_size)
        waiting, seen = [scope.root], set()
        while waiting:
            node = waiting.pop()
            if id(node) not in seen:
                seen.add(id(node))
                yield from self._judge(scope, node, self._refuse)
                if str(node.tag).startswith(INCLUDE_TAG):
                    yield from self._included(scope, node)
                waiting += reversed(children(node))

    def refuse_size(self, scope: Scope, node: Node) -> None:
        """Refuse a node that grows beyond bounds; raises UnsafeError."""
        if self._size(scope, node) > MOST:
            raise UnsafeError(f"grows to more than {MOST} nodes through its references and aliases")

    def _included(self, scope: Scope, node: Node) -> Iterator[Refused]:
        try:
            inner = scope.included(node)
        except UnsafeError as error:
            yield _refused(scope, node, error)
        except SbkitError as error:
            yield _refused(scope, node, UnsafeError(f"cannot be followed: {error}"))
        else:
            yield from self.over(inner)

    def _judge(self, scope: Scope, node: Node, refuse: Refuse) -> Iterator[Refused]:
        try:
            refuse(scope, node)
        except UnsafeError as error:
            yield _refused(scope, node, error)
        except RecursionError:
            yield _refused(scope, node, UnsafeError("refers to itself"))

    def _refuse(self, scope: Scope, node: Node) -> None:
        tag = str(node.tag)
        kind, _, name = tag.partition(":")
        if tag in REFERENCE_TAGS:
            _refuse_reference(scope, node)
            return
        if tag == ATTRIBUTE:
            _refuse_getattr(scope, node)
            return
        reason = refusal(kind, name, own=self.own) if kind in NAMING_KINDS else None
        known = kind in (*NAMING_KINDS, "!include") or tag in (*DATA_TAGS, *WRITTEN_TAGS)
        if reason is not None or not known:
            raise UnsafeError(reason or "is not on the list of tags")
        if tag == TUPLE_TAG and not (isinstance(node, ScalarNode) and TUPLE.fullmatch(node.value)):
            raise UnsafeError("is not a text in parentheses, and drops its first and last letter")
        if isinstance(node, ScalarNode):
            if tag == f"{STANDARD}int" and len(node.value) > LONGEST_NUMBER:
                raise UnsafeError(f"holds a number of {len(node.value)} digits")
            _refuse_tuple(str(node.value))

    def _size(self, scope: Scope, node: Node) -> int:
        """Count the nodes that one expands to; the first visit is open until it is counted."""
        key = id(node)
        if self.sizes.get(key) == 0:
            raise UnsafeError("contains itself")
        if key not in self.sizes:
            self.sizes[key] = 0
            below = [(scope, each) for each in children(node)]
            name = whole_reference(node)
            if name is not None:
                below.append(scope.reach(name.partition(".")[0]))
            self.sizes[key] = 1 + sum(self._size(*each) for each in below)
        return self.sizes[key]


def _refuse_reference(scope: Scope, node: Node) -> None:
    scope, target = scope.settled(node)
    name = whole_reference(target)
    if name is not None:
        name, attribute = name.split(".", maxsplit=1)
        inner, target = scope.reach(name)
        _refuse_no_data(inner.settled(target)[1], attribute)
    elif isinstance(target, ScalarNode) and str(target.tag) in TEXT_TAGS:
        _refuse_tuple(scope.expand(target)[0])


def _refuse_getattr(scope: Scope, node: Node) -> None:
    """Allow exactly `!apply:getattr [OBJECT, NAME]`, the form of a resolved reference."""
    match node:
        case SequenceNode(value=[target, ScalarNode(tag=tag, value=attribute)]) if (
            str(tag) == f"{STANDARD}str"
        ):
            _refuse_no_data(scope.settled(target)[1], attribute)
        case _:
            raise UnsafeError("takes other arguments than an object and a name")


def _refuse_no_data(target: Node, attribute: str) -> None:
    """Allow only data of a new object: a method might be called by what gets it."""
    kind, _, class_name = str(target.tag).partition(":")
    if kind != "!new" or not is_data(class_name, attribute):
        raise UnsafeError(f"takes `{attribute}`, which is no data of a `!new:` object")


def _refuse_tuple(text: str) -> None:
    inside = unsafe_tuple(text)
    if inside is not None:
        raise UnsafeError(f"comes to a tuple {inside}")


def _refused(scope: Scope, node: Node, error: UnsafeError) -> Refused:
    tag = printable(str(node.tag).replace(STANDARD, "!!"))
    text = str(node.value)[:LONGEST_TEXT] if isinstance(node, ScalarNode) else ""
    return Refused(printable(scope.place(node)), tag, printable(text), printable(str(error)))
