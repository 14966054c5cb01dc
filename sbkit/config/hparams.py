"""Read the hyperparameters of a run from its YAML and overrides, and build its objects."""

from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from io import StringIO
from itertools import pairwise
from operator import getitem
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from hyperpyyaml import load_hyperpyyaml
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.loader import Loader
from ruamel.yaml.nodes import MappingNode, Node
from ruamel.yaml.representer import RoundTripRepresenter

from sbkit.base.errors import ConfigError, SbkitError
from sbkit.base.imports import search_folders
from sbkit.base.ranges import UNCHECKED, Constraint, range_error
from sbkit.config.document import (
    BUILDER_TAGS,
    REFERENCE,
    Document,
    Keys,
    Only,
    children,
    dotted,
    holds_object,
    merges,
    plain_value,
    read_document,
    referenced_paths,
    remove_tuple_rule,
    resolve_references,
    tag_of,
    text_of,
    walk,
)
from sbkit.config.keys import KEYS, REQUIRED, Key, arguments_of, require_values
from sbkit.config.overrides import apply_overrides, nest_overrides

OUTPUT_FOLDER = "output_folder"  # the key of the folder that a run writes to
RECIPE = "recipe"  # the key that names the recipe
EPOCH_COUNTER, EPOCH_LIMIT = "epoch_counter", "limit"  # the object that ends a run, its argument


class MissingSettingError(ConfigError, KeyError, AttributeError):
    """Raised where code reads a key that the YAML does not have."""

    def __init__(self, name: str) -> None:
        super().__init__(f"This run reads `{name}`, which is not in the YAML.", keys=(name,))


class Settings(Mapping[str, Any]):
    """The hyperparameters of a YAML by key, which cannot be changed.

    `settings["lr"]` records the key as read, for `sbkit check`. So do `get`, `in` and a copy, which
    call it; `items` and `values` record nothing.

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
        """Return a copy with changed values; reading either one records the key in both."""
        settings = Settings({**self._values, **values})
        settings.names_read = self.names_read
        return settings


class _Unchangeable:
    """Refuse what changes a list or a dictionary."""

    __slots__ = ()

    def _refuse(self, *_: object, **__: object) -> Any:
        raise TypeError("The settings of a run cannot be changed. Pass overrides when it is made.")

    __setitem__ = __delitem__ = __iadd__ = __ior__ = append = extend = insert = _refuse
    remove = pop = popitem = clear = sort = reverse = update = setdefault = _refuse


class FrozenDict(_Unchangeable, dict[Any, Any]):
    """A dictionary that cannot be changed."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:  # pickle would fill an empty one
        return FrozenDict, (dict(self),)


class FrozenList(_Unchangeable, list[Any]):
    """A list that cannot be changed."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenList, (list(self),)


def frozen(value: Any) -> Any:
    """Copy plain dictionaries and lists in a value as ones that cannot be changed."""
    if type(value) is dict:  # and no object of a class derived from it
        return FrozenDict({key: frozen(item) for key, item in value.items()})
    return FrozenList(map(frozen, value)) if type(value) is list else value


class SettingAttributes:
    """The values of ``settings`` as attributes, like the `hparams` of SpeechBrain's Brain."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy` and `pickle` look for these
            raise AttributeError(name)
        return self.settings[name]


