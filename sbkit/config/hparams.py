"""A run's YAML and command line: its plain knobs first, its objects once the data is prepared.

The knobs, the objects and the saved YAML come from one resolved tree, so that they cannot differ.
Reading the knobs builds and imports nothing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, reduce
from io import StringIO
from operator import getitem
from pathlib import Path
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError
from ruamel.yaml.representer import RoundTripRepresenter

from sbkit.base.errors import ConfigError, SbkitError
from sbkit.base.files import write_text_atomically
from sbkit.config.build import build, clean_ruamel
from sbkit.config.document import (
    BUILDER_TAGS,
    REFERENCE,
    Document,
    Keys,
    dotted,
    read_document,
    read_yaml_text,
    referenced,
    tag_of,
    text_of,
    walk,
)
from sbkit.config.overrides import apply_overrides
from sbkit.config.ranges import ranges_of, refusal, require_in_range
from sbkit.config.references import holds_object, plain_value, resolve_references

OPTION = re.compile(r"--(?P<path>[^=]+)(?:=(?P<value>.*))?", re.DOTALL)
PATH = re.compile(r"[^.\[\]\s]+(?:\.[^.\[\]\s]+|\[[^.\[\]\s]+\])*")
NUMBER = re.compile(r"-[\d.]+(?:[eE][-+]?\d+)?")  # a value that begins as an option does

USAGE = """\
usage: train.py FILE.yaml [--key=value ...]

Trains what FILE.yaml declares. Every key of the file can be overridden:
  --lr=0.001               a knob; numbers, text, true, false, null, [lists] and {mappings}
  --Transformer.dropout=0  a key inside another
  --check=False            do not check the run before its first step

`sbkit check FILE.yaml [--key=value ...]` checks a run without starting it."""


class MissingKnobError(ConfigError, AttributeError):
    """Raised where code reads a key that the YAML does not have."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"This run reads `{name}`, which is not in the YAML. Add it, or correct the spelling "
            "of the key that stands for it."
        )
        self.name = name


