"""Read a HyperPyYAML file into a tree with its tags and line numbers, without building objects.

A file with the key `base` holds only the differences from that file. A mapping without a tag merges
into the base's mapping or object by its keys; any other value replaces the base's, and so does a
mapping that is empty or has the tag ``!only``. Overrides change a file as if they were another file
with that file as its base.

HyperPyYAML silently writes an unresolved node into text, and leaves ``-1 * 2`` as text; this module
refuses both.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Set
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import date
from functools import lru_cache, reduce
from itertools import chain
from operator import getitem
from pathlib import Path
from typing import Any

import yaml
from hyperpyyaml.core import recursive_resolve, recursive_update
from ruamel.yaml import YAML, resolver
from ruamel.yaml.comments import CommentedMap, CommentedSeq, TaggedScalar
from ruamel.yaml.constructor import RoundTripConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.tag import Tag

from sbkit.base.errors import ConfigError
from sbkit.base.files import RUN_YAML, is_run, require_regular
from sbkit.base.messages import did_you_mean
from sbkit.base.ranges import Flag, Range, as_flag, constraint_of, takes_text
from sbkit.base.user_folders import expand_home
from sbkit.config.keys import KEYS, Key, SomeTexts

Keys = tuple[str | int, ...]

REFERENCE_TAGS = ("!ref", "!copy")
INCLUDE_TAG = "!include:"
ONLY_TAG = "!only"
BUILDER_TAGS = ("!new:", "!name:", "!module:", "!apply:")
OBJECT_TAGS = (*BUILDER_TAGS, *REFERENCE_TAGS)
BASE_KEY = "base"
# Values that are always replaced as a whole, because users choose the keys of these mappings.
REPLACED_WHOLE = {"freeze", "lr_scale", "layer_decay", "encoder_config", "lm_text", "mix"}
MERGE_TAG = "tag:yaml.org,2002:merge"
BOOL_TAG, TEXT_TAG = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:str"
NUMBER_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp")}
REFERENCE = re.compile(r"<([^>]*)>")
TUPLE = re.compile(r"\(.*\)")
ARITHMETIC = re.compile(r"[-+*/%().\deE\s]*")
NEGATIVE = re.compile(r"(?:^|[-+*/%(])\s*-\s*[\d.(]")
MAX_YAML_VALUES = 100_000  # with each alias written out; hparams/ctc.yaml has 200
MAX_JOINED_CHARACTERS = 100_000  # that references may join
EXPONENTS = Range(low=0, high=99, advice="")
MAX_INTEGER = 10**100
OBJECT = object()  # a placeholder for an object that would be built


class Only(dict[str, Any]):
    """An override that replaces a mapping of the YAML; a plain mapping changes some of its keys.

    >>> Only({"train": "mine.csv"})
    Only({'train': 'mine.csv'})
    """

    def __repr__(self) -> str:
        return f"Only({super().__repr__()})"


# ---- keys and nodes


def dotted(keys: Keys) -> str:
    """Write a path of keys as an override does: ``Transformer.d_model``."""
    return ".".join(str(key) for key in keys)


def tag_of(node: object) -> str:
    """Return the node's explicit tag, or an empty string."""
    return getattr(getattr(node, "tag", None), "value", None) or ""


def text_of(node: object) -> str:
    """Return the text of a tagged scalar."""
    return str(getattr(node, "value", ""))


def referenced_paths(node: object) -> list[Keys]:
    """Return the path of keys of each ``<a[b].attribute>`` in a reference."""
    if tag_of(node) not in REFERENCE_TAGS:
        return []
    names = (name.partition(".")[0] for name in REFERENCE.findall(text_of(node)))
    return [tuple(part.strip("]") for part in name.split("[")) for name in names]


def references_of(root: CommentedMap) -> list[tuple[Keys, str]]:
    """List the path of each reference in a tree, and the root-level key that it names."""
    return [(keys, str(path[0])) for keys, node in walk(root) for path in referenced_paths(node)]


def merges(value: object, keys: Keys) -> bool:
    """Return whether a value only changes keys of the mapping at ``keys``; else it replaces it."""
    is_plain = isinstance(value, Mapping) and not (tag_of(value) or isinstance(value, Only))
    return is_plain and value != {} and dotted(keys) not in REPLACED_WHOLE


