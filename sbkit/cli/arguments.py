"""The parser and the arguments that the commands of `sbkit` share.

A module of commands has a function `add_commands`, which names each command, its handler and its
arguments. It is imported whenever `sbkit` runs, so handlers import
whatever takes long to import: `sbkit --help` answers at once.
"""

import argparse
from argparse import Namespace
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from sbkit.base.errors import ConfigError
from sbkit.base.machine import PRECISIONS
from sbkit.cli.clip_table import parse_share
from sbkit.config.keys import KEYS

Handler = Callable[[Namespace], int | None]  # from the parsed arguments to an exit code
AddArgument = Callable[..., object]  # `add_argument` of a command's parser


class Parser(argparse.ArgumentParser):
    """Accept `_` for `-` in an option's name, as in the keys of a YAML: --report_by."""

    commands: "argparse._SubParsersAction[Parser]"  # of `sbkit` itself
    is_intermixed = False

    def add_command(
        self,
        name: str,
        handler: Handler,
        help: str,
        groups: str = "",
        takes_overrides: bool = False,
        logs_to_stdout: bool = False,
        opens_bundle: bool = False,
        is_intermixed: bool = False,
    ) -> AddArgument:
        """Add a command; return the adder of its arguments.

        groups: the names of groups of arguments that several commands share, as `_add_group` does.
        takes_overrides: accept --KEY=VALUE for any key of a YAML.
        logs_to_stdout: messages are its output; other commands print their result there.
        opens_bundle: the handler finds the bundles of the models as `options.bundles`, and the
            first also as `options.bundle`; a run is exported first.
        is_intermixed: options may precede an optional argument. Python 3.11 does not know TEXT in
            `speak VOICE --out FILE TEXT`, unless it parses options first.
        """
        # With overrides there are no abbreviations: a key of the YAML may begin like an option.
        command = self.commands.add_parser(name, help=help, allow_abbrev=not takes_overrides)
        command.set_defaults(handler=handler, takes_overrides=takes_overrides)
        command.set_defaults(logs_to_stdout=logs_to_stdout, opens_bundle=opens_bundle)
        command.is_intermixed = is_intermixed
        for group in groups.split():
            _add_group(command.add_argument, group)
        return command.add_argument

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str], namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        arguments = [*map(self._with_dashes, args)]
        if not self.is_intermixed:
            return super().parse_known_args(arguments, namespace)
        self.is_intermixed = False  # in Python 3.11 the next line calls this method
        return self.parse_known_intermixed_args(arguments, namespace)

    def _with_dashes(self, argument: str) -> str:
        name, *value = argument.split("=", 1)
        option = name.replace("_", "-")
        return "=".join([option, *value]) if option in self._option_string_actions else argument


def _add_group(add: AddArgument, group: str) -> None:
    match group:
        case "yaml":
            add("yaml", metavar="YAML", type=Path, help="the YAML, as given to train.py")
        case "model":
            add("models", metavar="BUNDLE|RUN", type=Path, nargs=1, help="a bundle or a run folder")
        case "files":  # `sbkit.tasks.asr.recordings.find_audio` finds them
            files = "audio files, folders or glob patterns; - reads standard input"
            add("files", metavar="FILE", nargs="+", help=files)
            rate = "sample rate of standard input without a header (16-bit little-endian mono)"
            add("--raw-rate", metavar="HZ", type=int, help=rate)
            errors = "the file for a JSON line about each failed file; shares add to it"
            add("--errors", metavar="FILE", type=Path, help=errors)
        case "decoding":
            decoder = "beam uses language models; the default is the decoder of the model"
            add("--decoder", choices=("greedy", "beam"), help=decoder)
            phrases = "phrases to expect: a file with one per line, or a comma-separated list"
            add("--hotwords", metavar="FILE|WORDS", help=phrases)
        case "language":
            language = "language of a transformers model, such as en; a bundle names its own"
            add("--language", metavar="TAG", help=language)
        case "vad":
            detector = "the voice activity detector that finds speech and pauses"
            add("--vad", metavar="BUNDLE|silero", help=detector)
        case "runtime":  # for `sbkit.runtime.runtimes.model_options`
            add("--device", default="auto", help="cpu, cuda, cuda:INDEX or auto (default: auto)")
            runtime = "runtime of the model (default: torch)"
            add("--runtime", choices=tuple(PRECISIONS), default="torch", help=runtime)
            precisions = tuple(dict.fromkeys(chain(*PRECISIONS.values())))
            by_runtime = "; ".join(f"{name}: {', '.join(p)}" for name, p in PRECISIONS.items())
            add("--precision", choices=precisions, default="fp32", help=by_runtime)
            modes = ("default", "reduce-overhead")
            add("--compile", choices=modes, help="compile the model with torch")
        case "quiet":
            add("--quiet", action="store_true", help="show no progress")
        case "tables":
            columns = "columns of the tables, such as '{text: wrd, path: file}'"
            add("--columns", metavar="{ROLE: COLUMN}", type=_parse_columns, help=columns)
            encoding = "the encoding of the tables and texts, such as cp1252 (default: UTF-8)"
            add("--encoding", metavar="NAME", help=encoding)
            tier = "of .eaf and .TextGrid: the name, type or participant of tiers; repeatable"
            add("--tier", metavar="NAME", action="append", help=tier)
        case "share":
            share = "do only the K-th of N equal shares, in an array of jobs"
            add("--share", metavar="K/N", type=parse_share, help=share)
        case "import":
            module = "import a module of your own that defines parts of the model; repeatable"
            repeatable = {"action": "append", "default": []}
            add("--import", dest="imports", metavar="MODULE", help=module, **repeatable)
        case _:
            raise ValueError(group)


def _parse_columns(text: str) -> object:
    """Parse the mapping of `--columns` like a YAML does."""
    from sbkit.config.overrides import parse_overrides

    columns = parse_overrides([f"--columns={text}"])["columns"]
    if columns not in KEYS["columns"].values:
        raise ConfigError(f"`--columns` must be a mapping such as '{{text: wrd}}', but is {text}.")
    return columns
