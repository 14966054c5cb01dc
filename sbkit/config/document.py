"""A HyperPyYAML file as a tree that remembers its tags and its lines; nothing in it is built.

A file with a key `base` holds only what differs from that file. A plain value, a list or an object
with a tag replaces the base's. A mapping without a tag merges into the base's mapping or object by
its keys, as `--Transformer.dropout=0.2` does. A new key stands before the base's key that follows
it in this file, else at the end.

References are resolved in a copy of the tree. HyperPyYAML writes an unresolved node into text in
silence, and leaves ``-1 * 2`` as text: both are refused here.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import date
from difflib import get_close_matches
from functools import reduce
from operator import getitem, itemgetter
from pathlib import Path
from typing import Any

import yaml
from hyperpyyaml.core import recursive_resolve, recursive_update
from ruamel.yaml import YAML, constructor, resolver
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import RoundTripConstructor

from sbkit.base.errors import ConfigError

Keys = tuple[str | int, ...]

REFERENCE_TAGS = ("!ref", "!copy")
INCLUDE_TAG = "!include:"
PLACEHOLDER_TAG = "!PLACEHOLDER"
BUILDER_TAGS = ("!new:", "!name:", "!module:", "!apply:")
BASE_KEY = "base"
WHOLE_KEYS = {("freeze",), ("lr_scale",), ("layer_decay",), ("encoder_config",)}  # never merged
REFERENCE = re.compile(r"<([^>]*)>")
TUPLE = re.compile(r"\(.*\)")
ARITHMETIC = re.compile(r"[-+*/%().\deE\s]*")
NEGATIVE = re.compile(r"(?:^|[-+*/%(])\s*-\s*[\d.(]")
MIN_SPELLING, MIN_SIMILARITY = 0.75, 0.6  # share of letters that two words have in common, in order
OBJECT = object()  # stands for an object that would be built


# -- keys and nodes --------------------------------------------------------------------------------


def nearest(word: str, words: Iterable[object]) -> str | None:
    """Return the key that was probably meant, None if none is near.

    That is one of nearly the same spelling; else one that has all the word's parts in it
    (`epochs`: `number_of_epochs`); else a similar one of the same first part (`batch_size`:
    `batch_seconds`). Sharing a last part is not enough: `beam_size` is no `vocab_size`.
    """
    candidates = [str(candidate) for candidate in words]
    parts = word.split("_")
    same_spelling = get_close_matches(word, candidates, n=1, cutoff=MIN_SPELLING)
    longer = [key for key in candidates if {*parts} <= {*key.split("_")}]
    same_start = [key for key in candidates if key.split("_")[0] == parts[0]]
    similar = get_close_matches(word, same_start, n=1, cutoff=MIN_SIMILARITY)
    return next(iter((*same_spelling, *sorted(longer, key=len), *similar)), None)


def did_you_mean(word: str, words: Iterable[object]) -> str:
    """Return a question that offers the word that was probably meant, or nothing."""
    candidate = nearest(word, words)
    return f" Did you mean `{candidate}`?" if candidate else ""


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


def plain_value(node: Any) -> Any:
    """Turn a resolved node into Python's own values; an object that would be built is `OBJECT`."""
    if tag_of(node):
        return OBJECT
    if isinstance(node, dict):
        return {key: plain_value(value) for key, value in node.items()}
    if isinstance(node, list):
        return [plain_value(value) for value in node]
    if isinstance(node, str):
        return read_tuple(node) if TUPLE.fullmatch(node) else str(node)
    if node is None or isinstance(node, bool | date):
        return node
    return int(node) if isinstance(node, int) else float(node)


def holds_object(value: object) -> bool:
    """Return whether a plain value has an object in it."""
    if isinstance(value, dict | list):
        return any(map(holds_object, value.values() if isinstance(value, dict) else value))
    return value is OBJECT


