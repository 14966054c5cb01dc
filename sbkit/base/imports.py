"""Imports at run time: optional packages, and the user's modules.

A module of the user's runs the bytes that are noted when it is imported, whoever imports it. Before
a run begins, they are compared with the file that Python would import now: `require_current`. A
folder that is read as data runs none of its modules: `reading_data`.
"""

import ast
import logging
import os
import re
import site
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from importlib import import_module, invalidate_caches
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, resolve_name, spec_from_file_location
from itertools import accumulate, chain
from pathlib import Path
from types import CodeType, MappingProxyType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

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


# -- the user's modules ----------------------------------------------------------------------------

FOLDERS = (Path(os.__file__).parent, *site.getsitepackages(), site.getusersitepackages())
OWN_FOLDERS = (Path(__file__).parents[2] / package for package in ("sbkit", "recipes"))
LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (*FOLDERS, *OWN_FOLDERS))
INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")  # also elsewhere, by PYTHONPATH

_is_importing = ContextVar("is_importing", default=False)
_read_sources: WeakKeyDictionary[ModuleType, bytes] = WeakKeyDictionary()  # not of `NotedModule`s
_yaml_folders: list[str] = []  # the entries of sys.path that YAMLs brought, the last one's first
_data_folders: list[tuple[Path, frozenset[str]]] = []  # with the modules that may be imported


class NotedModule(SourceFileLoader):
    """A module of the user's, which runs exactly the bytes noted here, and never a compiled file.

    Python takes a compiled file for current if the source has the same size and second.

    source: that of a module in a bundle; another one is read when it is imported.
    """

    is_ours = False  # whether sbkit imported it, not the user's own code

    def __init__(self, name: str, path: str, source: bytes | None = None) -> None:
        super().__init__(name, path)
        self.is_bundled, self.source = source is not None, source

    def get_data(self, path: str) -> bytes:
        if self.source is None or path != self.path:
            return super().get_data(path)
        return self.source

    def get_code(self, fullname: str) -> CodeType:
        self.source, self.is_ours = self.get_data(self.path), _is_importing.get()
        return self.source_to_code(self.source, self.path)


class _UserModules(MetaPathFinder):
    """Find what the other finders find; note the user's modules, and refuse those of data."""

    def find_spec(self, fullname: str, path: Any, target: object = None) -> ModuleSpec | None:
        if not _data_folders and path is not None and all(map(_is_library, path)):
            return None
        spec = _find(fullname, path)
        _refuse_data(fullname, path, spec)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            is_users = not _is_library(spec.loader.path)
            spec.loader = NotedModule(fullname, spec.loader.path) if is_users else spec.loader
        return spec


def note_user_modules() -> None:
    """Note the source of the user's modules from now on, and of those that are imported."""
    sys.meta_path.insert(0, _UserModules())
    for name in [*sys.modules]:
        user_sources(name)


@contextmanager
def importing() -> Iterator[None]:
    """Note the modules of this block as imported by sbkit, which may import them anew."""
    token = _is_importing.set(True)
    try:
        yield
    finally:
        _is_importing.reset(token)


def _is_library(path: str) -> bool:
    return path.startswith(LIBRARIES) or bool(INSTALLED.search(f"{path}{os.sep}"))


def _find(name: str, path: Any) -> ModuleSpec | None:
    finders = [finder for finder in sys.meta_path if not isinstance(finder, _UserModules)]
    return next(filter(None, (finder.find_spec(name, path, None) for finder in finders)), None)


def _variables(name: str) -> dict[str, Any]:
    return getattr(sys.modules.get(name), "__dict__", {})  # an attribute could import a lazy module


def source_of(name: str) -> bytes | None:
    """Return the source that an imported module runs; None for a compiled one."""
    loader, file = _variables(name).get("__loader__"), _variables(name).get("__file__") or ""
    if isinstance(loader, NotedModule):
        return loader.source
    if not file.endswith(".py"):
        return None
    if (module := sys.modules[name]) not in _read_sources:
        with suppress(OSError):
            _read_sources[module] = Path(file).read_bytes()
    return _read_sources.get(module)


def user_sources(*names: str) -> dict[str, bytes]:
    """Return the source of modules of the user's and of those of theirs that they import, by name.

    Empty for a module that is not imported, and for one of sbkit, recipes or an installed package.
    """
    sources: dict[str, bytes] = {}
    pending = [*names]
    while pending:
        name = pending.pop()
        if name in {*sources, "__main__"} or _is_library(_variables(name).get("__file__") or ""):
            continue
        if (source := source_of(name)) is not None:
            sources[name] = source
            pending += imported_modules(source, _variables(name).get("__package__") or "")
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
            spec = _find_unimported(name)
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


