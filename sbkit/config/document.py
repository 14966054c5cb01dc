"""A HyperPyYAML file as a tree that remembers its tags and its lines; nothing in it is built."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import RoundTripConstructor

from sbkit.base.errors import SbkitError

Keys = tuple[str | int, ...]

REFERENCE_TAGS = ("!ref", "!copy")
BUILDER_TAGS = ("!new:", "!name:", "!module:", "!apply:")
PLACEHOLDER_TAG = "!PLACEHOLDER"
INCLUDE_TAG = "!include:"
TUPLE = re.compile(r"\(.*\)")
SPELLING, SIMILAR = 0.75, 0.6  # share of letters that two words have in common, in order


def nearest(word: str, words: Iterable[object]) -> str | None:
    """Return the key that was probably meant, None when none is near.

    That is one of nearly the same spelling; else one that has all the word's parts in it
    (`epochs`: `number_of_epochs`); else a similar one of the same first part (`batch_size`:
    `batch_seconds`). Sharing a last part is not enough: `beam_size` is no `vocab_size`.
    """
    known = [str(each) for each in words]
    parts = word.split("_")
    holding = [each for each in known if _are_in(parts, each.split("_"))]
    alike = [each for each in known if each.split("_")[0] == parts[0]]

    def far(each: str) -> tuple[bool, int]:  # a last part is what a name is about
        return not _are_in(parts[-1:], each.split("_")[-1:]), len(each)

    same_spelling = get_close_matches(word, known, n=1, cutoff=SPELLING)
    similar = get_close_matches(word, alike, n=1, cutoff=SIMILAR)
    return next(iter((*same_spelling, *sorted(holding, key=far), *similar)), None)


def _are_in(parts: list[str], others: list[str]) -> bool:
    return all(get_close_matches(part, others, n=1, cutoff=SPELLING) for part in parts)


def did_you_mean(word: str, words: Iterable[object]) -> str:
    """Return a question that offers the word that was probably meant, or nothing."""
    found = nearest(word, words)
    return f" Did you mean `{found}`?" if found else ""


def dotted(keys: Keys) -> str:
    """Write a path of keys the way it is overridden: ``Transformer.d_model``."""
    return ".".join(str(key) for key in keys)


def tag_of(node: object) -> str:
    """Return the node's explicit tag, or an empty string."""
    return getattr(getattr(node, "tag", None), "value", None) or ""


def walk(node: object, keys: Keys = ()) -> Iterator[tuple[Keys, object]]:
    """Visit every node, children first: the order in which HyperPyYAML resolves them."""
    if isinstance(node, CommentedMap):
        for key, child in node.items():
            yield from walk(child, (*keys, key))
    elif isinstance(node, CommentedSeq):
        for index, child in enumerate(node):
            yield from walk(child, (*keys, index))
    yield keys, node


@dataclass(frozen=True)
class Document:
    """One file."""

    path: Path
    text: str
    root: CommentedMap

    def place(self, keys: Keys) -> str:
        """Return the file and the line of a key, as far down as the file goes."""
        node: object = self.root
        line = 0
        for depth, key in enumerate(keys):
            if tag_of(node).startswith(INCLUDE_TAG):
                return self.included(node).place(keys[depth:])
            if not isinstance(node, CommentedMap | CommentedSeq):
                break
            line = (node.lc.data or {}).get(key, [line])[0]
            try:
                node = node[key]
            except (LookupError, TypeError):
                break
        return f"{self.path}:{line + 1}"

    def included(self, node: object) -> "Document":
        """Read the file that an ``!include:`` names."""
        path = self.path.parent / tag_of(node).removeprefix(INCLUDE_TAG)
        return read_document(path)

    def family(self, keys: Keys = ()) -> Iterator[tuple[Keys, "Document"]]:
        """Visit this file and every file it includes, each with the key it stands under."""
        yield keys, self
        for below, node in walk(self.root):
            if tag_of(node).startswith(INCLUDE_TAG):
                yield from self.included(node).family((*keys, *below))


class _Reader(RoundTripConstructor):
    """Reads ``!tuple (1, 2)`` as ``(1, 2)``, which is the same to HyperPyYAML."""


_Reader.add_constructor("!tuple", lambda reader, node: reader.construct_scalar(node))


def read_document(path: Path) -> Document:
    """Read one file into a tree; raises SbkitError with the line of what is wrong."""
    text = read_yaml_text(path)
    try:
        reader = YAML()
        reader.Constructor = _Reader
        root = reader.load(text)
    except Exception as error:  # ruamel.yaml raises errors of many kinds for bad YAML
        mark, problem = (getattr(error, name, None) for name in ("problem_mark", "problem"))
        place = f"{path}:{mark.line + 1}" if mark else path
        problem = problem or f"cannot be read ({type(error).__name__}: {error})"
        todo = "Indent it with spaces." if r"'\t'" in problem else "Correct it."
        raise SbkitError(f"{place} must be valid YAML, but {problem}. {todo}") from error
    if not isinstance(root, CommentedMap) or tag_of(root):
        what = tag_of(root) or ("nothing" if root is None else "something else")
        raise SbkitError(
            f"{path} must consist of `key: value` lines, but at its root there is {what}. "
            "Put every part, an `!include:` too, under a key of its own."
        )
    return Document(path, text, root)


def read_yaml_text(path: Path) -> str:
    """Read a file of UTF-8 text; raises SbkitError where it cannot be read, or is none."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        there = path.parent.glob("*.yaml") if path.parent.is_dir() else ()
        near = did_you_mean(path.name, (each.name for each in there))  # a folder is no likeness
        raise SbkitError(
            f"The hparams file must be readable, but {path} is not ({error.strerror})."
            f"{near or ' Check its name.'}"
        ) from error
    except UnicodeDecodeError as error:
        raise SbkitError(f"{path} must be UTF-8 text, but is not. Save it as UTF-8.") from error


# -- HyperPyYAML's tuples, ``(1, 2)`` --------------------------------------------------------------
# It hands the inside to another YAML: one that would build objects named there, and that reads
# ``1e-3`` as text. Both are refused here.


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
