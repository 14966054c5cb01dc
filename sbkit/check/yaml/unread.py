"""Unread: keys of the YAML that do nothing, because nothing reads them."""

from collections.abc import Iterator
from dataclasses import dataclass

from ruamel.yaml.comments import CommentedMap
from speechbrain.utils.run_opts import RunOptions

from sbkit.check.finding import Finding
from sbkit.check.model.unused import CHECK
from sbkit.check.planned_run import PlannedRun
from sbkit.check.yaml.sources import Reading, read_by
from sbkit.config.document import (
    INCLUDE_TAG,
    REFERENCE_TAGS,
    Document,
    Keys,
    did_you_mean,
    dotted,
    tag_of,
    walk,
)
from sbkit.config.references import REFERENCE, key_parts, text_of


def check_unread(planned: PlannedRun) -> Iterator[Finding]:
    """Find the keys that nothing reads, where there is a recipe to search."""
    if not planned.has_recipe:
        return
    reading = read_by(planned.recipe)
    known = {*RunOptions().as_dict(), *reading.asked} - set(planned.document.root)
    for keys in unread(planned.document, reading):
        yield planned.finding(
            CHECK,
            *keys,
            declared=f"`{dotted(keys)}` must be read by something",
            effect="no reference, no code of the recipe and no option reads it: it does nothing",
            fix=f"Correct its name, or take it out.{did_you_mean(str(keys[-1]), known)}",
        )


def unread(document: Document, reading: Reading) -> Iterator[Keys]:
    """Find the keys that no reference names, no code reads, and no option of SpeechBrain's is.

    Below a plain mapping too, unless it is handed on as a whole. What an object is made of is read
    by it: it would have refused the rest.
    """
    walker = _Walker(reading, reading.named | set(RunOptions().as_dict()))
    yield from walker.walk(document, (), document.root, references(document))


def references(document: Document) -> set[Keys]:
    """Collect the keys that the references of a file reach."""
    texts = (text_of(node) for _, node in walk(document.root) if tag_of(node) in REFERENCE_TAGS)
    names = (name for text in texts for name in REFERENCE.findall(text))
    return {key_parts(name.partition(".")[0]) for name in names}


@dataclass(frozen=True)
class _Walker:
    reading: Reading
    names: frozenset[str]

    def walk(
        self, document: Document, above: Keys, mapping: CommentedMap, named: set[Keys]
    ) -> Iterator[Keys]:
        """Visit one mapping; the references are paths from it."""
        for key, child in mapping.items():
            below = {keys[1:] for keys in named if keys[0] == key}
            if tag_of(child).startswith("!apply:"):
                continue  # it was called when the YAML was built, and may have had its effect
            if not below and key not in self.names and not key.startswith("_"):
                yield (*above, key)
            elif () not in below and (below or not self.reading.passes_on(key)):
                yield from self._inside(document, (*above, key), child, below)

    def _inside(
        self, document: Document, keys: Keys, child: object, named: set[Keys]
    ) -> Iterator[Keys]:
        if tag_of(child).startswith(INCLUDE_TAG):
            file = document.included(keys, child)
            yield from self.walk(file, keys, file.root, named | references(file))
        elif isinstance(child, CommentedMap) and not tag_of(child):
            yield from self.walk(document, keys, child, named)