def walk(node: object, keys: Keys = ()) -> Iterator[tuple[Keys, object]]:
    """Visit every node, children first, in the order in which HyperPyYAML resolves them."""
    for key, child in children(node):
        yield from walk(child, (*keys, key))
    yield keys, node


def children(node: object) -> list[tuple[str | int, object]]:
    """Return the items of a mapping or a list; none of a scalar."""
    if isinstance(node, CommentedMap):
        return [*node.items()]
    return [*enumerate(node)] if isinstance(node, CommentedSeq) else []


def plain_value(node: Any) -> Any:
    """Convert a resolved node to plain Python values, with `OBJECT` for an object to be built."""
    if tag_of(node) == ONLY_TAG:
        return Only({key: plain_value(value) for key, value in node.items()})
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


def limit_aliases(root: object) -> None:
    """Raise ConfigError for a tree that is huge once its aliases are expanded.

    root: parsed nodes, or constructed values.
    """
    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = MAX_YAML_VALUES  # for a node that contains itself
            nodes: Any = node if isinstance(node, tuple) else getattr(node, "value", None)
            is_parsed = isinstance(nodes, list | tuple)  # and not yet constructed
            parts = nodes if is_parsed else [child for _, child in children(node)]
            sizes[id(node)] = 1 + sum(size(part) for part in parts)
        return sizes[id(node)]

    if size(root) > MAX_YAML_VALUES:
        raise ConfigError(
            f"A YAML may have {MAX_YAML_VALUES:,} values, but this one has more once its aliases "
            "are expanded. Use fewer `*` and `!ref`."
        )


class PlainLoader(yaml.SafeLoader):
    """Read plain values, but refuse aliases that expand to many."""

    def construct_document(self, node: yaml.Node) -> Any:
        limit_aliases(node)
        return super().construct_document(node)


def holds_object(value: object) -> bool:
    """Return whether a plain value contains an object to be built."""
    if isinstance(value, dict):
        return any(map(holds_object, value.values()))
    return any(map(holds_object, value)) if isinstance(value, list) else value is OBJECT


def read_tuple(text: str) -> tuple[object, ...]:
    """Read ``(1, 2)`` as HyperPyYAML does."""
    try:
        return tuple(yaml.load(f"[{text[1:-1]}]", PlainLoader))
    except yaml.YAMLError as error:
        raise ConfigError(
            f"`{text}` is read as a tuple. If it is text, write it without parentheses."
        ) from error


def remove_tuple_rule() -> None:
    """Undo the rule for tuples that each call of HyperPyYAML adds to ruamel's global list."""
    rules = resolver.implicit_resolvers
    rules[:] = [rule for rule in rules if rule[1] != "!tuple"]


# ---- a file with its base and its includes


@dataclass(frozen=True)
class Document:
    """A file merged with its base and with included files."""

    path: Path
    root: CommentedMap
    own_keys: Set[str]  # root-level keys that the file sets to values different from its base's
    places: dict[Keys, str]  # FILE:LINE
    # The path of each reference, also of a replaced one, and the root-level key that it names
    references: list[tuple[Keys, str]]
    texts: dict[Path, str]  # the content of each file

    @property
    def is_in_run_folder(self) -> bool:
        """Whether the file lies in a run folder, perhaps somebody else's."""
        return self.path.name == RUN_YAML and is_run(self.path.parent)

    @property
    def module_folders(self) -> list[str]:
        """The folders of the YAML and its bases, which may hold modules; none in a run folder."""
        return [] if self.is_in_run_folder else [str(file.resolve().parent) for file in self.texts]

    def place(self, keys: Keys) -> str:
        """Return FILE:LINE of a key, or of its nearest parent in a file."""
        while keys and keys not in self.places:
            keys = keys[:-1]
        return self.places.get(keys, f"{self.path}:1")


