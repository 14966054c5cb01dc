"""Ranges of the arguments that a YAML gives to classes, which declare them as `RANGES`."""

import pydoc
from collections.abc import Iterator, Mapping

from ruamel.yaml.comments import CommentedMap

from sbkit.config.document import BUILDER_TAGS, REFERENCE_TAGS, Document, Keys, dotted, tag_of, walk
from sbkit.config.ranges import AT_LEAST_ONE, Range, refusal
from sbkit.config.references import BUILT, REFERENCE, Scope, key_parts, text_of

OF_OTHERS = {"speechbrain.utils.epoch_loop.EpochCounter": {"limit": AT_LEAST_ONE}}


def arguments_out_of_range(document: Document) -> Iterator[tuple[Keys, str]]:
    """Yield the key of each argument out of its class's range, with the sentence that refuses it.

    The key is the knob where the argument is a reference to one; each comes once. Imports the
    classes. What stands in included files is not judged: it may be overridden beside `!include:`.
    """
    seen: set[Keys] = set()
    for keys, node in walk(document.root):
        if isinstance(node, CommentedMap) and tag_of(node).startswith(BUILDER_TAGS):
            ranges = ranges_of(tag_of(node).partition(":")[2])
            for name in (each for each in ranges if each in node):
                given, value = node[name], Scope(document).evaluate(node[name])
                is_reference = tag_of(given) in REFERENCE_TAGS
                whole = REFERENCE.fullmatch(text_of(given)) if is_reference else None
                named = key_parts(whole[1]) if whole else (*keys, name)
                if value is not BUILT and value not in ranges[name] and named not in seen:
                    seen.add(named)
                    yield named, refusal(dotted(named), value, ranges[name])


def ranges_of(name: str) -> Mapping[str, Range]:
    """Return the ranges that a class, given by its dotted name, declares for its arguments."""
    try:
        found = pydoc.locate(name)
    except pydoc.ErrorDuringImport:
        return {}  # refused in a sentence of its own when the YAML is built
    declared: Mapping[str, Range] = OF_OTHERS.get(name) or getattr(found, "RANGES", {})
    return declared if isinstance(declared, Mapping) else {}
