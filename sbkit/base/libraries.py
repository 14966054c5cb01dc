"""Tell the source files of Python, installed packages and sbkit from the user's."""

import os
import re
import site
from pathlib import Path
from traceback import extract_tb

LIBRARY_FOLDERS = (
    *(Path(os.__file__).parent, *site.getsitepackages(), site.getusersitepackages()),
    *(Path(__file__).parents[2] / package for package in ("sbkit", "recipes")),
)
INSTALLED_PROJECT = Path(__file__).parents[1] / "project"  # in the wheel
PROJECT = INSTALLED_PROJECT if INSTALLED_PROJECT.is_dir() else Path(__file__).parents[2]
BUILT_IN_YAMLS = [*PROJECT.glob("hparams/*.yaml")]
LIBRARIES = tuple(f"{folder}{os.sep}" for folder in LIBRARY_FOLDERS)
INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")  # also elsewhere, by PYTHONPATH


def place_of(error: BaseException) -> str:
    """Return ", in line 3 of my_parts.py (forward)", the user's last frame of an error; or ""."""
    frames = [f for f in extract_tb(error.__traceback__) if not is_library(f.filename)]
    return "".join(f", in line {f.lineno} of {f.filename} ({f.name})" for f in frames[-1:])


def is_library(path: str) -> bool:
    """Return whether a module's file or folder belongs to Python, a package or sbkit."""
    is_in_library = path.startswith(("<frozen", *LIBRARIES))
    return is_in_library or bool(INSTALLED.search(f"{path}{os.sep}"))
