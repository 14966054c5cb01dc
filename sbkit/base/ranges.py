"""The values that a key or an argument may have, declared by types and checked before building."""

import math
import re
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from sbkit.base.errors import ConfigError

HOUR, DAY = 60 * 60, 24 * 60 * 60  # seconds
# Words for true and false (yaml.org/type/bool.html); YAML 1.2 reads most of them as text.
FLAG_WORDS = dict.fromkeys(("true", "yes", "y", "on"), True) | dict.fromkeys(
    ("false", "no", "n", "off"), False
)
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)


def is_finite(value: object) -> bool:
    """Return whether a value, or all that its lists and mappings hold, is neither .inf nor .nan."""
    if isinstance(value, Mapping | list | tuple):
        return all(map(is_finite, value.values() if isinstance(value, Mapping) else value))
    return not isinstance(value, float) or math.isfinite(value)


# ---- constraints


@dataclass(frozen=True, kw_only=True)
class Constraint(Container[object]):
    """The values that a key may have; ``advice`` says how to correct others.

    Its text says what the value must be.
    """

    advice: str = ""

    def advice_for(self, value: object) -> str:
        """Say how to correct a value."""
        return self.advice


@dataclass(frozen=True, kw_only=True)
class Unchecked(Constraint):
    """Any value but a word for true or false, which would count as true."""

    advice: str = "Write True or False. A class that takes words annotates it: `NAME: str`."

    def __contains__(self, value: object) -> bool:
        return as_flag(value) is value

    def __str__(self) -> str:
        return "true or false, not in words"


@dataclass(frozen=True, kw_only=True)
class Flag(Constraint):
    """True and false."""

    def __contains__(self, value: object) -> bool:
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "true or false"

    def advice_for(self, value: object) -> str:
        """Say how to write a flag."""
        return self.advice or "Write True or False."


@dataclass(frozen=True, kw_only=True)
class Text(Constraint):
    """Any text but an empty one, which an unset variable of a shell gives."""

    advice: str = "Write text in quotes."
    name: str = "text"

    def __contains__(self, value: object) -> bool:
        return isinstance(value, str) and value.strip() != ""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class OneOf(Constraint):
    """Fixed words or numbers."""

    values: tuple[object, ...]

    def __contains__(self, value: object) -> bool:
        return any(type(value) is type(word) and value == word for word in self.values)

    def __str__(self) -> str:
        return " or ".join("null" if word is None else str(word) for word in self.values)


@dataclass(frozen=True, kw_only=True)
class Range(Constraint):
    """Finite numbers in a range.

    >>> share = Range(low=0, high=1, advice="0 is none, 1 is all.")
    >>> 0.5 in share, "half" in share, str(share)
    (True, False, 'a number from 0 to 1')
    """

    low: float = -math.inf
    high: float = math.inf
    integer: bool = False

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.integer else int | float):
            return False
        return self.low <= value <= self.high and is_finite(value)

    def __str__(self) -> str:
        kind = f"a {'whole ' * self.integer}number"
        if self.high < math.inf:
            return f"{kind} from {self.low:g} to {self.high:g}"
        return f"{kind} of at least {self.low:g}" if self.low > -math.inf else kind

    def advice_for(self, value: object) -> str:
        """Say how to write a number that YAML reads as text, such as 0,5; else the advice."""
        text = value if isinstance(value, str) else ""
        digits = re.sub(r"[\s'\u2019]", "", text)
        start, mark, fraction = re.findall(r"(.*?)([.,]?)([^.,]*)$", digits)[0]
        is_group = mark in start or (self.integer and len(fraction) == 3)  # 1,000 or 1.000.000
        number = re.sub("[.,]", "", start) + ("" if is_group else ".") + fraction
        if not NUMBER.fullmatch(number):
            return "Write the number without its unit." if NUMBER.match(text) else self.advice
        if number == text:
            return f"Take out the quotes: {text}."
        return f"Use a point: {number}." if mark == "," and not is_group else f"Write {number}."


@dataclass(frozen=True, kw_only=True)
class ListOf(Constraint):
    """Lists whose items have a constraint; [] only if ``may_be_empty``."""

    item: Constraint
    may_be_empty: bool = True

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, list | tuple) or not (value or self.may_be_empty):
            return False
        return is_finite(value) and all(item in self.item for item in value)

    def __str__(self) -> str:
        items = f" of {self.item}s" if isinstance(self.item, Text) else f", each {self.item}"
        return f"{'[] or ' * self.may_be_empty}a list{items}"

    def advice_for(self, value: object) -> str:
        """Say that one item needs brackets; else the advice."""
        return f"Write [{value}]." if value in self.item else self.advice


@dataclass(frozen=True, kw_only=True)
class Interval(Constraint):
    """Lists of two numbers, the lower one first."""

    item: Range

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, list | tuple) or len(value) != 2:
            return False
        return all(number in self.item for number in value) and value[0] <= value[1]

    def __str__(self) -> str:
        return f"[LOWEST, HIGHEST], each {self.item}"


@dataclass(frozen=True, kw_only=True)
class MappingOf(Constraint):
    """Mappings with texts as keys, whose values have a constraint; {} only if ``may_be_empty``."""

    item: Constraint
    may_be_empty: bool = True

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, Mapping) or not (value or self.may_be_empty):
            return False
        items = value.values()
        return all(name in Text() for name in value) and all(
            is_finite(item) and item in self.item for item in items
        )

    def __str__(self) -> str:
        items = f" of {self.item}" if isinstance(self.item, Texts) else f", each {self.item}"
        items = " with names as keys" if isinstance(self.item, Unchecked) else items
        return f"{'{} or ' * self.may_be_empty}a mapping{items}"