class Knobs(dict[str, Any]):
    """The values of a YAML by key. Remembers which keys were read: `sbkit check` lists the others.

    `get` returns a default for a missing key; `[]` raises MissingKnobError.

    >>> knobs = Knobs({"lr": 0.1, "learning_pace": 3})
    >>> knobs["lr"], knobs.get("seed", 1)
    (0.1, 1)
    >>> sorted(knobs.names_read)
    ['lr', 'seed']
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.names_read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names_read.add(name)
        return super().__getitem__(name)

    def __missing__(self, name: str) -> NoReturn:
        raise MissingKnobError(name)

    def __contains__(self, name: object) -> bool:
        self.names_read.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names_read.add(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        # With an `__iter__` of its own, `{**knobs}` and `dict(knobs)` copy item by item and so read
        # every key: what happens to the copy is not recorded. `items` and `values` read no key.
        return super().__iter__()


class KnobAttributes:
    """The values of ``knobs`` as attributes: the `hparams` of a Brain."""

    def __init__(self, knobs: Knobs) -> None:
        self.knobs = knobs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what `copy` and `pickle` look for
            raise AttributeError(name)
        return self.knobs[name]


@dataclass(frozen=True)
class Resolved:
    """A YAML as it takes effect.

    document: with the overrides; tree: with the values of its references, too.
    """

    document: Document
    tree: CommentedMap

    @cached_property
    def text(self) -> str:
        """The YAML as it takes effect."""
        return _dump(self.tree)

    @cached_property
    def one_file(self) -> str:
        """The YAML with its base and its overrides in it; references and comments stay."""
        return _dump(self.document.root)

    @cached_property
    def knobs(self) -> Mapping[str, Any]:
        """The root-level values that hold no object."""
        plain = {key: plain_value(node) for key, node in self.tree.items() if key[:2] != "__"}
        return {key: value for key, value in plain.items() if not holds_object(value)}

    def arguments_out_of_range(self) -> Iterator[tuple[Keys, str]]:
        """Yield the key of each argument out of its class's range, with a sentence that says so.

        The key is the knob where the argument is a reference to one; each comes once. Imports the
        classes.
        """
        seen: set[Keys] = set()
        for keys, node in walk(self.document.root):
            if isinstance(node, CommentedMap) and tag_of(node).startswith(BUILDER_TAGS):
                ranges = ranges_of(tag_of(node).partition(":")[2])
                for name in (each for each in ranges if each in node):
                    value = plain_value(reduce(getitem, (*keys, name), self.tree))
                    is_whole = REFERENCE.fullmatch(text_of(node[name]))
                    named = referenced(node[name])[0] if is_whole else (*keys, name)
                    if not (holds_object(value) or value in ranges[name] or named in seen):
                        seen.add(named)
                        yield named, refusal(dotted(named), value, ranges[name])


_resolved: dict[tuple[Path, str], Resolved] = {}  # a run reads one or two of these a dozen times


def resolve(yaml_file: Path, overrides: Mapping[str, object]) -> Resolved:
    """Read a file with its overrides, once while it stays as it is; not to be changed.

    Raises SbkitError: a fault of the file or of the overrides.
    """
    key = (yaml_file, repr(overrides))
    known = _resolved.get(key)
    if known is None or any(read_yaml_text(f.path) != f.text for f in known.document.files()):
        with clean_ruamel():
            document = read_document(yaml_file)
            apply_overrides(document, overrides)
            known = Resolved(document, resolve_references(document))
        _resolved[key] = known
    return known


def read_knobs(yaml_file: Path, overrides: Mapping[str, object]) -> Knobs:
    """Read the root-level plain values as they take effect; keys that reach an object are absent.

    Raises SbkitError: a fault of the file or of the overrides.
    """
    return Knobs(deepcopy(dict(resolve(yaml_file, overrides).knobs)))


def load_hparams(yaml_file: Path, overrides: Mapping[str, object]) -> Knobs:
    """Build everything the file declares.

    Raises SbkitError: a fault of the file or of the overrides, a number out of its range, or an
    object that cannot be built.
    """
    resolved = resolve(yaml_file, overrides)
    require_in_range(resolved.knobs)
    with clean_ruamel():
        for _, sentence in resolved.arguments_out_of_range():
            raise SbkitError(sentence)
        return Knobs(build(resolved.document, resolved.text))


def save_resolved(path: Path, yaml_file: Path, overrides: Mapping[str, object]) -> None:
    """Write the YAML as it takes effect to a file, whole or not at all."""
    write_text_atomically(path, resolve(yaml_file, overrides).text)


def _dump(tree: CommentedMap) -> str:
    stream, writer = StringIO(), YAML()
    writer.Representer = type("Writer", (RoundTripRepresenter,), {})
    writer.Representer.add_representer(  # ruamel's own writes nothing
        type(None), lambda own, _: own.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    writer.indent(mapping=4, sequence=6, offset=4)
    with clean_ruamel():
        writer.dump(tree, stream)
    return stream.getvalue()


def parse_command(arguments: Sequence[str]) -> tuple[Path, dict[str, object]]:
    """Read ``FILE.yaml --key=value ...``: the file, and the overrides.

    Raises:
        SystemExit: `--help` came; how to call it was printed.
        SbkitError: the first argument is not a YAML file, or another is no override.
    """
    if {"--help", "-h"} & {*arguments}:
        print(USAGE)
        raise SystemExit(0)
    if not arguments or arguments[0].startswith("-"):
        raise SbkitError(
            "The first argument must be a YAML file, but "
            f"{f'`{arguments[0]}` came' if arguments else 'there is none'}. "
            "Write: torchrun train.py hparams/ctc.yaml [--key=value ...]"
        )
    return Path(arguments[0]), parse_overrides(arguments[1:])


def parse_overrides(arguments: Sequence[str]) -> dict[str, object]:
    """Read ``--key value``, ``--key=value`` and ``--flag``; ``--a.b`` and ``--a[b]`` nest.

    ``--manifest NAME=FILE`` may come several times; the files of one name are a list.

    Raises SbkitError: an argument that is none of these.
    """
    overrides: dict[str, object] = {}
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        option = OPTION.fullmatch(argument)
        if option is None or not PATH.fullmatch(option["path"]):
            raise SbkitError(
                f"Arguments after the YAML must be --key=value, but `{argument}` came. "
                "Write --key=value, or --key.inner=value for a nested key."
            )
        text = option["value"]
        if text is None:
            is_value = waiting and (waiting[0][:1] != "-" or NUMBER.fullmatch(waiting[0]))
            text = waiting.pop(0) if is_value else "true"
        if option["path"] == "manifest" and text != "null" and not text.startswith("{"):
            _add_manifest(overrides, argument, text)
            continue
        _put(overrides, re.findall(r"[^.\[\]]+", option["path"]), _read_value(argument, text))
    return overrides


def _put(overrides: dict[str, object], keys: Sequence[str], value: object) -> None:
    """Write a value at a path of keys; what comes later on the command line wins."""
    *above, last = keys
    for key in above:
        inner = overrides.get(key)
        overrides[key] = inner = inner if isinstance(inner, dict) else {}
        overrides = inner
    overrides[last] = value


def _add_manifest(overrides: dict[str, object], argument: str, text: str) -> None:
    """Add a file to the mapping of split names to files."""
    name, _, file = text.partition("=")
    if not name or not file:
        raise SbkitError(
            f"`{argument}` must come with NAME=FILE, but has {text!r}. Write --manifest train=a.csv"
            " --manifest dev=b.csv --manifest test=c.csv."
        )
    manifest = overrides.get("manifest")
    files = manifest if isinstance(manifest, dict) else {}
    before = files.get(name)
    earlier = before if isinstance(before, list) else [] if before is None else [before]
    files[name] = [*earlier, file] if earlier else file
    overrides["manifest"] = files


def _read_value(argument: str, text: str) -> object:
    """Read a number, true, false, null, a list, a mapping or quoted text; else plain text."""
    if not text or text.startswith("!"):
        raise SbkitError(
            f"`{argument}` must come with a plain value, but has {text or 'none'}. "
            "Pass null for none, '\"\"' for an empty text, and edit the YAML for an object."
        )
    is_quoted = text[0] in "[{\"'"
    try:
        with clean_ruamel():
            value: object = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError) as error:  # the latter of a date that is none
        if not is_quoted:
            return text
        raise SbkitError(
            f"`{argument}` must be a list, a mapping or a quoted text in YAML, but {text!r} is "
            "not. Close its brackets and quotes."
        ) from error
    return value if is_quoted or value is None or isinstance(value, int | float) else text
