"""Arguments of a command line, declared before there is a parser to take them."""

from pathlib import Path
from typing import Any

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
