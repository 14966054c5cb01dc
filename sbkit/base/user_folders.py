"""A name and folders for caches and temporary files, for users who have none.

So it is in many containers.
"""

import getpass
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from sbkit.base.files import nearest_existing
from sbkit.base.machine import SHARED_MEMORY


def prepare_user() -> None:
    """Set LOGNAME, HOME, XDG_CACHE_HOME and TMPDIR for a user without a name or such a folder.

    `docker run --user` and OpenShift give a process a user id that is not listed in passwd. torch
    asks for the user's name when an optimizer is made, and libraries keep caches in the home. With
    `docker run --read-only`, there is no /tmp, but torch needs such a folder when it is imported.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["LOGNAME"] = f"user-{os.getuid()}"
    if not os.environ.get("XDG_CACHE_HOME") and not _can_write(Path("~/.cache")):
        with suppress(OSError):  # no folder for temporary files has room
            folder = _make_temporary_folder()
            os.environ["XDG_CACHE_HOME"] = folder
            os.environ.setdefault("MPLCONFIGDIR", f"{folder}/matplotlib")
            if os.path.expanduser("~") == "~":  # noqa: PTH111
                os.environ["HOME"] = folder
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        scratch = SHARED_MEMORY
        with suppress(OSError):  # nothing can be written to
            if _can_write(cache_folder() / "temporary"):
                scratch = make_cache_folder("temporary")
        os.environ["TMPDIR"] = str(scratch)


def expand_home(path: str) -> str:
    """Replace `~/` at the start of a path by the home; a file may be called `~a` or `a~`."""
    return str(Path(path).expanduser()) if path.startswith("~/") else path


def cache_folder() -> Path:
    """Return ``$SBKIT_CACHE``, without it ``$XDG_CACHE_HOME/sbkit`` or ``~/.cache/sbkit``."""
    if folder := os.environ.get("SBKIT_CACHE"):
        return Path(folder).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sbkit"


def make_cache_folder(name: str = "") -> Path:
    """Return a folder of the cache, made if it is missing; a new cache is its user's alone."""
    cache = cache_folder()
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder := cache / name).mkdir(exist_ok=True)
    return folder


def _can_write(folder: Path) -> bool:
    """Return whether a folder below the home can be written to, once it is made."""
    try:
        return os.access(nearest_existing(folder.expanduser()), os.W_OK | os.X_OK)
    except (OSError, RuntimeError):  # a private folder, or no home
        return False


def _make_temporary_folder() -> str:
    """Make the folder of this user in the temporary folder, which others may write to as well."""
    folder = Path(tempfile.gettempdir()) / f"sbkit-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
            return str(folder)
    except OSError:  # another user has made a file of this name
        pass
    return tempfile.mkdtemp(prefix="sbkit-")
