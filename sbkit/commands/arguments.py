"""Arguments of a command line, declared before there is a parser to take them.

The options of `sbkit serve` that no other command has; it imports nothing of the server.
"""

import argparse
from itertools import chain
from pathlib import Path
from typing import Any

from sbkit.tasks.task import PRECISIONS, Argument


class Parser(argparse.ArgumentParser):
    """Accept `_` for `-` in an option's name, as in the keys of a YAML: --report_by."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse the arguments of this command; a subcommand's own parser gets the rest."""
        return super().parse_known_args([*map(self._with_dashes, args)], namespace)

    def _with_dashes(self, argument: str) -> str:
        name, *value = argument.split("=", 1)
        option = name.replace("_", "-")
        return "=".join([option, *value]) if option in self._option_string_actions else argument


def text(name: str, metavar: str, help: str, **more: Any) -> Argument:
    """Declare an argument that is a text, or what ``type`` makes of it."""
    return name, {"metavar": metavar, "help": help, **more}


def path(name: str, metavar: str, help: str, **more: Any) -> Argument:
    """Declare an argument that is a file or a folder."""
    return text(name, metavar, help, type=Path, **more)


def flag(name: str, help: str) -> Argument:
    """Declare an option without a value."""
    return name, {"action": "store_true", "help": help}


def boolean(name: str, help: str) -> Argument:
    """Declare an option ``--name`` with its opposite ``--no-name``; None if neither is given."""
    return name, {"action": argparse.BooleanOptionalAction, "help": help}


def choice(name: str, *choices: str, help: str = "", default: str | None = None) -> Argument:
    """Declare an option that is one of several words."""
    return name, {"choices": choices, "help": help, "default": default}


YAML = path("yaml", "YAML", "as given to train.py")
RUN = path("run", "RUN", "a run folder, as training names it")
BUNDLE = path("bundle", "BUNDLE|RUN", "an exported folder, or a run folder")
BUNDLES = path("bundles", "BUNDLE|RUN", "recognizers and voices, by their folders", nargs="+")
DECODER = choice(
    *("--decoder", "greedy", "beam", "graph"),
    help="beam or graph: with language models; the default is the one that the model has, and "
    "another must be tuned first: sbkit tune MODEL --decoder graph",
)
HOTWORDS = text(
    *("--hotwords", "FILE|WORDS"),
    help="phrases to expect: a file, one on each line, or a list with commas",
)
VAD = text("--vad", "BUNDLE|silero", "what finds speech and pauses: a voice activity detector")
RUNNING = (
    text("--device", "DEVICE", "cpu, cuda, cuda:N or auto (the default)", default="auto"),
    choice("--runtime", *PRECISIONS, default="torch"),
    choice(
        *("--precision", *dict.fromkeys(chain(*PRECISIONS.values()))),
        help="; ".join(f"{name}: {', '.join(each)}" for name, each in PRECISIONS.items()),
        default="fp32",
    ),
    choice("--compile", "default", "reduce-overhead", help="compile the model first"),
)
FILES = text("files", "FILE", "audio, folders, patterns, - for standard input", nargs="+")
RAW_RATE = text(
    *("--raw-rate", "HZ", "of standard input without a header: 16 bits, little-endian, mono"),
    type=int,
)
ERRORS = path("--errors", "FILE", "write a line of JSON there for each file that failed")
QUIET = flag("--quiet", "show no progress")
IMPORT = text(
    *("--import", "MODULE", "a module of your own that parts of the model are in; repeatable"),
    dest="imports",
    action="append",
    default=[],
)


LISTENING = (
    text("--host", "HOST", "to listen on (default: 127.0.0.1)", default="127.0.0.1"),
    text("--port", "N", "(default: 8000; 0: a free one)", type=int, default=8000),
    text("--alias", "NAME", "that clients may have for the model; repeatable", action="append"),
    path("--api-key-file", "FILE", "the keys of clients, one on each line; SIGHUP reads it again"),
    flag("--no-key", "admit clients on other machines without a key"),
    text("--allow-origin", "URL", "whose pages may use it; repeatable, * for all", action="append"),
)
LIMITING = (
    text("--max-batch-seconds", "S", "of padded audio in a batch", type=float),
    text("--max-wait-ms", "MS", "to wait for others (default: 10)", type=float, default=10.0),
    text("--max-mb", "N", "of a request (default: 25)", type=float),
    text("--max-seconds", "S", "of its audio (default: 7200)", type=float),
    text("--max-concurrent", "N", "requests transcribed at a time (default: 32)", type=int),
    text("--max-queue", "N", "requests that wait beside them (default: 128)", type=int),
    text("--max-sessions", "N", "realtime ones (default: 64)", type=int),
    text("--max-session-seconds", "S", "of a realtime session (default: 7200)", type=float),
    text("--max-connections", "N", "of clients (default: 1000)", type=int),
    text("--receive-seconds", "S", "for a request to arrive (default: 60)", type=float),
    text("--answer-seconds", "S", "until its answer (default: 600)", type=float),
    text("--drain-seconds", "S", "to go on after SIGTERM (default: 5)", type=float),
    text("--grace-seconds", "S", "to finish after that (default: 30)", type=float),
)