class Constructor(RoundTripConstructor):
    """Read root-level values as their keys require: words as flags, and text as it is written.

    YAML would read `off` as text, 007 as a number and 2026-11-27 as a date.
    """

    def construct_document(self, node: Any) -> Any:
        limit_aliases(node)
        _refer_to_merged(node, "", {})
        for key, value in node.value if isinstance(node, MappingNode) else ():
            constraint = KEYS.get(str(key.value), Key()).values
            if isinstance(constraint, Flag) and isinstance(as_flag(value.value), bool):
                value.tag, value.value = BOOL_TAG, str(as_flag(value.value))
            elif takes_text(constraint):
                is_scalar = isinstance(value, ScalarNode)  # then false may mean "none"
                _keep_text(value, NUMBER_TAGS if is_scalar else {*NUMBER_TAGS, BOOL_TAG})
        return super().construct_document(node)


Constructor.add_constructor("!tuple", lambda reader, node: reader.construct_scalar(node))


def _refer_to_merged(node: Any, path: str, paths: dict[int, str]) -> None:
    """Replace ``<<: *other`` by references to the keys of `other`, so that overrides reach them."""
    paths.setdefault(id(node), path)
    for key, value in [*node.value] if isinstance(node, MappingNode) else ():
        if key.tag != MERGE_TAG:
            _refer_to_merged(value, f"{path}[{key.value}]" if path else key.value, paths)
            continue
        node.value.remove((key, value))
        for source in value.value if isinstance(value, SequenceNode) else [value]:
            names = {name.value for name, _ in node.value}
            for name, item in [pair for pair in source.value if pair[0].value not in names]:
                text = f"<{paths.get(id(source))}[{name.value}]>"
                reference = ScalarNode("!ref", text, item.start_mark, item.end_mark)
                node.value.append((name, reference if id(source) in paths else item))


def _keep_text(node: Node, tags: Set[str]) -> None:
    """Make YAML read values with one of these tags as text, in a node and below it."""
    if node.tag in tags:
        node.tag = TEXT_TAG
    if not isinstance(node, ScalarNode):
        children = chain(*node.value) if isinstance(node, MappingNode) else node.value
        for child in children:
            _keep_text(child, tags)


def read_document(path: Path | str, readers: tuple[Path, ...] = ()) -> Document:
    """Read a file and its base into a tree.

    readers: the files that have led to this one by `base` or `!include`, the first one first.
    """
    path = Path(path)
    if path.resolve() in (reader.resolve() for reader in readers):
        chain = " -> ".join(map(str, (*readers, path)))
        raise ConfigError(f"{path} reads itself: {chain}. Name another file as `{BASE_KEY}`.")
    readers = (*readers, path)
    text = read_yaml_text(path)
    try:
        root = deepcopy(parse_yaml(text))
    except (YAMLError, ValueError, LookupError, RecursionError) as error:  # ruamel.yaml's
        mark, problem = (getattr(error, name, None) for name in ("problem_mark", "problem"))
        if "expected ':'" in str(problem):  # the key may end many lines above
            mark = getattr(error, "context_mark", mark)
        place = f"{path}:{mark.line + 1}" if mark else path
        advice = " Indent it with spaces." if r"'\t'" in str(problem) else ""
        if re.search("':'|mapping values|<block end>|<document start>", str(problem)):
            advice = " Write a space after each colon, and keys of a level in one column."
        raise ConfigError(f"{place} is not valid YAML: {problem or error}.{advice}") from error
    if not isinstance(root, CommentedMap) or tag_of(root):
        kind = tag_of(root) or ("empty" if root is None else "something else")
        raise ConfigError(f"{path} must consist of `key: value` lines, but its root is {kind}.")
    places = {
        (*keys, key): f"{path}:{line + 1}"
        for keys, node in walk(root)
        if isinstance(node, CommentedMap | CommentedSeq)
        for key, (line, *_) in (node.lc.data or {}).items()
    }
    document = Document(path, root, {*root} - {BASE_KEY}, places, [], {path: text})
    for keys, node in [*walk(root)]:
        if tag_of(node).startswith(INCLUDE_TAG):
            _include(document, keys, node, readers)
    document.references.extend(references_of(root))
    if BASE_KEY not in root:
        _drop_only_tags(root)
        return document
    base = read_document(path.parent / str(root.pop(BASE_KEY)), readers)
    own_keys = {  # without a null for a key that the base lacks, which no code needs to read
        key for key in root if key not in base.root or root[key] not in (None, base.root[key])
    }
    _merge(document, base.root, root)
    _drop_only_tags(base.root)
    base.root.ca.comment = root.ca.comment  # the header; other comments stay the base's
    return replace(
        document,
        root=base.root,
        own_keys=own_keys,
        places=base.places | document.places,
        references=base.references + document.references,
        texts=document.texts | base.texts,
    )


