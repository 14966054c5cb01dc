"""`sbkit check --untrusted`: refuse foreign YAML that would do more than describe a model.

Loading HyperPyYAML runs code: `!new:`, `!apply:` and `!applyref:` call what they name,
`!!python/...` builds anything, and so does a text in parentheses. Here nothing is constructed: the
composed nodes are walked, and what is not on the list of `sbkit.check.allowed` is refused.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ruamel.yaml.nodes import Node, ScalarNode

from sbkit.check.allowed import is_data, refusal
from sbkit.check.composed import (
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
from sbkit.check.finding import Finding
from sbkit.config.document import INCLUDE_TAG, PLACEHOLDER_TAG, REFERENCE_TAGS

Refuse = Callable[[Scope, Node], None]

DATA_TAGS = PLAIN | {f"{STANDARD}{name}" for name in ("merge", "timestamp")}
TEXT_TAGS = (*PLAIN, *REFERENCE_TAGS)
NAMING_KINDS = ("!new", "!name", "!apply")
FIX = "Take it away, or read what it does and build it yourself."


def check_untrusted(yaml_file: Path) -> list[Finding]:
    """Give a finding for every node that is refused, of the file and of those it includes.

    Raises SbkitError when a file cannot be read as YAML within its limits.
    """
    return list(_Walk().over(Scope(yaml_file, compose(yaml_file))))


@dataclass
class _Walk:
    """One look at every node; what one expands to is counted once."""

    sizes: dict[int, int] = field(default_factory=dict)  # by the id of the node

    def over(self, scope: Scope) -> Iterator[Finding]:
        """Walk a file, then those it includes."""
        yield from self._judge(scope, scope.root, self._refuse_size)
        waiting, seen = [scope.root], set()
        while waiting:
            node = waiting.pop()
            if id(node) not in seen:
                seen.add(id(node))
                yield from self._judge(scope, node, self._refuse)
                if str(node.tag).startswith(INCLUDE_TAG):
                    yield from self._included(scope, node)
                waiting += reversed(children(node))

    def _included(self, scope: Scope, node: Node) -> Iterator[Finding]:
        try:
            inner = scope.included(node)
        except UnsafeError as error:
            yield _finding(scope, node, error)
        else:
            yield from self.over(inner)

    def _judge(self, scope: Scope, node: Node, refuse: Refuse) -> Iterator[Finding]:
        try:
            refuse(scope, node)
        except UnsafeError as error:
            yield _finding(scope, node, error)
        except RecursionError:
            yield _finding(scope, node, UnsafeError("refers to itself"))

    def _refuse(self, scope: Scope, node: Node) -> None:
        tag = str(node.tag)
        kind, _, name = tag.partition(":")
        if tag in REFERENCE_TAGS:
            _refuse_reference(scope, node)
            return
        reason = refusal(kind, name) if kind in NAMING_KINDS else None
        known = kind in (*NAMING_KINDS, "!include") or tag in (*DATA_TAGS, PLACEHOLDER_TAG)
        if reason is not None or not known:
            raise UnsafeError(reason or "is not on the list of tags")
        if isinstance(node, ScalarNode):
            _refuse_tuple(str(node.value))

    def _refuse_size(self, scope: Scope, node: Node) -> None:
        if self._size(scope, node) > MOST:
            raise UnsafeError(f"grows to more than {MOST} nodes through its references and aliases")

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
        _refuse_attribute(scope, *name.split(".", maxsplit=1))
    elif isinstance(target, ScalarNode) and str(target.tag) in TEXT_TAGS:
        _refuse_tuple(scope.expand(target)[0])


def _refuse_attribute(scope: Scope, name: str, attribute: str) -> None:
    """Let only data of a new object be taken: a method might be called by what gets it."""
    inner, target = scope.reach(name)
    _, target = inner.settled(target)
    kind, _, class_name = str(target.tag).partition(":")
    if kind != "!new" or not is_data(class_name, attribute):
        raise UnsafeError(f"takes `{attribute}`, which is no data of a `!new:` object")


def _refuse_tuple(text: str) -> None:
    inside = unsafe_tuple(text)
    if inside is not None:
        raise UnsafeError(f"comes to a tuple {inside}")


def _finding(scope: Scope, node: Node, error: UnsafeError) -> Finding:
    tag = str(node.tag).replace(STANDARD, "!!")
    text = str(node.value)[:60] if isinstance(node, ScalarNode) else ""
    return Finding(
        check="untrusted",
        declared=f"{tag} {text}".strip(),
        effect=f"{tag} {error}",
        where=scope.place(node),
        fix=FIX,
    )
