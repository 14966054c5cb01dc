"""`sbkit run`: the commands that a task of one's own defines for its bundles."""

import argparse
from argparse import Namespace

from sbkit.base.errors import ConfigError
from sbkit.bundle.task import Task, import_object
from sbkit.cli.arguments import Parser


def add_commands(parser: Parser) -> None:
    """Add `run`."""
    help = "run a command that the task of a bundle declares"
    groups = "model runtime import"
    add = parser.add_command("run", run_user_command, help, groups, opens_bundle=True)
    add("task_command", metavar="COMMAND", help="the command; all that follows is for it")
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


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