@lru_cache(maxsize=16)
def parse_yaml(text: str) -> Any:
    """Parse a text only once: a run reads one or two files a dozen times, in 15 ms each."""
    reader = YAML()
    reader.Constructor = Constructor
    return reader.load(text)


def read_yaml_text(path: Path) -> str:
    """Read a file of UTF-8 text, or raise ConfigError."""
    try:
        require_regular(path, subject="A YAML")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        advice = did_you_mean(path.name, (file.name for file in path.parent.glob("*.yaml")))
        raise ConfigError(f"{path} cannot be read ({error.strerror}).{advice}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text. Save it as UTF-8.") from error


def _drop_only_tags(root: CommentedMap) -> None:
    """Drop each `!only`, which takes effect only when its file is merged into the base."""
    for _, node in walk(root):
        if isinstance(node, CommentedMap | CommentedSeq) and tag_of(node) == ONLY_TAG:
            node.yaml_set_ctag(Tag(suffix=None))


def _merge(
    document: Document, tree: CommentedMap, changes: CommentedMap, parents: Keys = ()
) -> None:
    """Merge the values of a document into the tree of its base, from the last to the first."""
    position = len(tree)
    for key in reversed(changes):
        old = tree.get(key)
        new = changes[key]
        keys = (*parents, key)
        is_mapping = isinstance(new, CommentedMap) and tag_of(new) in ("", ONLY_TAG)
        if key not in tree:
            token = changes.ca.items.get(key, [None] * 3)[2]
            comment = token.value.partition("\n")[0] if token else ""
            tree.insert(position, key, new, comment or None)
        elif new is None and not parents and tag_of(old).startswith(BUILDER_TAGS):
            position = [*tree].index(key)
            del tree[key]
            continue
        elif merges(new, keys) and isinstance(old, CommentedMap):
            _merge(document, old, new, keys)
        elif is_mapping and tag_of(old).startswith(BUILDER_TAGS if tag_of(new) else OBJECT_TAGS):
            raise ConfigError(
                f"`{dotted(keys)}` ({document.place(keys)}) cannot be merged with the base's "
                f"`{tag_of(old)}`. Write arguments that it has, or a tag, such as !new:, "
                "which replaces them all."
            )
        else:
            tree[key] = as_flag(new) if isinstance(old, bool) else new
        position = [*tree].index(key)


def _include(document: Document, keys: Keys, node: object, readers: tuple[Path, ...]) -> None:
    """Replace ``!include:FILE`` by the tree of the file; keys below the tag override it."""
    inner = read_document(document.path.parent / tag_of(node).removeprefix(INCLUDE_TAG), readers)
    prefix = f"{keys[0]}{''.join(f'[{key}]' for key in keys[1:])}"
    for child in {id(child): child for _, child in walk(inner.root)}.values():  # each alias once
        if isinstance(child, TaggedScalar) and tag_of(child) in REFERENCE_TAGS:
            child.value = re.sub(r"<([^].[>]+)", rf"<{prefix}[\1]", child.value)
    changes = node if isinstance(node, CommentedMap) else {}
    try:
        for path, child in [*walk(changes)][:-1]:  # without `changes` itself, which comes last
            if tag_of(child) == ONLY_TAG:
                reduce(getitem, path[:-1], inner.root)[path[-1]] = child
        recursive_update(inner.root, changes, True)
    except KeyError as missing:
        message = f"`{dotted(keys)}` ({document.place(keys)}): {missing.args[0]}."
        raise ConfigError(message) from missing
    reduce(getitem, keys[:-1], document.root)[keys[-1]] = inner.root
    document.places.update({(*keys, *path): place for path, place in inner.places.items()})
    document.texts.update(inner.texts)


# ---- references


