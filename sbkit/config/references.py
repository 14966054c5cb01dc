"""What ``!ref <key>`` and ``!copy <key>`` reach, checked before HyperPyYAML resolves them.

HyperPyYAML writes an unresolved node into text in silence, and leaves ``-1 * 2`` as text:
both are refused here.
"""

import re
from dataclasses import dataclass

from hyperpyyaml.core import parse_arithmetic
from ruamel.yaml.comments import CommentedMap

from sbkit.base.errors import SbkitError
from sbkit.config.document import (
    BUILDER_TAGS,
    INCLUDE_TAG,
    PLACEHOLDER_TAG,
    REFERENCE_TAGS,
    Document,
    Keys,
    did_you_mean,
    dotted,
    tag_of,
    walk,
)

REFERENCE = re.compile(r"<([^>]*)>")
ARITHMETIC = re.compile(r"[-+*/%().\deE\s]*")
NEGATIVE = re.compile(r"(?:^|[-+*/%(])\s*-\s*[\d.(]")


class _Built:
    """Stands for a value that only exists once objects are built."""


BUILT = _Built()


@dataclass(frozen=True)
class Scope:
    """The keys that references of one file may reach.

    ``resolved`` holds the ids of the nodes above the present one; None: the order does not matter.
    """

    document: Document
    resolved: set[int] | None = None

    def reach(self, name: str) -> tuple["Scope", object]:
        """Follow ``a[b][c]`` to its node, through other references and included files.

        Raises SbkitError: a key on the way is not there, or stands below the reference.
        """
        scope: Scope = self
        node: object = self.document.root
        for part in key_parts(name):
            scope, node = scope._settle(node)
            if not isinstance(node, CommentedMap) or part not in node:
                keys = node if isinstance(node, CommentedMap) else ()
                names = (each for each in keys if isinstance(each, str))
                near = did_you_mean(part, names) or " Correct the name."
                raise SbkitError(f"there is no `{part}`.{near}")
            node = node[part]
        scope._require_resolved(node)
        return scope, node

    def _require_resolved(self, node: object) -> None:
        waiting = tag_of(node) in REFERENCE_TAGS or tag_of(node).startswith(INCLUDE_TAG)
        if waiting and self.resolved is not None and id(node) not in self.resolved:
            raise SbkitError("what it names is itself resolved later. Move that above.")

    def _settle(self, node: object) -> tuple["Scope", object]:
        """Replace a whole reference by its target and an include by its file's root."""
        self._require_resolved(node)
        if tag_of(node).startswith(INCLUDE_TAG):
            document = self.document.included(node)
            return Scope(document), document.root
        match = REFERENCE.fullmatch(text_of(node)) if tag_of(node) in REFERENCE_TAGS else None
        if match is None or "." in match[1]:
            return self, node
        scope, target = self.reach(match[1])
        return scope._settle(target)

    def evaluate(self, node: object) -> object:
        """Return the plain value of a node, `BUILT` for an object, None for a placeholder."""
        tag = tag_of(node)
        if tag == PLACEHOLDER_TAG:
            return None
        if tag in REFERENCE_TAGS:
            return self._evaluate_reference(text_of(node))
        return BUILT if tag.startswith(BUILDER_TAGS) or "python/" in tag else node

    def _evaluate_reference(self, text: str) -> object:
        names = REFERENCE.findall(text)
        if any("." in name for name in names):
            return BUILT
        values = [scope.evaluate(node) for scope, node in map(self.reach, names)]
        if REFERENCE.fullmatch(text):
            return values[0]
        if BUILT in values or None in values:
            return BUILT if BUILT in values else None
        texts = map(str, values)
        written = REFERENCE.sub(lambda _: next(texts), text)
        value: object = parse_arithmetic(written)
        return value


def key_parts(name: str) -> tuple[str, ...]:
    """Split ``a[b][c]`` into its keys."""
    return tuple(part.strip("]") for part in name.split("["))


def text_of(node: object) -> str:
    """Return the text of a tagged scalar."""
    return str(getattr(node, "value", ""))


def check_references(document: Document) -> None:
    """Refuse a reference that would reach nothing, itself, or a value not yet resolved.

    Raises SbkitError: with the key, the line, and the nearest key that is there.
    """
    resolved: set[int] = set()
    for keys, node in walk(document.root):
        _check_tag(document, keys, tag_of(node))
        if tag_of(node) in REFERENCE_TAGS:
            try:
                _check_reference(Scope(document, resolved), keys, text_of(node))
            except SbkitError as error:
                raise SbkitError(
                    f"`{dotted(keys)}: {tag_of(node)} {text_of(node)}` ({document.place(keys)}) "
                    f"must reach a key, but {error}"
                ) from error
        resolved.add(id(node))


def check_arithmetic(document: Document) -> None:
    """Raise SbkitError for arithmetic that HyperPyYAML leaves as text (negatives) or cannot do."""
    for keys, node in walk(document.root):
        if tag_of(node) in REFERENCE_TAGS:
            try:
                value = Scope(document).evaluate(node)
            except ArithmeticError as error:
                raise SbkitError(
                    f"`{dotted(keys)}: {text_of(node)}` ({document.place(keys)}) must come to a "
                    f"number, but fails: {error}. Correct it."
                ) from error
            if isinstance(value, str) and _looks_negative(value, text_of(node)):
                raise SbkitError(
                    f"`{dotted(keys)}: {text_of(node)}` ({document.place(keys)}) must come to a "
                    f"number, but stays the text {value!r}: HyperPyYAML does not compute with "
                    "negative numbers. Write the result."
                )


def _looks_negative(value: str, text: str) -> bool:
    computed = REFERENCE.fullmatch(text) is None
    return computed and bool(ARITHMETIC.fullmatch(value)) and bool(NEGATIVE.search(value))


def _check_tag(document: Document, keys: Keys, tag: str) -> None:
    known = (*BUILDER_TAGS, INCLUDE_TAG)
    whole = (*REFERENCE_TAGS, PLACEHOLDER_TAG)
    if not tag.startswith("!") or tag in whole or tag.startswith(known):
        return
    advice = did_you_mean(tag, (*known, *whole)) or " Take one of them."
    raise SbkitError(
        f"`{dotted(keys)}` ({document.place(keys)}) must have one of the tags "
        f"{' '.join((*known, *whole))}, but has `{tag}`.{advice}"
    )


def _check_reference(scope: Scope, keys: Keys, text: str) -> None:
    names = REFERENCE.findall(text)
    if not names:
        raise SbkitError("names none. Write the key in angle brackets: `!ref <key>`.")
    whole = REFERENCE.fullmatch(text) is not None
    for name in names:
        path, _, attribute = name.partition(".")
        inside = key_parts(path)
        if tuple(map(str, keys[: len(inside)])) == inside:
            raise SbkitError(f"`<{name}>` contains the reference itself. Name another key.")
        found, node = scope.reach(path)
        if not whole and (attribute or found.evaluate(node) is BUILT):
            raise SbkitError(f"`<{name}>` is an object and cannot be part of a text. Name a value.")
