"""`sbkit encode`, `decode` and `run`: commands that the task of a bundle defines."""

import argparse
from argparse import Namespace
from pathlib import Path

from sbkit.base.errors import ConfigError
from sbkit.commands.arguments import Parser, with_bundle
from sbkit.tasks.task import Task, import_object


def add_commands(parser: Parser) -> None:
    """Add `encode`, `decode` and `run`."""
    groups = "model runtime import"
    for name, help in (("encode", "write audio as codes"), ("decode", "write the audio of codes")):
        add = parser.add_command(name, run_task, help, groups)
        add("file", metavar="FILE", type=Path, help="the file to read")
        add("--out", metavar="FILE", type=Path, required=True, help="the file to write")

    help = "run a command that the task of a bundle declares"
    add = parser.add_command("run", run_user_command, help, groups)
    add("task_command", metavar="COMMAND", help="the command; all that follows is for it")
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


@with_bundle
def run_task(options: Namespace) -> int:
    """Run a command of sbkit as the task of the bundle defines it."""
    command = _task_of(options).require_command(options.command)
    return int(import_object(command.run)(options))


@with_bundle
def run_user_command(options: Namespace) -> int:
    """Run a command of the task with its own arguments; raises ConfigError if it has none."""
    task = _task_of(options)
    name = options.task_command
    declared = {n: c.arguments for n, c in task.commands.items() if c.arguments is not None}
    if name not in declared:
        raise ConfigError(
            f"`sbkit run` runs commands that a task declares with `arguments`, and {task.name} "
            f"has no {name}. It has: {', '.join(declared) or 'none'}."
        )
    parser = Parser(prog=f"sbkit run {options.bundle} {name}")
    for argument, details in declared[name]:
        parser.add_argument(argument, **details)
    own_options = vars(options) | vars(parser.parse_args(options.arguments))
    return int(import_object(task.commands[name].run)(Namespace(**own_options)))


def _task_of(options: Namespace) -> Task:
    from sbkit.bundle.bundle import read_bundle

    return read_bundle(options.bundle, user_modules=options.user_modules).task
