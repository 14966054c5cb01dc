"""Read the hyperparameters of a run from its YAML and overrides, and build its objects."""

import sys
from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, reduce
from io import StringIO
from itertools import pairwise
from operator import getitem
from pathlib import Path
from typing import Any

from hyperpyyaml import load_hyperpyyaml
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.loader import Loader
from ruamel.yaml.nodes import MappingNode, Node
from ruamel.yaml.representer import RoundTripRepresenter

from sbkit.base.errors import ConfigError, SbkitError
from sbkit.base.files import write_text_atomically
from sbkit.base.imports import search_folders
from sbkit.base.ranges import ARGUMENT, KEYS, REQUIRED, ranges_of, refusal, require_in_range
from sbkit.config.document import (
    BUILDER_TAGS,
    REFERENCE,
    Document,
    Keys,
    Only,
    children,
    dotted,
    holds_object,
    plain_value,
    read_document,
    read_yaml_text,
    referenced,
    remove_tuple_rule,
    resolve_references,
    tag_of,
    text_of,
    walk,
)
from sbkit.config.overrides import apply_overrides

OUTPUT_FOLDER = "output_folder"  # the key of the folder that a run writes to
RECIPE = "recipe"  # the key that names the recipe


class MissingSettingError(ConfigError, KeyError, AttributeError):
    """Raised where code reads a key that the YAML does not have."""

    def __init__(self, name: str) -> None:
        super().__init__(f"This run reads `{name}`, which is not in the YAML.", keys=(name,))


class Settings(Mapping[str, Any]):
    """The hyperparameters of a YAML by key, which cannot be changed.

    `settings["lr"]` records the key as read, for `sbkit check`, and so do `get`, `in` and a copy,
    which call it; `items` and `values` record none.

    >>> settings = Settings({"lr": 0.1, "learning_pace": 3})
    >>> settings["lr"], settings.get("seed", 1)
    (0.1, 1)
    >>> sorted(settings.names_read)
    ['lr', 'seed']
    """

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = dict(values)
        self.names_read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names_read.add(name)
        if name not in self._values:
            raise MissingSettingError(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)

    def items(self) -> ItemsView[str, Any]:
        return self._values.items()

    def values(self) -> ValuesView[Any]:
        return self._values.values()

    def with_values(self, values: Mapping[str, object]) -> "Settings":
        """Return a copy with other values; both record the keys that are read."""
        settings = Settings({**self._values, **values})
        settings.names_read = self.names_read
        return settings


class SettingAttributes:
    """The values of ``settings`` as attributes, like the `hparams` of SpeechBrain's Brain."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy` and `pickle` look for these
            raise AttributeError(name)
        return self.settings[name]


@dataclass(frozen=True)
class Resolved:
    """A YAML as it takes effect."""

    document: Document  # with the overrides, and the defaults of keys that the YAML leaves out
    tree: CommentedMap  # with the references resolved, too
    defaults: Sequence[str]  # the keys that the YAML leaves out and no override sets

    @cached_property
    def text(self) -> str:
        """The YAML with its references resolved."""
        return _dump(self.tree)

    @property
    def one_file(self) -> str:
        """The YAML merged with its base, overrides and defaults; references and comments stay."""
        return _dump(self.document.root)

    @property
    def one_file_without_defaults(self) -> str:
        """The same, without the keys that the YAML leaves out."""
        root = deepcopy(self.document.root)
        for name in self.defaults:
            del root[name]
        return _dump(root)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The root-level values that contain no object."""
        plain = {key: plain_value(node) for key, node in self.tree.items() if key[:2] != "__"}
        return {key: value for key, value in plain.items() if not holds_object(value)}

    @property
    def module_names(self) -> list[str]:
        """The modules and classes that the YAML names."""
        tags = [tag_of(node).partition(":")[2] for _, node in walk(self.tree)]
        return [*tags, *(str(self.settings.get(key)) for key in (RECIPE, "corpus"))]

    def arguments_out_of_range(self) -> dict[Keys, str]:
        """Return an error for each argument out of its class's range, by its keys.

        An argument that refers to another key counts under that key. Imports the classes.
        """
        errors: dict[Keys, str] = {}
        for keys, node in walk(self.document.root):
            if not tag_of(node).startswith(BUILDER_TAGS):
                continue
            ranges = ranges_of(tag_of(node).partition(":")[2])
            for name, child in children(node):
                range_ = ranges.get(name, ARGUMENT)
                value = plain_value(reduce(getitem, (*keys, name), self.tree))
                is_whole = REFERENCE.fullmatch(text_of(child))
                path = referenced(child)[0] if is_whole else (*keys, name)
                if not (holds_object(value) or value in range_):
                    errors.setdefault(path, refusal(dotted(path), value, range_))
        return errors


_resolved: dict[tuple[Path, str], Resolved] = {}  # a run reads one or two YAMLs a dozen times


