"""Objects as plain data: from a resolved YAML to JSON, and from JSON to modules.

`!new:torch.nn.Linear {in_features: 2}` becomes `{"new": "torch.nn.Linear", "arguments": {...}}`,
a partial `!name:` likewise. Reading it back builds what stands on the list of
`sbkit.config.allowed` for bundles, and nothing else.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from ruamel.yaml.comments import CommentedMap, CommentedSeq

from sbkit.base.errors import SbkitError
from sbkit.config.allowed import find, refusal
from sbkit.config.document import tag_of
from sbkit.config.tuples import TUPLE, read_tuple
from sbkit.inference.bundle.config import DEEPEST, MOST, Plain

ATTRIBUTE = "!apply:getattr"  # what HyperPyYAML makes of `!ref <tokenizer.vocab_size>`
KINDS = ("new", "name")
ARGUMENTS = "arguments"
LARGEST_NUMBER = 1 << 16  # in an argument; sizes beyond it are those of a matrix in the weights
LONGEST_TEXT = 1_000  # characters


def to_plain(node: object, *, key: str, objects: Mapping[int, object]) -> Plain:
    """Turn a node of a resolved YAML into plain data.

    ``objects`` gives, by the identity of their node, the objects whose attributes may be used.
    Raises SbkitError for what only running code could tell, and for what grows without bound.
    """
    return _Flattened(key, objects).plain(node, 0)


class _Flattened:
    """Count the nodes of a tree that may share its branches."""

    def __init__(self, key: str, objects: Mapping[int, object]) -> None:
        self._key, self._objects, self._count = key, objects, 0

    def plain(self, node: object, depth: int) -> Plain:
        self._count += 1
        if self._count > MOST or depth > DEEPEST:
            raise SbkitError(
                f"`{self._key}` must have at most {MOST} values and {DEEPEST} levels to be "
                "exported, but has more. Look for an alias that repeats itself."
            )
        tag = tag_of(node)
        if tag == ATTRIBUTE:
            return self._attribute(node)
        if tag.startswith(("!new:", "!name:")):
            kind, name = tag[1:].split(":", 1)
            return {kind: name, ARGUMENTS: self._children(node, depth, {})}
        if tag and tag != "!tuple":
            raise SbkitError(
                f"`{self._key}` must be made of !new:, !name: and plain values to be exported, but "
                f"holds {tag}. Write the value itself, or a class, in its place."
            )
        return self._children(node, depth, getattr(node, "value", node))

    def _children(self, node: object, depth: int, scalar: object) -> Plain:
        if isinstance(node, CommentedMap):
            return {str(name): self.plain(child, depth + 1) for name, child in node.items()}
        if isinstance(node, CommentedSeq):
            return [self.plain(child, depth + 1) for child in node]
        if isinstance(scalar, str) and TUPLE.fullmatch(scalar):
            return {"tuple": self._tuple(scalar)}
        if scalar is not None and not isinstance(scalar, bool | int | float | str | dict):
            raise SbkitError(
                f"`{self._key}` must be made of plain values to be exported, but holds a "
                f"{type(scalar).__name__}. Write a number or a text."
            )
        return scalar

    def _tuple(self, text: str) -> list[object]:
        try:
            return list(read_tuple(text))
        except (ValueError, TypeError) as error:
            raise SbkitError(
                f"`{self._key}` must hold tuples of plain values to be exported, but has "
                f"{text[:60]} ({error}). Correct it."
            ) from error

    def _attribute(self, node: object) -> Plain:
        match node:
            case [target, str(name)] if id(target) in self._objects and not name.startswith("_"):
                value = getattr(self._objects[id(target)], name, None)
                if isinstance(value, bool | int | float | str):
                    return value
        raise SbkitError(
            f"`{self._key}` must take nothing but data of the tokenizer to be exported, but holds "
            f"{ATTRIBUTE} of something else. Write the value."
        )


def names_of(plain: Plain) -> Iterator[tuple[str, str]]:
    """List the kind and the name of everything that plain data would build."""
    if (kind := _kind_of(plain)) is not None:
        yield kind, plain[kind]
        plain = plain[ARGUMENTS]
    below = plain.values() if isinstance(plain, dict) else plain
    for each in below if isinstance(plain, dict | list) else ():
        yield from names_of(each)


def refuse_unlisted(
    plain: Plain, *, own: frozenset[str] = frozenset(), imports: tuple[str, ...] = ()
) -> None:
    """Refuse data that names anything but what a bundle may build; nothing is built.

    ``own`` names modules of the user's, imported by --import; ``imports`` those that the bundle
    was exported with.
    Raises SbkitError.
    """
    for kind, name in names_of(plain):
        if not isinstance(name, str):
            _refuse(f"a name that is {repr(name)[:60]}")
        reason = refusal(f"!{kind}", name, own=own)
        if reason is not None:
            home = name.rpartition(".")[0]
            known = home in imports and home.split(".")[0].isidentifier()
            raise SbkitError(
                f"A model must be built of modules on sbkit's list, but {name} {reason}."
                + (
                    f" It was exported with `--import {home}`: if you have that module and trust "
                    "it, pass the same."
                    if known
                    else " If it is a class of your own, pass --import and the name of its module."
                )
            )


def build(plain: Plain, *, own: frozenset[str] = frozenset(), largest: int = LARGEST_NUMBER) -> Any:
    """Build what plain data describes: modules and activations of the list, and plain values.

    ``largest`` bounds the numbers in it.
    Raises SbkitError for anything else, and for arguments that a class does not take.
    """
    refuse_unlisted(plain, own=own)
    return _build(plain, max(largest, LARGEST_NUMBER))


def _build(plain: Plain, largest: int) -> Any:
    if isinstance(plain, list):
        return [_build(item, largest) for item in plain]
    if not isinstance(plain, dict):
        return _bounded(plain, largest)
    if plain.keys() == {"tuple"}:
        values = plain["tuple"]
        if not isinstance(values, list) or any(isinstance(each, dict) for each in values):
            _refuse("a tuple of something else than plain values")
        return tuple(_build(values, largest))
    kind = _kind_of(plain)
    if kind is None:
        return {name: _build(item, largest) for name, item in plain.items()}
    return _construct(kind, plain[kind], plain[ARGUMENTS], largest)


def _construct(kind: str, name: str, arguments: Plain, largest: int) -> Any:
    if not isinstance(arguments, list | dict):
        _refuse(f"arguments of {name} that are neither a list nor a mapping")
    made: Any = find(name)
    positional = _build(arguments, largest) if isinstance(arguments, list) else []
    keywords = (
        {key: _build(value, largest) for key, value in arguments.items()}
        if isinstance(arguments, dict)
        else {}
    )
    if kind == "name":
        return functools.partial(made, *positional, **keywords) if arguments else made
    try:
        return made(*positional, **keywords)
    except SbkitError:
        raise
    except Exception as error:  # whatever a constructor makes of what it is given
        raise SbkitError(
            f"A part must be built from its arguments, but {name} raised {type(error).__name__} "
            f"({str(error)[:200]}). Correct them where it was declared, and export it again."
        ) from error


def _kind_of(plain: Plain) -> str | None:
    """Return what is to be built from a mapping of plain values."""
    if not isinstance(plain, dict):
        return None
    return next((kind for kind in KINDS if plain.keys() == {kind, ARGUMENTS}), None)


def _bounded(value: Any, largest: int) -> Any:
    if isinstance(value, int | float) and not abs(value) <= largest:
        _refuse(f"a number beyond {largest}, for which its weights have no place")
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        _refuse(f"a text of {len(value)} characters")
    return value


def _refuse(what: str) -> NoReturn:
    raise SbkitError(
        f"The parts of a bundle must be plain data of ordinary size, but hold {what}. Export it "
        "again."
    )