def search_folders(folders: Collection[str]) -> None:
    """Search the folders of a YAML for modules: after Python's, and before those of other YAMLs."""
    if _data_folders:  # a YAML that is read as data brings no code
        folders = [str(Path.cwd())]
    entries = [entry for entry in sys.path if entry not in _yaml_folders]
    own = [folder for folder in folders if folder not in entries]
    _yaml_folders[:] = dict.fromkeys([*own, *_yaml_folders])
    sys.path[:] = [*entries, *_yaml_folders]


def require_current(names: Iterable[str], classes: Iterable[type] = ()) -> bool:
    """Have all modules that sbkit has imported imported anew, if one of them has changed.

    Return whether they are. Objects that exist keep their classes, and a run that goes on its code.

    names: what the run needs of the user's: modules, or classes in them.
    classes: those that the user's own code gives.

    Raises ConfigError if a module has changed that the user's own code has imported.
    """
    if _is_importing.get():
        return False
    given = {class_.__module__ for class_ in classes}
    prefixes = [accumulate(name.split("."), "{}.{}".format) for name in names]
    needed = user_sources(*given, *chain(*prefixes))
    kept = user_sources(*given, *(name for name in needed if not _is_ours(name)))
    for name in filter(_has_changed, kept):
        raise ConfigError(
            f"{name.replace('.', '/')}.py has changed since this kernel imported it. Restart the "
            "kernel."
        )
    ours = {*filter(_is_ours, [*sys.modules])} - kept.keys()
    is_old = any(map(_has_changed, ours))
    for name in ours if is_old else ():
        parent, _, child = name.rpartition(".")
        _variables(parent).pop(child, None)
        del sys.modules[name]
    invalidate_caches()
    return is_old


def _is_ours(name: str) -> bool:
    loader = _variables(name).get("__loader__")
    return isinstance(loader, NotedModule) and loader.is_ours


def _has_changed(name: str) -> bool:
    """Return whether Python would import another source now; a file that is gone is no change."""
    parent = name.rpartition(".")[0]
    spec = _find(name, _variables(parent).get("__path__", []) if parent else None)
    file = Path(spec.origin or "") if spec is not None and spec.has_location else Path()
    return file.suffix == ".py" and file.is_file() and file.read_bytes() != source_of(name)


@contextmanager
def reading_data(folder: Path, trusted: Collection[str] = ()) -> Iterator[None]:
    """Refuse in this block to import a module that lies in a folder, except ``trusted`` ones."""
    entry = (folder.resolve(), frozenset(trusted))
    _data_folders.append(entry)
    try:
        yield
    finally:
        _data_folders.remove(entry)


def _refuse_data(name: str, path: object, spec: ModuleSpec | None) -> None:
    for folder, trusted in _data_folders:
        if spec is None and path is None:  # a run would find it beside its YAML
            spec = PathFinder.find_spec(name, [str(folder)])
        if spec is None or not spec.has_location or str(spec.origin).startswith(LIBRARIES):
            continue
        file = Path(str(spec.origin)).absolute()
        parents = {*(parent.resolve() for parent in file.parents), *file.resolve().parents}
        if folder in parents and not any(f"{t}.".startswith(f"{name}.") for t in trusted):
            raise ConfigError(
                f"The module {name} lies in {folder}, which is read as data, and importing it "
                f"would run its code. If you trust it, pass --import {name}, or in Python import "
                "it first."
            )


# -- `--import` ------------------------------------------------------------------------------------


class _BundledModules(MetaPathFinder):
    """Find the modules of bundles, so that one of them can import another."""

    def __init__(self, modules: Mapping[str, NotedModule]) -> None:
        self._modules = modules

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        module = self._modules.get(fullname)
        is_package = any(name.startswith(f"{fullname}.") for name in self._modules)
        if module is None:
            return ModuleSpec(fullname, None, is_package=True) if is_package else None
        spec = spec_from_file_location(fullname, module.path, loader=module)
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
    held = {name: source for sources in bundles.values() for name, source in sources.items()}
    if any(source_of(name) not in (None, held.get(name)) for name in names):
        require_current(names)  # what a bundle holds is right, also if its file was edited later
    bundled = [
        (name, NotedModule(name, str(folder / f"{name}.py"), source))
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
        running: Any = getattr(sys.modules[name], "__loader__", None)
        is_noted = isinstance(running, NotedModule)
        if is_noted and running.is_bundled and running.source != module.source:
            raise ConfigError(
                f"The module {name} is {running.path}, but {module.path} is another module of that "
                "name. Use these bundles in different processes, or restart this one."
            )
    return frozenset(names)


@importing()
def _import_user_module(name: str) -> None:
    try:
        if name not in sys.modules and (spec := find_spec(name)) is not None:
            logger.info(f"--import {name}: running {spec.origin}")
        import_module(name)
    except SbkitError:
        raise
    except Exception as error:  # the user's module may fail in any way
        raise ConfigError(
            f"The user's module {name} cannot be imported: it raised {type(error).__name__} "
            f"({error}). Start in the folder of {name}.py, or put that folder on PYTHONPATH."
        ) from error