def resolve(yaml_file: Path | str, overrides: Mapping[str, object]) -> Resolved:
    """Read a file with its overrides, again only if it has changed; do not modify the result.

    From then on, Python finds the modules beside it.
    """
    yaml_file = Path(yaml_file)
    key = (yaml_file, repr(overrides))
    resolved = _resolved.get(key)
    texts = resolved.document.texts if resolved else {}
    if resolved is None or any(read_yaml_text(file) != text for file, text in texts.items()):
        document = read_document(yaml_file)
        defaults = insert_defaults(document, overrides)
        apply_overrides(document, overrides)
        resolved = Resolved(document, resolve_references(document), defaults)
        _resolved[key] = resolved
    search_folders(resolved.document.module_folders)
    return resolved


def insert_defaults(document: Document, overrides: Mapping[str, object]) -> list[str]:
    """Insert the keys that a YAML with a recipe leaves out; return those without an override.

    They are those of `KEYS` with a default, and overridden ones of the recipe's ranges.
    """
    root = document.root
    if RECIPE not in root:
        return []
    optional = [name for name in KEYS if KEYS[name].default is not REQUIRED]
    recipe = str(root[RECIPE])
    is_trusted = recipe.startswith(("sbkit.", "recipes.")) or not document.is_of_run
    for name in overrides.keys() - root.keys() - {*optional}:
        search_folders(document.module_folders)
        # A run folder may be somebody else's: reading its YAML imports no module of theirs.
        can_ask = is_trusted or recipe.rpartition(".")[0] in sys.modules
        if can_ask and name in ranges_of(recipe):
            root[name] = None
    names = [name for name in optional if root.get(name) is None]
    names = [name for name in names if name not in root or None not in KEYS[name].values]
    defaults = [name for name in names if name not in overrides]
    for name in sorted(names, key=defaults.__contains__):  # those with an override first
        root[name] = deepcopy(KEYS[name].default)
        root.yaml_add_eol_comment(KEYS[name].meaning, name)
    if defaults:
        title = "======== defaults of the keys that the YAML leaves out\n\n"
        root.yaml_set_comment_before_after_key(defaults[0], before=title)
    return defaults


def read_settings(yaml_file: Path | str, overrides: Mapping[str, object]) -> Settings:
    """Read the root-level values that take effect and contain no object.

    overrides: nested, as `parse_overrides` returns them: `{"Transformer": {"dropout": 0.2}}`.
    """
    return Settings(deepcopy(dict(resolve(yaml_file, overrides).settings)))


def load_hparams(yaml_file: Path | str, overrides: Mapping[str, object]) -> Settings:
    """Check the ranges of all values, and build everything that the file declares.

    overrides: as of `read_settings`.
    Returns the values and objects by their keys in the YAML.

    >>> load_hparams(Path("hparams/ctc.yaml"), {})["compute_features"]  # doctest: +SKIP
    Fbank()
    """
    resolved = resolve(yaml_file, overrides)
    require_in_range(resolved.settings)
    for keys, message in resolved.arguments_out_of_range().items():
        raise ConfigError(f"{message} ({resolved.document.place(keys)})", keys=keys)
    path: list[Node] = []  # from the root to what is being built

    class TracingLoader(Loader):
        """HyperPyYAML's loader; after a failure, the path stays."""

        def construct_object(self, node: Node, deep: bool = True) -> object:
            path.append(node)
            value: object = super().construct_object(node, deep)
            path.pop()
            return value

    try:
        return Settings(load_hyperpyyaml(resolved.text, loader=TracingLoader))
    except Exception as error:  # of any class or function that the YAML names
        raise _explain(error, path, resolved.document) from error


def save_yaml(path: Path, yaml_file: Path, overrides: Mapping[str, object]) -> None:
    """Write the YAML with its overrides as one file, whose references stay."""
    write_text_atomically(path, resolve(yaml_file, overrides).one_file)


def _dump(tree: CommentedMap) -> str:
    stream = StringIO()
    writer = YAML()
    writer.Representer = type("Writer", (RoundTripRepresenter,), {})
    writer.Representer.add_representer(  # ruamel's representer writes nothing for None
        type(None), lambda dumper, _: dumper.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    writer.Representer.add_representer(Only, RoundTripRepresenter.represent_dict)
    writer.indent(mapping=4, sequence=6, offset=4)
    remove_tuple_rule()
    writer.dump(tree, stream)
    return stream.getvalue()


def _explain(cause: Exception, path: list[Node], document: Document) -> ConfigError:
    """Explain why the last node of a path cannot be built."""
    keys: Keys = ()
    for parent, child in pairwise(path):
        is_map = isinstance(parent, MappingNode)
        items = [(k.value, v) for k, v in parent.value] if is_map else enumerate(parent.value)
        keys = (*keys, *(key for key, node in items if node is child))
    kind, _, name = str(path[-1].tag).partition(":")
    where = f"`{dotted(keys)}` ({document.place(keys)})"
    if isinstance(cause, SbkitError):
        return ConfigError(f"{cause} ({where})", keys=keys)
    reason = str(cause.args[-1] if cause.args else cause).partition("\n")[0]  # HyperPyYAML's first
    advice = " A module of your own must lie beside the YAML, or on PYTHONPATH."
    if isinstance(cause, TypeError):
        is_incomplete = "missing" in reason and kind == "!new"
        advice = " Add them, or write `!name:` if the recipe gives them." if is_incomplete else ""
    return ConfigError(
        f"{where} cannot be made of `{name or kind}`: {type(cause).__name__}: {reason}.{advice}",
        keys=keys,
    )
