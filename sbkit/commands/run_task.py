"""`sbkit run`: the commands that a task of one's own defines for its bundles."""

import argparse
from argparse import Namespace

from sbkit.base.errors import ConfigError
from sbkit.cli.arguments import Parser


def add_commands(parser: Parser) -> None:
    """Add `run`."""
    help = "run a command that the task of a bundle declares"
    groups = "model runtime import"
    add = parser.add_command("run", run_user_command, help, groups, opens_bundle=True)
    add("task_command", metavar="COMMAND", help="the command; all that follows is for it")
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run_user_command(options: Namespace) -> int | None:
    """Run a command of the task, which parses its arguments; raises ConfigError if unknown."""
    from sbkit.bundle.bundle import read_bundle

    task = read_bundle(options.bundle, user_modules=options.user_modules).task
    name = options.task_command
    commands = task.commands()
    if name not in commands:
        raise ConfigError(
            f"`sbkit run` runs the `commands` of a task, and {task.name} has no {name}. It has: "
            f"{', '.join(commands) or 'none'}."
        )
    return commands[name](options)