class Argument(NamedTuple):
    """A plain argument of an object.

    builder: the dotted name of its class or function.
    path: its own.
    key: the path of the key that it refers to, or its own.
    """

    builder: str
    path: Keys
    key: Keys
    constraint: Constraint
    value: Any


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A YAML with its overrides, as it takes effect; later edits of the file do not change it.

    Attributes:
        user_overrides: the user's overrides, nested.
        overrides: the user's, and the ones that the run folder or its pretrained encoder add.
        declared: the YAML with its base, as it was read.
        document: the same with the overrides, and the defaults of keys that it leaves out.
        tree: the same with its references resolved.
        settings: the plain values of the root.
        defaults: the keys that the YAML leaves out and no override sets.
        keys: what is declared about the keys of its recipe, or only about those of every run.
        recipe: the class that replaces the recipe named in the YAML.
        target: the machine that the run is for, such as cuda:8; None for this one.
    """

    yaml_file: Path
    user_overrides: Mapping[str, object]
    overrides: Mapping[str, object]
    declared: Document = field(repr=False)
    document: Document = field(repr=False)
    tree: CommentedMap = field(repr=False)
    settings: Settings = field(repr=False)
    defaults: Sequence[str] = field(repr=False)
    keys: Mapping[str, Key] = field(repr=False)
    recipe: type | None = None
    target: str | None = None

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return Path(str(self.settings[OUTPUT_FOLDER]))

    @property
    def user_keys(self) -> set[str]:
        """The keys that the user has set outside the YAML."""
        return {*self.user_overrides, *(() if self.recipe is None else (RECIPE,))}

    def with_overrides(self, **overrides: object) -> "RunSpec":
        """Apply further overrides, as if they stood in the YAML; its file is not read again."""
        all_overrides = {**self.overrides, **overrides}
        spec = make_spec(
            self.declared, all_overrides, keys=self.keys, recipe=self.recipe, target=self.target
        )
        return replace(spec, user_overrides=self.user_overrides)

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

    @property
    def module_names(self) -> list[str]:
        """The modules and classes that the YAML names."""
        tags = [tag_of(node).partition(":")[2] for _, node in walk(self.tree)]
        return [*tags, *(str(plain_value(self.tree.get(key))) for key in (RECIPE, "corpus"))]

    @property
    def recipe_modules(self) -> set[str]:
        """The modules of a recipe passed in Python, of its Brain, and of their base classes."""
        if self.recipe is None:
            return set()
        brain: type | str | None = getattr(self.recipe, "brain", None)
        if isinstance(brain, str):  # MODULE.NAME, not imported yet
            return {base.__module__ for base in self.recipe.__mro__} | {brain.rpartition(".")[0]}
        classes = [self.recipe] if brain is None else [self.recipe, brain]
        return {base.__module__ for class_ in classes for base in class_.__mro__}

    def place(self, *keys: str | int) -> str:
        """Return "override of KEY" if the user has overridden the key, else FILE:LINE."""
        if keys == ("data_folder",) and self.settings.get("manifest"):
            keys = ("manifest",)  # `manifest` is read instead
        override: object = self.user_overrides
        for depth, key in enumerate(keys, start=1):
            if not isinstance(override, Mapping) or key not in override:
                break
            override = override[key]
            has_keys = any(
                len(p) > depth and p[:depth] == keys[:depth] for p in self.document.places
            )
            if not (has_keys and merges(override, keys[:depth])):
                return f"override of {dotted(keys[:depth])}"
        return self.document.place(keys)

    def source_of(self, *keys: str | int) -> Keys:
        """Return the path of the value that a path refers to, perhaps through others; else itself.

        In hparams/ctc.yaml, `epoch_counter.limit` is a reference to `number_of_epochs`.
        """
        node: Any = self.document.root
        for key in keys:
            if key not in dict(children(node)):
                return keys
            node = node[key]
        is_whole = REFERENCE.fullmatch(text_of(node)) and "." not in text_of(node)
        return self.source_of(*referenced_paths(node)[0]) if is_whole else keys

    @property
    def max_epochs(self) -> int | None:
        """The argument `limit` of the epoch counter; None if it has no such number."""
        counter = self.tree.get(EPOCH_COUNTER)
        limit = plain_value(dict(children(counter)).get(EPOCH_LIMIT))
        return limit if isinstance(limit, int) else None

    @contextmanager
    def placing_errors(self) -> Iterator[None]:
        """Add the line of the key that it concerns to an SbkitError raised in the block."""
        try:
            yield
        except SbkitError as error:
            place = self.place(*error.keys)
            if error.keys and not error.file and place not in error.message:
                error.message = f"{error.message} ({place})"
            raise

    def arguments(self) -> Iterator[Argument]:
        """Yield the plain arguments of the objects. Imports their classes."""
        for keys, node in walk(self.document.root):
            if not tag_of(node).startswith(BUILDER_TAGS):
                continue
            builder = tag_of(node).partition(":")[2]
            constraints = arguments_of(builder)
            for name, child in children(node):
                value = plain_value(reduce(getitem, (*keys, name), self.tree))
                if not holds_object(value):
                    constraint = constraints.get(str(name), UNCHECKED)
                    path = referenced_key(child, (*keys, name))
                    yield Argument(builder, (*keys, name), path, constraint, value)

    def arguments_out_of_range(self) -> dict[Keys, str]:
        """Return an error for each argument that is out of the range of its class, by its keys.

        An argument that refers to another key is listed under that key.
        """
        errors: dict[Keys, str] = {}
        for _, _, key, constraint, value in self.arguments():
            if value not in constraint:
                errors.setdefault(key, range_error(dotted(key), value, constraint))
        return errors


def read_spec(
    yaml_file: Path | str,
    overrides: Mapping[str, object] = MappingProxyType({}),
    *,
    recipe: type | None = None,
    target: str | None = None,
) -> RunSpec:
    """Read a YAML with its overrides, and the defaults (`KEYS`) of the keys that it leaves out.

    Keys that only its recipe declares are known to `declare_run`, which imports it.

    overrides: by key, such as `lr` or `Transformer.dropout`.
    recipe: replaces the recipe named in the YAML.
    target: another machine that the run is for.
    """
    return make_spec(read_document(yaml_file), overrides, recipe=recipe, target=target)


def make_spec(
    declared: Document,
    overrides: Mapping[str, object],
    *,
    keys: Mapping[str, Key] = KEYS,
    recipe: type | None = None,
    target: str | None = None,
) -> RunSpec:
    """Apply overrides and defaults to a YAML that was read; `read_spec` explains the arguments.

    The YAML of a run folder always writes to that folder. From now on, Python also searches the
    folder of the YAML for modules.

    keys: those of its recipe.
    """
    document = replace(declared, root=deepcopy(declared.root))
    user_overrides = nest_overrides(overrides)
    overrides = user_overrides
    if document.is_in_run_folder:
        overrides = {OUTPUT_FOLDER: str(document.path.parent), **user_overrides}
    search_folders(document.module_folders)
    has_recipe = recipe is not None or RECIPE in document.root
    defaults = insert_defaults(document, overrides, keys if has_recipe else {})
    apply_overrides(document, overrides)
    tree = resolve_references(document)
    plain = {key: plain_value(node) for key, node in tree.items() if key[:2] != "__"}
    settings = {key: value for key, value in plain.items() if not holds_object(value)}
    return RunSpec(
        yaml_file=document.path,
        user_overrides=user_overrides,
        overrides=overrides,
        declared=declared,
        document=document,
        tree=tree,
        settings=Settings(frozen(settings)),
        defaults=defaults,
        keys=keys,
        recipe=recipe,
        target=target,
    )


def insert_defaults(
    document: Document, overrides: Mapping[str, object], keys: Mapping[str, Key]
) -> list[str]:
    """Insert the keys that a YAML leaves out; return the ones without an override.

    These are all keys that have a default, and overridden keys of the recipe without one.
    """
    root = document.root
    names = [name for name in keys if root.get(name) is None and keys[name].default is not REQUIRED]
    names = [name for name in names if name not in root or None not in keys[name].values]
    for name in overrides.keys() & keys.keys() - KEYS.keys() - root.keys() - {*names}:
        root[name] = None
    defaults = [name for name in names if name not in overrides]
    for name in sorted(names, key=defaults.__contains__):  # overridden keys first
        root[name] = deepcopy(keys[name].default)
        root.yaml_add_eol_comment(keys[name].meaning, name)
    if defaults:
        title = "======== defaults of the keys that the YAML leaves out\n\n"
        root.yaml_set_comment_before_after_key(defaults[0], before=title)
    return defaults


def load_hparams(yaml_file: Path | str, overrides: Mapping[str, object]) -> Settings:
    """Check the ranges of all values, and build everything that the file declares.

    overrides: by key, such as `lr` or `Transformer.dropout`.
    Returns the values and objects by their keys in the YAML.

    >>> load_hparams(Path("hparams/ctc.yaml"), {})["compute_features"]  # doctest: +SKIP
    Fbank()
    """
    return build_hparams(read_spec(yaml_file, overrides))


def build_hparams(spec: RunSpec) -> Settings:
    """Check the ranges of all values, and build everything that a YAML declares."""
    search_folders(spec.document.module_folders)
    require_values(spec.settings, spec.keys)
    for keys, message in spec.arguments_out_of_range().items():
        raise ConfigError(f"{message} ({spec.place(*keys)})", keys=keys)
    path: list[Node] = []  # from the root to the node that is being built

    class TracingLoader(Loader):
        """HyperPyYAML's loader, which leaves the path of a node that fails."""

        def construct_object(self, node: Node, deep: bool = True) -> object:
            path.append(node)
            value: object = super().construct_object(node, deep)
            path.pop()
            return value

    try:
        built = load_hyperpyyaml(spec.text, loader=TracingLoader)
    except Exception as error:  # any class or function that the YAML names may fail
        raise _explain(error, path, spec) from error
    # Only the objects are new: a plain value is that of the spec, wherever it is read.
    return Settings({**frozen(built), **dict(spec.settings.items())})


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


