"""Imports at run time: optional packages, and the user's modules.

A module of the user's runs the bytes that are noted when it is imported, whoever imports it: its
file may change later.
"""

import ast
import logging
import os
import re
import site
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import decode_source, find_spec, resolve_name, spec_from_file_location
from pathlib import Path
from types import CodeType, MappingProxyType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from sbkit.base.errors import ConfigError, DeviceError, SbkitError, translate

logger = logging.getLogger(__name__)

OWN_PACKAGES = {"sbkit", "recipes"}
LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (Path(os.__file__).parent, *site.getsitepackages(), site.getusersitepackages())
)
INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")  # also elsewhere, by PYTHONPATH


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


# -- the source of the user's modules --------------------------------------------------------------


class NotedModule(SourceFileLoader):
    """A module in a file of the user's, which runs the bytes noted here, never a compiled file.

    Python takes a compiled file for current if the source has the same size and second.
    """

    source: bytes

    def get_code(self, fullname: str) -> CodeType:
        self.source = self.get_data(self.path)
        return self.source_to_code(self.source, self.path)


class _UserFiles(MetaPathFinder):
    """Find what the other finders find; note the source of each module of the user's."""

    def find_spec(self, fullname: str, path: Any, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] in OWN_PACKAGES | sys.stdlib_module_names:
            return None
        if path is not None and all(_is_library(f"{folder}{os.sep}") for folder in path):
            return None
        spec = _find(fullname, path)
        loader = None if spec is None else spec.loader
        if spec is not None and type(loader) is SourceFileLoader and not _is_library(loader.path):
            spec.loader = NotedModule(fullname, loader.path)
        return spec


_noted_later: WeakKeyDictionary[ModuleType, bytes] = WeakKeyDictionary()  # or by another loader


def note_user_modules() -> None:
    """Note the source of the user's modules from now on, and of those that are imported."""
    sys.meta_path.insert(0, _UserFiles())
    for name in [*sys.modules]:
        source_of(name)


def _is_library(file: str) -> bool:
    return file.startswith(LIBRARIES) or bool(INSTALLED.search(file))


def _find(fullname: str, path: Any) -> ModuleSpec | None:
    """Find a module as Python would import it now."""
    finders = [finder for finder in sys.meta_path if not isinstance(finder, _UserFiles)]
    specs = (finder.find_spec(fullname, path, None) for finder in finders)
    return next(filter(None, specs), None)


def source_of(name: str) -> bytes | None:
    """Return the source that an imported module of the user's runs; None for other modules."""
    module = sys.modules.get(name)
    variables = getattr(module, "__dict__", {})  # an attribute access could import a lazy module
    loader, file = variables.get("__loader__"), variables.get("__file__") or ""
    if isinstance(loader, NotedModule | BundledModule):
        return loader.source
    is_own = name.partition(".")[0] == "sbkit" or name == "__main__"
    if module is None or is_own or not file.endswith(".py") or _is_library(file):
        return None
    if module not in _noted_later:
        try:
            _noted_later[module] = Path(file).read_bytes()
        except OSError:
            return None
    return _noted_later[module]


def user_sources(module_name: str, *, with_packages: bool = True) -> dict[str, bytes]:
    """Return the source of a module of the user's and of those of theirs that it imports, by name.

    Empty for a module that is not imported, and for one of sbkit, recipes or an installed package.

    with_packages: also of the packages that they lie in, whose `__init__.py` runs before them.
    """
    sources: dict[str, bytes] = {}
    pending = [module_name]
    while pending:
        name = pending.pop()
        is_new = name not in sources and name.partition(".")[0] not in OWN_PACKAGES
        if is_new and (source := source_of(name)) is not None:
            sources[name] = source
            package = vars(sys.modules[name]).get("__package__") or ""
            pending += imported_modules(source, package)
            pending += [name.rpartition(".")[0]] * with_packages
    return sources


def sources_to_import(sources: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the source, as it is now, of the user's modules that functions of these import.

    sources: of imported modules, by name.
    """
    found: dict[str, bytes] = {}
    packages = {name: vars(sys.modules[name]).get("__package__") or "" for name in sources}
    pending = [(source, packages[name]) for name, source in sources.items()]
    while pending:
        for name in imported_modules(*pending.pop()) - {*found, *sys.modules}:
            spec = None if name.partition(".")[0] in OWN_PACKAGES else _find_unimported(name)
            file = str(spec.origin) if spec is not None and spec.has_location else ""
            if spec is not None and file.endswith(".py") and not _is_library(file):
                found[name] = Path(file).read_bytes()
                pending.append((found[name], spec.parent or ""))
    return found


def _find_unimported(name: str) -> ModuleSpec | None:
    """Find a module without importing its package."""
    parent = name.rpartition(".")[0]
    package = _find_unimported(parent) if parent else None
    path = package.submodule_search_locations if package is not None else None
    return None if parent and not path else _find(name, path)


@cache
def imported_modules(source: bytes, package: str = "") -> frozenset[str]:
    """Return the modules that a source imports when it runs, not those for type checkers.

    Other names of `from MODULE import NAME` are among them, because they may be modules.

    package: in which relative imports are looked up; without it they are left out.
    """
    nodes = [*ast.walk(ast.parse(source))]
    guards = [n for n in nodes if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    skipped = {id(child) for guard in guards for child in ast.walk(guard)}
    names: set[str] = set()
    for node in nodes:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            module = resolve_name("." * node.level + (node.module or ""), package)
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


# -- `--import` ------------------------------------------------------------------------------------


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
        is_package = any(name.startswith(f"{fullname}.") for name in self._modules)
        spec = ModuleSpec(fullname, None, is_package=True) if is_package else None
        if (module := self._modules.get(fullname)) is not None:
            spec = spec_from_file_location(fullname, module.file, loader=module)
            if spec is not None and is_package:
                spec.submodule_search_locations = []
        return spec


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