@dataclass(frozen=True, kw_only=True)
class Texts(Constraint):
    """Texts at any depth; also null, and the numbers that Python passes in place of texts."""

    def __contains__(self, value: object) -> bool:
        return True

    def __str__(self) -> str:
        return "texts"


@dataclass(frozen=True, kw_only=True)
class Either(Constraint):
    """The values of several constraints."""

    parts: tuple[Constraint, ...]

    def __contains__(self, value: object) -> bool:
        return any(value in part for part in self.parts)

    def __str__(self) -> str:
        return " or ".join(dict.fromkeys(map(str, self.parts)))

    def advice_for(self, value: object) -> str:
        """Say how to write a number or a list; else the advice, or how to write none."""
        for part in self.parts:
            if (advice := part.advice_for(value)) != part.advice:
                return advice
        nothing: Mapping[str, object] = {"[]": [], "{}": {}, "null": None}
        writing = (f"Write {text} for none." for text, value in nothing.items() if value in self)
        return self.advice or next(writing, self.parts[-1].advice)


NULL = OneOf(values=(None,))


def constraint_of(kind: Any) -> Constraint:
    """Return the constraint that a type stands for.

    bool, str, int, float, `Literal`, lists, mappings and their unions have one; `Annotated` adds
    another one or an advice. A class that no plain value has, such as `Tensor`, takes no part in a
    union; other types are `Unchecked`.
    """
    if isinstance(kind, Constraint):
        return kind
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin is Annotated:
        constraint = constraint_of(arguments[0])
        for extra in arguments[1:]:
            constraint = extra if isinstance(extra, Constraint) else constraint
            constraint = replace(constraint, advice=extra) if isinstance(extra, str) else constraint
        return constraint
    if origin is Literal:
        return OneOf(values=arguments)
    if origin in (Union, UnionType):
        kinds = [kind for kind in arguments if not _is_object(kind)]
        kinds.sort(key=lambda kind: kind is not NoneType)
        parts = [constraint_of(kind) for kind in kinds]
        return UNCHECKED if UNCHECKED in parts or not parts else Either(parts=(*parts,))
    if origin in (list, Sequence):
        return ListOf(item=constraint_of(arguments[0]) if arguments else UNCHECKED)
    if origin in (dict, Mapping):
        return MappingOf(item=constraint_of(arguments[1]) if arguments else UNCHECKED)
    if isinstance(kind, type) and issubclass(kind, PurePath):
        return Text()
    return PLAIN_KINDS.get(kind, UNCHECKED) if isinstance(kind, Hashable) else UNCHECKED


def _is_object(kind: Any) -> bool:
    """Return whether a type is a class that no plain value has."""
    is_class = isinstance(kind, type) and get_origin(kind) is None and kind is not Any
    is_path = is_class and issubclass(kind, PurePath)
    return is_class and kind.__module__ != "builtins" and kind is not NoneType and not is_path


UNCHECKED = Unchecked()
PLAIN_KINDS: Mapping[Any, Constraint] = {
    bool: Flag(),
    str: Text(),
    int: Range(integer=True),
    float: Range(),
    NoneType: NULL,
}


def takes_text(constraint: Constraint) -> bool:
    """Return whether a constraint allows any text, perhaps within lists and mappings."""
    if isinstance(constraint, Text):
        return constraint.name == Text.name  # YAML reads no path or tag as something else
    parts = getattr(constraint, "parts", None) or [getattr(constraint, "item", None)]
    return isinstance(constraint, Texts) or any(map(takes_text, filter(None, parts)))


def takes_mapping(constraint: Constraint) -> bool:
    """Return whether a constraint allows mappings whose keys the user chooses."""
    parts = getattr(constraint, "parts", (constraint,))
    return any(isinstance(part, MappingOf) for part in parts)


# ---- types of values

Share = Annotated[float, Range(low=0, high=1, advice="0 is none, 1 is all.")]
Dropout = Annotated[
    float, Range(low=0, high=0.99, advice="At 1, nothing would be left to learn from.")
]
Count = Annotated[int, Range(low=0, integer=True, advice="Pass 0 for none.")]
PositiveCount = Annotated[int, Range(low=1, integer=True, advice="Pass 1 for the smallest.")]
NonNegative = Annotated[float, Range(low=0, advice="Pass 0 for none.")]
Decibels = Annotated[
    Sequence[float],
    Interval(item=Range(low=-200, high=200), advice="[0, 30] is such a range."),
]
Speeds = Annotated[
    Sequence[float],
    ListOf(item=Range(low=0.1, high=10), may_be_empty=False, advice="Write [1.0] for no change."),
]


# ---- values out of range


def as_flag(value: object) -> object:
    """Return true or false for a word that means it, and any other value as it is."""
    return FLAG_WORDS.get(value.lower(), value) if isinstance(value, str) else value


def range_error(key: str, value: object, constraint: Constraint) -> str:
    """Write why a value is refused, and what to do."""
    must_be = constraint if is_finite(value) else "finite"
    return f"`{key}` must be {must_be}, but is {value!r}. {constraint.advice_for(value)}".rstrip()


def require_in_range(key: str, value: object, kind: Any) -> None:
    """Raise ConfigError for a value that a type or a constraint does not have."""
    if value not in (constraint := constraint_of(kind)):
        raise ConfigError(range_error(key, value, constraint), keys=(key,))
