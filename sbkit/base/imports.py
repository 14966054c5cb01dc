"""Imports at run time: public names of a package, optional packages, and the user's modules."""

import logging
import sys
from collections.abc import Callable, Collection
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from sbkit.base.errors import ConfigError, DeviceError, SbkitError
from sbkit.base.files import read_regular

logger = logging.getLogger(__name__)

MAX_SOURCE_BYTES = 1 << 24


def lazy_names(package: str, **homes: str) -> Callable[[str], object]:
    """Return a ``__getattr__`` that imports each public name of a package on first use.

    homes: the module that defines each name. A server without torch imports `sbkit.audio.io`, so
    `sbkit/audio/__init__.py` must not import torch.

    >>> __getattr__ = lazy_names("sbkit.base", SbkitError="errors")
    >>> __getattr__("SbkitError").__module__
    'sbkit.base.errors'
    """

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return get


def require_package(name: str, *, extra: str) -> ModuleType:
    """Import a package of an optional extra, or raise SbkitError."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0].replace("_", "-")
        raise SbkitError(
            f"This needs the package {package}, which cannot be imported ({error}). Install it: "
            f"pip install 'sbkit[{extra}]'"
        ) from error


def import_torchaudio(name: str = "torchaudio") -> ModuleType:
    """Import a module of torchaudio, or raise DeviceError: it may be built for another CUDA.

    Wheels of torch 2.15 contain CUDA 13.2; those of torchaudio 2.11.0 refuse any but 13.0, and
    their library cannot be loaded beside a torch without CUDA.
    """
    try:
        return import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        raise DeviceError(explain_torchaudio(error)) from error


def explain_torchaudio(error: Exception) -> str:
    """Explain why torchaudio cannot be imported, and which commands help."""
    from sbkit.base.versions import versions  # importlib.metadata takes 30 ms

    torch, torchaudio = (versions()[name] for name in ("torch", "torchaudio"))
    reason = " ".join(str(error).split())[:200]
    if torchaudio is None:
        fault = f"torchaudio is not installed, and torch is {torch}"
    else:
        fault = f"torchaudio {torchaudio} cannot be used with torch {torch} ({reason})"
    return (
        f"{fault}. To keep this torch, install torchaudio from the index that torch came from: "
        "pip install --force-reinstall --no-deps --index-url INDEX torchaudio. Or install a pair "
        "from the default index: pip install --force-reinstall 'torch>=2.11,<2.15' torchaudio"
    )


def import_user_modules(names: Collection[str], bundle: Path | None = None) -> frozenset[str]:
    """Import the modules that `--import` names, or raise ConfigError; return their names.

    The working folder and then the bundle are searched last. sbkit imports a module that a file
    names only if `--import` names it, too. The path of each module that runs is logged.
    """
    if names and str(Path.cwd()) not in sys.path:  # the installed command does not search there
        sys.path.append(str(Path.cwd()))
    for name in names:
        try:
            _import_user_module(name, None if bundle is None else bundle / f"{name}.py")
        except Exception as error:  # the user's module may fail in any way
            raise ConfigError(
                f"--import must name a module that can be imported, but `{name}` raised "
                f"{type(error).__name__} ({error}). Start in the folder of {name}.py, or put that "
                "folder on PYTHONPATH."
            ) from error
    return frozenset(names)


def _import_user_module(name: str, bundled_source: Path | None) -> None:
    """Import a module; if Python does not find it, run the source in the bundle."""
    if name in sys.modules:
        return
    try:
        spec = find_spec(name)  # imports the parent packages of a dotted name
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # a parent package failed to import this
            raise
        spec = None
    if spec is not None:
        logger.info(f"--import {name}: running {spec.origin}")
    if spec is not None or bundled_source is None or not bundled_source.exists():
        import_module(name)
        return
    source = read_regular(bundled_source, max_bytes=MAX_SOURCE_BYTES, subject="A module")
    logger.info(f"--import {name}: running {bundled_source}")
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(bundled_source)
    try:
        exec(compile(source, str(bundled_source), "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
