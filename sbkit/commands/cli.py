"""The command `sbkit`: runs one of its commands, which this folder and the tasks declare."""

import argparse
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules

from sbkit import tasks
from sbkit.base.errors import ConfigError, SbkitError
from sbkit.base.files import is_run
from sbkit.base.imports import import_user_modules
from sbkit.base.process import run_main
from sbkit.base.versions import describe_versions
from sbkit.cli.arguments import Parser
from sbkit.commands import check, doctor, export, new, prepare, score, serve, tune
from sbkit.logs.handlers import log_to_screen
from sbkit.logs.progress import reporting

COMMAND_MODULES = (new, check, prepare, export, tune, score, serve, doctor)


class ShowVersions(argparse.Action):
    """Look the versions up only for ``--version``, because that takes as long as the parser."""

    def __call__(self, *_: object) -> None:
        print(describe_versions())
        raise SystemExit(0)


def main() -> None:
    """Run ``sbkit`` with the arguments of the process.

    The folder that contains sbkit is searched last for modules: in a checkout it has `recipes`,
    which is not installed.
    """
    sys.path.append(str(Path(__file__).parents[2]))
    run_main(lambda: run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    if arguments[:1] == ["train"]:
        raise ConfigError(
            "`sbkit` does not train. Write: python train.py FILE.yaml [--key=value]. `sbkit new "
            "FOLDER` makes a project that has train.py."
        )
    parser = build_parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown and not options.takes_overrides:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.overrides = unknown
    format = "%(asctime)s %(message)s" if options.command == "serve" else "%(message)s"
    with (
        log_to_screen(to_stderr=not options.logs_to_stdout, format=format),
        reporting(show_progress=not options.quiet),
    ):
        options.user_modules = _import_user_modules(options.imports, options.models)
        try:
            with ExitStack() as stack:
                if options.opens_bundle:
                    bundles = (
                        _open_bundle(model, options.user_modules) for model in options.models
                    )
                    options.bundles = [*map(stack.enter_context, bundles)]
                    options.bundle = options.bundles[0]
                return options.handler(options) or 0
        except ModuleNotFoundError as error:
            if not _is_required(error.name or ""):  # a user's module imports it
                raise
            raise SbkitError(
                f"`sbkit {options.command}` needs the package {error.name}. Install all that sbkit "
                "needs: pip install sbkit"
            ) from error


def _import_user_modules(names: Sequence[str], models: Sequence[Path]) -> frozenset[str]:
    """Import the modules of `--import`; the code in a bundle only runs once it is verified."""
    if not names:
        return frozenset()
    from sbkit.bundle.config import CONFIG_FILE, BundleFiles

    bundles = [folder for folder in models if not is_run(folder) or (folder / CONFIG_FILE).exists()]
    sources = {folder: BundleFiles(folder).read_modules(names) for folder in bundles}
    return import_user_modules(names, sources)


def _open_bundle(folder: Path, user_modules: frozenset[str]) -> AbstractContextManager[Path]:
    if not is_run(folder):
        return nullcontext(folder)  # without importing torch, which ONNX Runtime does not need
    from sbkit.export.export import exported_bundle

    return exported_bundle(folder, user_modules)


def _is_required(module: str) -> bool:
    from importlib.metadata import PackageNotFoundError, requires  # takes 30 ms

    try:
        requirements = [line for line in requires("sbkit") or () if "extra ==" not in line]
    except PackageNotFoundError:  # sbkit is not installed, as in a checkout
        return False
    return module.partition(".")[0] in {re.split(r"\W", line)[0] for line in requirements}


def build_parser() -> Parser:
    """Make the parser of all commands."""
    parser = Parser(prog="sbkit", description="Training recipes for speech, each from one YAML.")
    parser.add_argument("--version", action=ShowVersions, nargs=0, help="print versions, and exit")
    parser.set_defaults(imports=[], models=[], quiet=False, language=None)
    parser.commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for module in COMMAND_MODULES:
        module.add_commands(parser)
    for folder in iter_modules(tasks.__path__, f"{tasks.__name__}."):
        if find_spec(name := f"{folder.name}.commands"):
            import_module(name).add_commands(parser)
    help = "run a command that the task of a bundle declares"
    groups = "model runtime import"
    add = parser.add_command("run", run_user_command, help, groups, opens_bundle=True)
    add("task_command", metavar="COMMAND", help="the command; all that follows is for it")
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def run_user_command(options: Namespace) -> int | None:
    """Run a command of the task, which parses its arguments."""
    from sbkit.bundle.bundle import read_bundle

    task = read_bundle(options.bundle, user_modules=options.user_modules).task
    name = options.task_command
    commands = task.commands()
    if name not in commands:
        names = ", ".join(commands) or "none"
        raise ConfigError(f"{task.name} has no command {name}. It has: {names}.")
    return commands[name](options)
