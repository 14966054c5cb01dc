"""A HyperPyYAML file as a tree that remembers its tags and its lines; nothing in it is built.

A file with a key `base` holds only what differs from that file. A plain value, a list or an object
with a tag replaces the base's. A mapping without a tag merges into the base's mapping or object by
its keys, as `--Transformer.dropout=0.2` does. A new key stands before the base's key that follows
it in this file, else at the end.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import reduce
from operator import getitem, itemgetter
from pathlib import Path
from typing import Any

import yaml
from hyperpyyaml.core import recursive_update
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import RoundTripConstructor

from sbkit.base.errors import SbkitError

Keys = tuple[str | int, ...]

REFERENCE_TAGS = ("!ref", "!copy")
INCLUDE_TAG = "!include:"
BUILDER_TAGS = ("!new:", "!name:", "!module:", "!apply:")
BASE_KEY = "base"
WHOLE_KEYS = {("freeze",), ("lr_scale",), ("layer_decay",), ("encoder_config",)}  # never merged
REFERENCE = re.compile(r"<([^>]*)>")
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
    holding = [each for each in known if {*parts} <= {*each.split("_")}]
    alike = [each for each in known if each.split("_")[0] == parts[0]]
    same_spelling = get_close_matches(word, known, n=1, cutoff=SPELLING)
    similar = get_close_matches(word, alike, n=1, cutoff=SIMILAR)
    return next(iter((*same_spelling, *sorted(holding, key=len), *similar)), None)


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


def text_of(node: object) -> str:
    """Return the text of a tagged scalar."""
    return str(getattr(node, "value", ""))


def referenced(node: object) -> list[Keys]:
    """Return the path of keys of each ``<a[b]>`` in a reference, without attributes."""
    if tag_of(node) not in REFERENCE_TAGS:
        return []
    names = (name.partition(".")[0] for name in REFERENCE.findall(text_of(node)))
    return [tuple(part.strip("]") for part in name.split("[")) for name in names]


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
    """One file, with the trees of its base and of the files it includes.

    own: what the file itself declares; root: that over its base; included: by their keys.
    """

    path: Path
    text: str
    own: CommentedMap
    root: CommentedMap
    included: dict[Keys, "Document"] = field(default_factory=dict)
    base: "Document | None" = None

    def place(self, keys: Keys) -> str:
        """Return the file and the line of a key, as far down as the files go."""
        return self._locate(keys)[1]

    def files(self) -> Iterator["Document"]:
        """Yield this file and all that it includes or builds on."""
        yield self
        for document in (*self.included.values(), *([self.base] if self.base else [])):
            yield from document.files()

    def _locate(self, keys: Keys) -> tuple[int, str]:
        """Return how many of the keys this file or its base has, and where the last of them is."""
        node: object = self.own
        line = depth = 0
        for key in keys:
            if depth and keys[:depth] in self.included:
                inner_depth, place = self.included[keys[:depth]]._locate(keys[depth:])
                return depth + inner_depth, place
            if not isinstance(node, CommentedMap | CommentedSeq):
                break
            line = (node.lc.data or {}).get(key, [line])[0]
            try:
                node = node[key]
            except LookupError:
                break
            depth += 1
        here = depth, f"{self.path}:{line + 1}"
        return max(here, self.base._locate(keys), key=itemgetter(0)) if self.base else here


class _Reader(RoundTripConstructor):
    """Reads ``!tuple (1, 2)`` as ``(1, 2)``, which is the same to HyperPyYAML."""


_Reader.add_constructor("!tuple", lambda reader, node: reader.construct_scalar(node))


def read_document(path: Path, *, above: tuple[Path, ...] = ()) -> Document:
    """Read a file and its base into a tree; raises SbkitError with the line of what is wrong.

    above: the files that build on this one.
    """
    text = read_yaml_text(path)
    try:
        reader = YAML()
        reader.Constructor = _Reader
        root = reader.load(text)
    except Exception as error:  # ruamel.yaml raises errors of many kinds for bad YAML
        mark, problem = (getattr(error, name, None) for name in ("problem_mark", "problem"))
        place = f"{path}:{mark.line + 1}" if mark else path
        todo = "Indent it with spaces." if r"'\t'" in str(problem) else "Correct it."
        raise SbkitError(f"{place} must be valid YAML, but {problem or error}. {todo}") from error
    if not isinstance(root, CommentedMap) or tag_of(root):
        what = tag_of(root) or ("nothing" if root is None else "something else")
        raise SbkitError(
            f"{path} must consist of `key: value` lines, but at its root there is {what}. "
            "Put every part under a key of its own."
        )
    document = Document(path, text, root, root)
    for keys, node in [*walk(root)]:
        if tag_of(node).startswith(INCLUDE_TAG):
            _include(document, keys, node)
    return _with_base(document, above) if BASE_KEY in root else document


def _with_base(document: Document, above: tuple[Path, ...]) -> Document:
    """Return the document over the one that its `base` names."""
    name, chain = str(document.own.pop(BASE_KEY)), (*above, document.path.resolve())
    file = document.path.parent / name
    if file.resolve() in chain:
        raise SbkitError(
            f"`{BASE_KEY}` ({document.place((BASE_KEY,))}) must name a file that does not build on "
            f"this one, but {name} does. Take the key out of one of them."
        )
    base = read_document(file, above=chain)
    _merge(document, base.root, document.own)
    base.root.ca.comment = document.own.ca.comment  # the header; others stay the base's
    return replace(document, root=base.root, base=base)


def _merge(document: Document, tree: CommentedMap, changes: CommentedMap, above: Keys = ()) -> None:
    """Put the values of a document into the tree of its base, from the last to the first."""
    position = len(tree)
    for key in reversed(changes):
        old, new, keys = tree.get(key), changes[key], (*above, key)
        is_merged = isinstance(new, CommentedMap) and not tag_of(new) and keys not in WHOLE_KEYS
        if key not in tree:
            token = changes.ca.items.get(key, [None] * 3)[2]
            comment = token.value.partition("\n")[0] if token else ""
            tree.insert(position, key, new, comment or None)
        elif is_merged and isinstance(old, CommentedMap):
            _merge(document, old, new, keys)
        elif is_merged and tag_of(old).startswith((*BUILDER_TAGS, *REFERENCE_TAGS)):
            raise SbkitError(
                f"`{dotted(keys)}` ({document.place(keys)}) must have a tag, such as !new:, "
                f"because the base's `{tag_of(old)}` has no keys to merge with. Add the tag."
            )
        else:
            tree[key] = new
        position = [*tree].index(key)


def _include(document: Document, keys: Keys, node: object) -> None:
    """Put the tree of a file in the place of ``!include:FILE``; keys beside the tag override it."""
    inner = read_document(document.path.parent / tag_of(node).removeprefix(INCLUDE_TAG))
    above = f"{keys[0]}{''.join(f'[{key}]' for key in keys[1:])}"
    nodes: dict[int, Any] = {id(each): each for _, each in walk(inner.root)}  # an alias once
    for each in nodes.values():
        if tag_of(each) in REFERENCE_TAGS:  # to keys of its own file
            each.value = re.sub(r"<([^].[>]+)", rf"<{above}[\1]", each.value)
    try:
        recursive_update(inner.root, node if isinstance(node, CommentedMap) else {}, True)
    except KeyError as error:
        raise SbkitError(f"`{dotted(keys)}` ({document.place(keys)}): {error.args[0]}.") from error
    reduce(getitem, keys[:-1], document.root)[keys[-1]] = inner.root
    document.included[keys] = inner


def read_yaml_text(path: Path) -> str:
    """Read a file of UTF-8 text; raises SbkitError where it cannot be read, or is none."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        there = path.parent.glob("*.yaml")
        near = did_you_mean(path.name, (each.name for each in there))  # a folder is no likeness
        raise SbkitError(
            f"The hparams file must be readable, but {path} is not ({error.strerror})."
            f"{near or ' Check its name.'}"
        ) from error
    except UnicodeDecodeError as error:
        raise SbkitError(f"{path} must be UTF-8 text, but is not. Save it as UTF-8.") from error


def read_tuple(text: str) -> tuple[object, ...]:
    """Read ``(1, 2)`` as HyperPyYAML does; raises SbkitError for anything but plain values."""
    try:
        return tuple(yaml.safe_load(f"[{text[1:-1]}]"))
    except yaml.YAMLError as error:
        raise SbkitError(
            f"`{text}` must be a tuple of plain values, because of its parentheses, but cannot be "
            "read. Write it without them if it is text."
        ) from error
