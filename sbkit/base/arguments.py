"""Arguments of a command line, declared before there is a parser to take them."""

from itertools import chain
from pathlib import Path
from typing import Any

from sbkit.base.machine import PRECISIONS

Argument = tuple[str, dict[str, Any]]  # its name, and the keywords of `add_argument`


def text(name: str, metavar: str, help: str, **more: Any) -> Argument:
    """Declare an argument that is a text, or what ``type`` makes of it."""
    return name, {"metavar": metavar, "help": help, **more}


def path(name: str, metavar: str, help: str, **more: Any) -> Argument:
    """Declare an argument that is a file or a folder."""
    return text(name, metavar, help, type=Path, **more)


def flag(name: str, help: str) -> Argument:
    """Declare an option without a value."""
    return name, {"action": "store_true", "help": help}


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