def read_tuple(text: str) -> tuple[object, ...]:
    """Read ``(1, 2)`` as HyperPyYAML does; it must hold plain values."""
    try:
        return tuple(yaml.safe_load(f"[{text[1:-1]}]"))
    except yaml.YAMLError as error:
        raise ConfigError(
            f"`{text}` is read as a tuple, because of its parentheses, but does not hold plain "
            "values. Write it without them if it is text."
        ) from error


@contextmanager
def clean_ruamel() -> Iterator[None]:
    """Restore ruamel afterwards: HyperPyYAML changes it for the whole process.

    Its tuple rule goes into ruamel's global table, and after a failure every constructor stays
    deep. The rule is also taken out while reading, for callers outside sbkit leave it behind.
    """
    rules = list(resolver.implicit_resolvers)
    resolver.implicit_resolvers[:] = [rule for rule in rules if rule[1] != "!tuple"]
    functions = [m.BaseConstructor.construct_object for m in (yaml.constructor, constructor)]
    defaults = [function.__defaults__ for function in functions]
    try:
        yield
    finally:
        resolver.implicit_resolvers[:] = rules
        for function, default in zip(functions, defaults, strict=True):
            function.__defaults__ = default


# -- a file with its base and its includes ---------------------------------------------------------


@dataclass(frozen=True)
class Document:
    """One file, with the trees of its base and of the files it includes.

    Attributes:
        own: what the file itself declares.
        root: that over its base.
        included: the included files, by their keys.
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
    """Read a file and its base into a tree; ``above`` are the files that build on this one.

    Raises:
        ConfigError: the file or a line of it is wrong.
    """
    text = read_yaml_text(path)
    try:
        reader = YAML()
        reader.Constructor = _Reader
        root = reader.load(text)
    except Exception as error:  # ruamel.yaml raises errors of many kinds for bad YAML
        mark, problem = (getattr(error, name, None) for name in ("problem_mark", "problem"))
        place = f"{path}:{mark.line + 1}" if mark else path
        advice = "Indent it with spaces." if r"'\t'" in str(problem) else "Correct it."
        raise ConfigError(f"{place} is not valid YAML: {problem or error}. {advice}") from error
    if not isinstance(root, CommentedMap) or tag_of(root):
        kind = tag_of(root) or ("empty" if root is None else "something else")
        raise ConfigError(
            f"{path} must consist of `key: value` lines, but its root is {kind}. Put every part "
            "under a key of its own."
        )
    document = Document(path, text, root, root)
    for keys, node in [*walk(root)]:
        if tag_of(node).startswith(INCLUDE_TAG):
            _include(document, keys, node)
    return _with_base(document, above) if BASE_KEY in root else document


def read_yaml_text(path: Path) -> str:
    """Read a file of UTF-8 text, or raise ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        files = path.parent.glob("*.yaml")
        candidate = did_you_mean(path.name, (file.name for file in files))  # not of another folder
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}).{candidate or ' Check its name.'}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text. Save it as UTF-8.") from error


