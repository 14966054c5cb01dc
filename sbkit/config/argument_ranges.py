"""Ranges of the arguments that a YAML gives to classes, which declare them as `RANGES`."""

import pydoc
from collections.abc import Iterator, Mapping

from ruamel.yaml.comments import CommentedMap

from sbkit.config.document import BUILDER_TAGS, REFERENCE_TAGS, Document, Keys, dotted, tag_of, walk
from sbkit.config.ranges import Range, refusal
from sbkit.config.references import BUILT, REFERENCE, Scope, key_parts, text_of


def arguments_out_of_range(document: Document) -> Iterator[tuple[Keys, str]]:
    """Yield the key of each argument out of its class's range, with the sentence that refuses it.

    The key is the knob where the argument is a reference to one; each comes once. Imports the
    classes. What stands in included files is not judged: it may be overridden beside `!include:`.
    """
    seen: set[Keys] = set()
    for keys, node in walk(document.root):
        if isinstance(node, CommentedMap) and tag_of(node).startswith(BUILDER_TAGS):
            for name, allowed in ranges_of(tag_of(node).partition(":")[2]).items():
                if name in node:
                    named, value = _value_of(document, (*keys, name), node[name])
                    if value is not BUILT and value not in allowed and named not in seen:
                        seen.add(named)
                        yield named, refusal(dotted(named), value, allowed)


def ranges_of(name: str) -> Mapping[str, Range]:
    """Return the ranges that a class, given by its dotted name, declares for its arguments."""
    try:
        found = pydoc.locate(name)
    except pydoc.ErrorDuringImport:
        return {}  # refused in a sentence of its own when the YAML is built
    declared: Mapping[str, Range] = getattr(found, "RANGES", {})
    return declared if isinstance(declared, Mapping) else {}


def _value_of(document: Document, keys: Keys, node: object) -> tuple[Keys, object]:
    """Return the key that an argument's value comes from, and the value."""
    whole = REFERENCE.fullmatch(text_of(node)) if tag_of(node) in REFERENCE_TAGS else None
    named = key_parts(whole[1]) if whole else keys
    return named, Scope(document).evaluate(node)
