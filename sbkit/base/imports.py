"""Imports at run time: optional packages, and the user's modules."""

import logging
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import decode_source, find_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, MappingProxyType, ModuleType

from sbkit.base.errors import ConfigError, DeviceError, SbkitError, translate

logger = logging.getLogger(__name__)


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
    with translate((ImportError, OSError, RuntimeError), DeviceError, explain_torchaudio):
        return import_module(name)


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


@dataclass(frozen=True)
class BundledModule(InspectLoader):
    """A user's module in a bundle, which runs exactly these bytes, and never a compiled file."""

    file: Path
    source: bytes

    def get_source(self, fullname: str) -> str:
        return decode_source(self.source)

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source, str(self.file), "exec", dont_inherit=True)


class _BundledModules(MetaPathFinder):
    """Find the modules of bundles, so that one of them can import another."""

    def __init__(self, modules: Mapping[str, BundledModule]) -> None:
        self._modules = modules

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if (module := self._modules.get(fullname)) is not None:
            return spec_from_file_location(fullname, module.file, loader=module)
        is_package = any(name.startswith(f"{fullname}.") for name in self._modules)
        return ModuleSpec(fullname, None, is_package=True) if is_package else None


def import_user_modules(
    names: Collection[str], bundles: Mapping[Path, Mapping[str, bytes]] = MappingProxyType({})
) -> frozenset[str]:
    """Import the modules that `--import` names, and return their names.

    The working folder and then bundles are searched last. sbkit imports a module that a
    file names only if `--import` names it, too. The path of each module that runs is logged.

    bundles: the verified source of the modules in each bundle, by folder and module. Python must
        not search these folders, even if one is the working folder: it would run other files.

    Raises:
        ConfigError: a module cannot be imported, or two bundles hold different modules of a name.
    """
    if not names:
        return frozenset()
    if str(Path.cwd()) not in sys.path:  # the installed command does not search there
        sys.path.append(str(Path.cwd()))
    folders = {folder.resolve() for folder in bundles}
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() not in folders]
    bundled = [
        (name, BundledModule(folder / f"{name}.py", source))
        for folder, sources in bundles.items()
        for name, source in sources.items()
    ]
    finder = _BundledModules(dict(reversed(bundled)))  # the first bundle wins
    sys.meta_path.append(finder)
    try:
        for name in names:
            _import_user_module(name)
    finally:
        sys.meta_path.remove(finder)
    for name, module in bundled:
        running = getattr(sys.modules[name], "__loader__", None)
        if isinstance(running, BundledModule) and running.source != module.source:
            raise ConfigError(
                f"The module {name} is {running.file}, but {module.file} is another module of that "
                "name. Use these bundles in different processes, or restart this one."
            )
    return frozenset(names)


def _import_user_module(name: str) -> None:
    try:
        if name not in sys.modules and (spec := find_spec(name)) is not None:
            logger.info(f"--import {name}: running {spec.origin}")
        import_module(name)
    except Exception as error:  # the user's module may fail in any way
        raise ConfigError(
            f"The user's module {name} cannot be imported: it raised {type(error).__name__} "
            f"({error}). Start in the folder of {name}.py, or put that folder on PYTHONPATH."
        ) from error