def referenced_key(node: object, keys: Keys) -> Keys:
    """Return the key that an argument at ``keys`` refers to, or its own."""
    return referenced_paths(node)[0] if REFERENCE.fullmatch(text_of(node)) else keys


def _explain(cause: Exception, path: list[Node], spec: RunSpec) -> ConfigError:
    """Explain why the last node of a path cannot be built."""
    keys: Keys = ()
    for parent, child in pairwise(path):
        is_map = isinstance(parent, MappingNode)
        items = [(k.value, v) for k, v in parent.value] if is_map else enumerate(parent.value)
        keys = (*keys, *(key for key, node in items if node is child))
    kind, _, name = str(path[-1].tag).partition(":")
    document, where = spec.document, f"`{dotted(keys)}` ({spec.document.place(keys)})"
    if isinstance(cause, SbkitError):
        argument = (*keys, *cause.keys)
        if cause.keys and argument in document.places:
            keys = referenced_key(reduce(getitem, argument, document.root), argument)
            where = spec.place(*keys)
        return ConfigError(f"{cause} ({where})", keys=keys)
    # HyperPyYAML puts its own text before the arguments of an error.
    reason = str(cause.args[-1] if cause.args else cause).partition("\n")[0]
    advice = " A module of your own must lie beside the YAML, or on PYTHONPATH."
    if isinstance(cause, TypeError):
        is_incomplete = "missing" in reason and kind == "!new"
        advice = " Add them, or write `!name:` if the recipe gives them." if is_incomplete else ""
    return ConfigError(
        f"{where} cannot be made of `{name or kind}`: {type(cause).__name__}: {reason}.{advice}",
        keys=keys,
    )
