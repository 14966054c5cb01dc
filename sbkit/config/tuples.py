"""HyperPyYAML's tuples, ``(1, 2)``.

HyperPyYAML hands the inside to another YAML: one that would build objects named there, and that
reads ``1e-3`` as text. Both are refused here.
"""

import re

import yaml

from sbkit.base.errors import SbkitError
from sbkit.config.document import Document, dotted, walk

TUPLE = re.compile(r"\(.*\)")


def read_tuple(text: str) -> tuple[object, ...]:
    """Read ``(1, 2)``.

    Raises ValueError: something in it is neither a plain value nor read as the number it looks
    like.
    """
    try:
        values = tuple(yaml.safe_load(f"[{text[1:-1]}]"))
    except yaml.YAMLError as error:
        raise ValueError("holds something else") from error
    for value in values:
        if isinstance(value, str) and value.startswith("("):
            raise ValueError("a tuple in it would be cut at its commas: write a list, as in [1, 2]")
        if isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", value):
            raise ValueError(f"{value} would be read as text: write a dot and a sign, as in 1.0e-3")
    return values


def check_tuples(document: Document) -> None:
    """Raise SbkitError for a text in parentheses that is not a tuple of plain values."""
    for keys, node in walk(document.root):
        if isinstance(node, str) and TUPLE.fullmatch(node):
            try:
                read_tuple(node)
            except ValueError as error:
                raise SbkitError(
                    f"`{dotted(keys)}: {node}` ({document.place(keys)}) must be a tuple of plain "
                    f"values, because of its parentheses, but {error}."
                ) from error
