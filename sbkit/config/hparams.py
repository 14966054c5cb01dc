"""A run's YAML and command line: its plain knobs first, its objects once the data is prepared.

The knobs, the objects and the saved YAML come from one resolved text, so that they cannot differ.
Reading the knobs builds and imports nothing.
"""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from hyperpyyaml import resolve_references
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from sbkit.base.errors import SbkitError
from sbkit.base.files import write_text_atomically
from sbkit.config.argument_ranges import arguments_out_of_range
from sbkit.config.build import build, clean_ruamel, plain_values
from sbkit.config.document import Document, check_tuples, read_document, read_yaml_text
from sbkit.config.overrides import apply_overrides
from sbkit.config.ranges import require_in_range
from sbkit.config.references import check_references

OPTION = re.compile(r"--(?P<path>[^=]+)(?:=(?P<value>.*))?", re.DOTALL)
PATH = re.compile(r"[^.\[\]\s]+(?:\.[^.\[\]\s]+|\[[^.\[\]\s]+\])*")
NUMBER = re.compile(r"-?(?:(?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
WORDS: dict[str, object] = {  # as YAML has them: true, True and TRUE
    spelling: value
    for word, value in (("true", True), ("false", False), ("null", None), ("~", None))
    for spelling in (word, word.capitalize(), word.upper())
}


USAGE = """\
usage: train.py FILE.yaml [--key=value ...]

Trains what FILE.yaml declares. Every key of the file can be overridden:
  --lr=0.001               a knob; numbers, text, true, false, null, [lists] and {mappings}
  --Transformer.dropout=0  a key inside another
  --check=False            do not check the run before its first step

`sbkit check FILE.yaml [--key=value ...]` checks a run without starting it."""


class MissingKnobError(SbkitError, AttributeError):
    """Code reads a key that the YAML does not have."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"`{name}` must be in the YAML, since this run reads it, but is not. Add it, or "
            "correct the key that is meant."
        )


class Knobs(dict[str, Any]):
    """Values by their keys; `get` has a default, and `[]` raises MissingKnobError."""

    def __missing__(self, name: str) -> NoReturn:
        raise MissingKnobError(name)


class KnobAttributes(SimpleNamespace):
    """Values as the attributes of a Brain's `hparams`; raises MissingKnobError."""

    def __getattr__(self, name: str) -> NoReturn:
        raise MissingKnobError(name)


@dataclass(frozen=True)
class _Resolved:
    """A YAML as it takes effect, and the text of each file that it was read from."""

    files: Mapping[Path, str]
    document: Document  # with the overrides
    text: str
    knobs: Mapping[str, Any]


# A run reads one or two of these a dozen times, and each takes 0.1 s.
_resolved: dict[tuple[Path, str], _Resolved] = {}


def read_knobs(yaml_file: Path, overrides: Mapping[str, object]) -> Knobs:
    """Read the root-level plain values as they take effect; keys that reach an object are absent.

    Raises SbkitError: a fault of the file or of the overrides.
    """
    return Knobs(deepcopy(dict(_resolve(yaml_file, overrides).knobs)))


def load_hparams(yaml_file: Path, overrides: Mapping[str, object]) -> Knobs:
    """Build everything the file declares.

    Raises SbkitError: a fault of the file or of the overrides, a number out of its range, or an
    object that cannot be built.
    """
    resolved = _resolve(yaml_file, overrides)
    with clean_ruamel():
        require_in_range(resolved.knobs)
        for _, sentence in arguments_out_of_range(resolved.document):
            raise SbkitError(sentence)
        return Knobs(build(resolved.document, resolved.text))


def save_resolved(path: Path, yaml_file: Path, overrides: Mapping[str, object]) -> None:
    """Write `resolved_text` to a file, whole or not at all."""
    write_text_atomically(path, resolved_text(yaml_file, overrides))


def resolved_text(yaml_file: Path, overrides: Mapping[str, object]) -> str:
    """Return the YAML as it takes effect: overridden, every reference resolved.

    Raises SbkitError: a fault of the file or of the overrides.
    """
    return _resolve(yaml_file, overrides).text


def overridden_document(yaml_file: Path, overrides: Mapping[str, object]) -> Document:
    """Return the tree of a file with the overrides in it, to be read and not to be changed.

    Raises SbkitError: a fault of the file or of the overrides.
    """
    return _resolve(yaml_file, overrides).document


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
            text = waiting.pop(0) if waiting and _is_value(waiting[0]) else "true"
        if option["path"] == "manifest" and text not in WORDS and not text.startswith("{"):
            _add_manifest(overrides, argument, text)
            continue
        _put(overrides, re.findall(r"[^.\[\]]+", option["path"]), _read_value(argument, text))
    return overrides


def _resolve(yaml_file: Path, overrides: Mapping[str, object]) -> _Resolved:
    """Check and resolve a file and its overrides, once while the files stay as they are."""
    key = (yaml_file, repr(overrides))
    known = _resolved.get(key)
    if known and all(read_yaml_text(path) == text for path, text in known.files.items()):
        return known
    with clean_ruamel():
        document = read_document(yaml_file)
        for _, each in reversed(list(document.family())):
            check_references(each)
        apply_overrides(document, overrides)
        family = [each for _, each in document.family()]
        for each in family:
            check_tuples(each)
        stream: Any = StringIO()
        stream.name = str(yaml_file)  # beside which HyperPyYAML looks for the included files
        YAML().dump(document.root, stream)
        stream.seek(0)
        text: str = resolve_references(stream).getvalue()
        files = {each.path: each.text for each in family}
        _resolved[key] = _Resolved(files, document, text, plain_values(text))
    return _resolved[key]


def _is_value(argument: str) -> bool:
    return not argument.startswith("-") or NUMBER.fullmatch(argument) is not None


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
    if text in WORDS:
        return WORDS[text]
    if text[0] not in "[{\"'":
        return _read_scalar(text)
    try:
        with clean_ruamel():
            return YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError) as error:  # the latter of a date that is none
        raise SbkitError(
            f"`{argument}` must be a list, a mapping or a quoted text in YAML, but {text!r} is "
            "not. Close its brackets and quotes."
        ) from error


def _read_scalar(text: str) -> object:
    if not NUMBER.fullmatch(text):
        return text
    return int(text) if text.lstrip("-").isdecimal() else float(text)