def resolve_references(document: Document, *, needs_values: bool = True) -> CommentedMap:
    """Resolve a copy of the document's tree; a reference to an object becomes the object's node.

    needs_values: whether a ``!PLACEHOLDER`` without a value is refused; else it becomes null.
    """
    root = deepcopy(document.root)

    def resolve(node: Any, keys: Keys) -> object:
        for key, child in children(node):
            node[key] = resolve(child, (*keys, key))
        where = f"`{dotted(keys)}: {tag_of(node)} {text_of(node)}` ({document.place(keys)})"
        if tag_of(node) == "!PLACEHOLDER":
            if needs_values:
                raise ConfigError(f"{where} needs a value. Override it.")
            return None
        value = _follow(root, node, where) if tag_of(node) in REFERENCE_TAGS else node
        # Shells do not expand a home after `=`.
        return expand_home(value) if isinstance(value, str) else value

    resolve(root, ())
    limit_aliases(root)
    return root


def _follow(root: CommentedMap, node: object, where: str) -> object:
    """Return the value of a reference; ``where`` names it in errors."""
    text = text_of(node)
    paths = referenced_paths(node)
    if not paths:
        raise ConfigError(f"{where} names no key. Write it in angle brackets: `!ref <key>`.")
    is_whole = REFERENCE.fullmatch(text) is not None
    filled_text = text
    for keys in paths:
        target: Any = _reach(root, keys, where)
        if target is None and is_whole:
            return None  # a run sets it when it starts, such as `encoder_config`
        if tag_of(target) in REFERENCE_TAGS:
            raise ConfigError(f"{where} is resolved too early. Move `{dotted(keys)}` above it.")
        if isinstance(target, str) and REFERENCE.search(target):
            raise ConfigError(f"{where}: write `!ref` before {target} of `{dotted(keys)}`, too.")
        if not is_whole and target in constraint_of(SomeTexts):
            target = "-".join(target)  # for the name of a folder: en-it for [en, it]
            text = text.replace(f"<{REFERENCE.split(filled_text)[1]}>", target)
        is_object = bool(tag_of(target)) or isinstance(target, dict | list)
        if is_object and not is_whole:
            raise ConfigError(f"{where} puts `{dotted(keys)}` into text, but that is an object.")
        before, _, after = REFERENCE.split(filled_text, maxsplit=1)
        filled_text = "" if is_object else f"{before}{target}{after}"
        if len(filled_text) > MAX_JOINED_CHARACTERS:
            raise ConfigError(f"{where} joins more than {MAX_JOINED_CHARACTERS:,} characters.")
    try:
        _refuse_large("" if is_whole else filled_text)
        value: object = recursive_resolve(text, [], root, tag_of(node) == "!copy")
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise OverflowError("the result is too large")
    except ArithmeticError as error:
        raise ConfigError(f"{where} cannot be computed: {error}.") from error
    is_arithmetic = isinstance(value, str) and not is_whole and ARITHMETIC.fullmatch(value)
    if is_arithmetic and NEGATIVE.search(str(value)):
        fault = f"{where} stays the text {value!r}: HyperPyYAML computes with no negative numbers."
        raise ConfigError(f"{fault} Write the result.")
    return value


def _refuse_large(expression: str) -> None:
    """Raise OverflowError for an expression that may take hours: powers, and repeated text."""
    try:
        nodes = [*ast.walk(ast.parse(expression, mode="eval"))]
    except SyntaxError:  # HyperPyYAML leaves it as text, such as a/**/b
        return
    operations = [node for node in nodes if isinstance(node, ast.BinOp)]
    exponents = [node.right for node in operations if isinstance(node.op, ast.Pow)]
    constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
    are_small = all(getattr(exponent, "value", None) in EXPONENTS for exponent in exponents)
    has_text = any(isinstance(constant, str | bytes) for constant in constants)
    if len(exponents) > 1 or not are_small or (operations and has_text):
        raise OverflowError(f"it may have only numbers and one power, to {EXPONENTS}")


def _reach(root: CommentedMap, keys: Keys, where: str) -> object:
    node: object = root
    for key in keys:
        if node is None:
            return None
        if not isinstance(node, dict) or key not in node:
            advice = did_you_mean(str(key), node if isinstance(node, dict) else ())
            raise ConfigError(f"{where} leads nowhere: there is no `{key}`.{advice}")
        node = node[key]
    return node
