"""Which source files are those of installed packages, of Python and of sbkit."""

import os
import re
import site
from pathlib import Path

LIBRARY_FOLDERS = (
    *(Path(os.__file__).parent, *site.getsitepackages(), site.getusersitepackages()),
    *(Path(__file__).parents[2] / package for package in ("sbkit", "recipes")),
)
INSTALLED_PROJECT = Path(__file__).parents[1] / "project"  # in the wheel
PROJECT = INSTALLED_PROJECT if INSTALLED_PROJECT.is_dir() else Path(__file__).parents[2]
BUILT_IN_YAMLS = [*PROJECT.glob("hparams/*.yaml")]
LIBRARIES = tuple(f"{folder}{os.sep}" for folder in LIBRARY_FOLDERS)
INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")  # also elsewhere, by PYTHONPATH


def is_library(path: str) -> bool:
    """Return whether the source of a module, or its folder, is no file of the user's."""
    is_ours = path.startswith(("<frozen", *LIBRARIES))
    return is_ours or bool(INSTALLED.search(f"{path}{os.sep}"))
