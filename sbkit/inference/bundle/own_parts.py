"""Modules of the user's own, which `--import` names."""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from sbkit.base.errors import SbkitError


def import_own(names: Sequence[str]) -> frozenset[str]:
    """Import the modules that the user named on the command line, and return their names.

    Nothing else is ever imported because a file names it. Raises SbkitError for one that is not
    there, fails, or belongs to Python itself, which has no parts of a model.
    """
    if names and str(Path.cwd()) not in sys.path:  # the installed command does not look there
        sys.path.append(str(Path.cwd()))
    for name in names:
        if name.split(".")[0] in sys.stdlib_module_names:
            raise SbkitError(
                f"--import must name a module with parts of a model, but `{name}` is Python's own. "
                "Name the file in which your class stands, without `.py`."
            )
        try:
            import_module(name)
        except Exception as error:  # a module of the user's may fail in any way
            raise SbkitError(
                f"--import must name a module that can be imported, but `{name}` raised "
                f"{type(error).__name__} ({error}). Start in the folder in which {name}.py lies, "
                "or put it on PYTHONPATH."
            ) from error
    return frozenset(names)
