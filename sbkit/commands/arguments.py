"""Command-line arguments that several commands share, as parents of their parsers."""

import argparse
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from sbkit.tasks.task import PRECISIONS


class Parser(argparse.ArgumentParser):
    """Accept `_` for `-` in an option's name, as in the keys of a YAML: --report_by."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse the arguments of this command; a subcommand's own parser gets the rest."""
        return super().parse_known_args([*map(self._with_dashes, args)], namespace)

    def _with_dashes(self, argument: str) -> str:
        name, *value = argument.split("=", 1)
        option = name.replace("_", "-")
        return "=".join([option, *value]) if option in self._option_string_actions else argument


shared = partial(Parser, add_help=False)

YAML = shared()
YAML.add_argument("yaml", metavar="YAML", type=Path, help="the YAML, as given to train.py")

BUNDLE = shared()
BUNDLE.add_argument("bundle", metavar="BUNDLE|RUN", type=Path, help="a bundle or a run folder")

FILES = shared()
FILES.add_argument(
    "files",
    metavar="FILE",
    nargs="+",
    help="audio files, folders or glob patterns; - reads standard input",
)
FILES.add_argument(
    "--raw-rate",
    metavar="HZ",
    type=int,
    help="sample rate of standard input without a header (16-bit little-endian mono)",
)
FILES.add_argument(
    "--errors", metavar="FILE", type=Path, help="write a JSON line to FILE for each failed file"
)

DECODING = shared()
DECODING.add_argument(
    "--decoder",
    choices=("greedy", "beam", "graph"),
    help="beam and graph use language models; the default is the decoder of the model, and "
    "another must be tuned first: sbkit tune MODEL --decoder graph",
)
DECODING.add_argument(
    "--hotwords",
    metavar="FILE|WORDS",
    help="phrases to expect: a file with one per line, or a comma-separated list",
)

VAD = shared()
VAD.add_argument(
    "--vad",
    metavar="BUNDLE|silero",
    help="the voice activity detector that finds speech and pauses",
)

RUNTIME = shared()
RUNTIME.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto (default: auto)")
RUNTIME.add_argument(
    "--runtime", choices=PRECISIONS, default="torch", help="runtime of the model (default: torch)"
)
RUNTIME.add_argument(
    "--precision",
    choices=tuple(dict.fromkeys(chain(*PRECISIONS.values()))),
    default="fp32",
    help="; ".join(f"{runtime}: {', '.join(names)}" for runtime, names in PRECISIONS.items()),
)
RUNTIME.add_argument(
    "--compile", choices=("default", "reduce-overhead"), help="compile the model with torch first"
)

QUIET = shared()
QUIET.add_argument("--quiet", action="store_true", help="show no progress")

IMPORT = shared()
IMPORT.add_argument(
    "--import",
    dest="imports",
    metavar="MODULE",
    action="append",
    default=[],
    help="import a module of your own that defines parts of the model; repeatable",
)

SERVER = shared()
add = SERVER.add_argument
add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
add("--port", type=int, default=8000, help="port to listen on; 0 picks one (default: 8000)")
add("--alias", action="append", help="another name of the model for clients; repeatable")
add(
    "--api-key-file",
    metavar="FILE",
    type=Path,
    help="API keys, one per line; SIGHUP reads the file again",
)
add("--no-key", action="store_true", help="admit clients on other machines without a key")
add(
    "--allow-origin",
    metavar="URL",
    action="append",
    help="allow web pages of this origin (CORS), * for all; repeatable",
)

LIMITS = shared()
add = partial(LIMITS.add_argument, metavar="S", type=float)
add("--max-batch-seconds", help="audio in a batch, including padding")
add("--max-seconds", help="audio of a request (default: 7200)")
add("--max-session-seconds", help="audio of a realtime session (default: 7200)")
add("--receive-seconds", help="time for a request to arrive (default: 60)")
add("--answer-seconds", help="time until the end of its answer (default: 600)")
add("--drain-seconds", help="time after SIGTERM in which requests are accepted (default: 5)")
add("--grace-seconds", help="time after that to finish running requests (default: 30)")
add = partial(LIMITS.add_argument, metavar="N", type=int)
add("--max-concurrent", help="requests transcribed at the same time (default: 32)")
add("--max-queue", help="requests that may wait for those (default: 128)")
add("--max-sessions", help="realtime sessions (default: 64)")
add("--max-connections", help="open connections (default: 1000)")
LIMITS.add_argument("--max-mb", metavar="MB", type=float, help="size of a request (default: 25)")
LIMITS.add_argument(
    "--max-wait-ms",
    metavar="MS",
    type=float,
    default=10.0,
    help="time that a request waits for others to share its batch (default: 10)",
)