def _with_base(document: Document, above: tuple[Path, ...]) -> Document:
    """Return the document over the one that its `base` names."""
    name, chain = str(document.own.pop(BASE_KEY)), (*above, document.path.resolve())
    file = document.path.parent / name
    if file.resolve() in chain:
        raise ConfigError(
            f"`{BASE_KEY}` ({document.place((BASE_KEY,))}) leads back to this file: {name} builds "
            "on it. Take the key out of one of them."
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
            raise ConfigError(
                f"`{dotted(keys)}` ({document.place(keys)}) has no tag, and the base's "
                f"`{tag_of(old)}` has no keys to merge with. Add a tag, such as !new:."
            )
        else:
            tree[key] = new
        position = [*tree].index(key)


def _include(document: Document, keys: Keys, node: object) -> None:
    """Replace ``!include:FILE`` by the tree of the file; keys beside the tag override it."""
    inner = read_document(document.path.parent / tag_of(node).removeprefix(INCLUDE_TAG))
    above = f"{keys[0]}{''.join(f'[{key}]' for key in keys[1:])}"
    nodes: dict[int, Any] = {id(child): child for _, child in walk(inner.root)}  # an alias once
    for child in nodes.values():
        if tag_of(child) in REFERENCE_TAGS:  # to keys of its own file
            child.value = re.sub(r"<([^].[>]+)", rf"<{above}[\1]", child.value)
    try:
        recursive_update(inner.root, node if isinstance(node, CommentedMap) else {}, True)
    except KeyError as error:
        raise ConfigError(f"`{dotted(keys)}` ({document.place(keys)}): {error.args[0]}.") from error
    reduce(getitem, keys[:-1], document.root)[keys[-1]] = inner.root
    document.included[keys] = inner


# -- references ------------------------------------------------------------------------------------


def resolve_references(document: Document, *, are_filled: bool = True) -> CommentedMap:
    """Resolve a copy of the document's tree; a reference to an object becomes the node itself.

    are_filled: every ``!PLACEHOLDER`` has a value by now; otherwise it is null.

    Raises:
        ConfigError: a reference leads nowhere, or cannot be computed.
    """
    root = deepcopy(document.root)

    def resolve(node: Any, keys: Keys) -> object:
        if isinstance(node, CommentedMap | CommentedSeq):
            for key in [*node] if isinstance(node, CommentedMap) else range(len(node)):
                node[key] = resolve(node[key], (*keys, key))
        where = f"`{dotted(keys)}: {tag_of(node)} {text_of(node)}` ({document.place(keys)})"
        if tag_of(node) == PLACEHOLDER_TAG and are_filled:
            raise ConfigError(f"{where} needs a value. Pass --{dotted(keys)}=...")
        if tag_of(node) == PLACEHOLDER_TAG:
            return None
        value = _follow(root, node, where) if tag_of(node) in REFERENCE_TAGS else node
        if isinstance(value, str) and value.startswith("~/"):  # after `=` no shell expands it
            return str(Path(value).expanduser())
        return value

    resolve(root, ())
    return root


def _follow(root: CommentedMap, node: object, where: str) -> object:
    """Return the value of a reference; ``where`` names it in errors."""
    text = text_of(node)
    if not referenced(node):
        raise ConfigError(f"{where} names no key. Write it in angle brackets: `!ref <key>`.")
    is_whole = REFERENCE.fullmatch(text) is not None
    for keys in referenced(node):
        target = _reach(root, keys, where)
        if target is None and is_whole:
            return None  # becomes known when a run starts, such as `encoder_config`
        if tag_of(target) in REFERENCE_TAGS:
            raise ConfigError(
                f"{where} refers to a reference that is resolved later. Move `{dotted(keys)}` "
                "above it."
            )
        if not is_whole and (tag_of(target) or isinstance(target, dict | list)):
            raise ConfigError(
                f"{where} puts `{dotted(keys)}` into text, which is an object. Name a value."
            )
    try:
        value: object = recursive_resolve(text, [], root, tag_of(node) == "!copy")
    except ArithmeticError as error:
        raise ConfigError(f"{where} cannot be computed: {error}. Correct it.") from error
    is_number = isinstance(value, str) and not is_whole and ARITHMETIC.fullmatch(value)
    if is_number and NEGATIVE.search(str(value)):
        raise ConfigError(
            f"{where} stays the text {value!r}: HyperPyYAML does not compute with negative "
            "numbers. Write the result."
        )
    return value


def _reach(root: CommentedMap, keys: Keys, where: str) -> object:
    node: object = root
    for key in keys:
        if node is None:
            return None
        if not isinstance(node, dict) or key not in node:
            candidate = did_you_mean(str(key), node if isinstance(node, dict) else ())
            raise ConfigError(
                f"{where} leads nowhere: there is no `{key}`.{candidate or ' Correct the name.'}"
            )
        node = node[key]
    return node
