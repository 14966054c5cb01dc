"""Imports at run time: optional packages, and the user's modules.

A module of the user's runs the bytes that are noted when it is imported, whoever imports it. Before
a run begins, they are compared with the file that Python would import now: `require_current`. A
folder that is read as data runs none of its modules: `reading_data`.
"""

import ast
import logging
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module, invalidate_caches
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, resolve_name, spec_from_file_location
from itertools import accumulate
from pathlib import Path
from traceback import walk_stack
from types import CodeType, MappingProxyType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from sbkit.base.errors import ConfigError, SbkitError
from sbkit.base.libraries import LIBRARIES, is_library

logger = logging.getLogger(__name__)


def require_package(name: str, *, extra: str) -> ModuleType:
    """Import a package of an optional extra, or raise SbkitError."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0].replace("_", "-")
        fault = f"This needs the package {package}, which cannot be imported ({error})."
        raise SbkitError(f"{fault} Install it: pip install 'sbkit[{extra}]'") from error


def explain_torchaudio(error: Exception) -> str:
    """Explain why torchaudio, which speechbrain imports, cannot be, and which commands help.

    Wheels of torchaudio 2.11.0 refuse any CUDA but 13.0, that of torch 2.11 to 2.14; those of
    2.11.1 any but 13.2, that of torch 2.15. Neither can be loaded beside a torch without CUDA.
    """
    from sbkit.base.versions import versions  # importlib.metadata takes 30 ms

    torch, torchaudio = (versions()[name] for name in ("torch", "torchaudio"))
    reason = " ".join(str(error).split())[:200]
    if torchaudio is None:
        fault = f"torchaudio is not installed, and torch is {torch}"
    else:
        fault = f"torchaudio {torchaudio} cannot be used with torch {torch} ({reason})"
    return (
        f"{fault}. To keep this torch, install torchaudio 2.11.1 for torch 2.15, 2.11.0 for an "
        "earlier one, from the index that torch came from: pip install --force-reinstall --no-deps "
        "--index-url INDEX torchaudio==VERSION. Or install a pair from the default index: pip "
        "install --force-reinstall 'torch>=2.15,<2.16' torchaudio"
    )


# -- the user's modules ----------------------------------------------------------------------------

_read_sources: WeakKeyDictionary[ModuleType, bytes] = WeakKeyDictionary()  # not of `NotedModule`s
_yaml_folders: list[str] = []  # the entries of sys.path that YAMLs brought, the last one's first
_data_folders: list[tuple[Path, Collection[str]]] = []  # with the modules that may be imported


class NotedModule(SourceFileLoader):
    """A module of the user's, which runs exactly the bytes noted here, and never a compiled file.

    Python takes a compiled file for current if the source has the same size and second.

    source: that of a module in a bundle; another one is read when it is imported.
    """

    is_ours = False  # whether sbkit had it imported, not the user's own code

    def __init__(self, name: str, path: str, source: bytes | None = None) -> None:
        super().__init__(name, path)
        self.is_bundled, self.source = source is not None, source

    def get_code(self, fullname: str) -> CodeType:
        if self.source is None:
            self.source = self.get_data(self.path)
        self.is_ours = _is_called_by_sbkit()
        return self.source_to_code(self.source, self.path)


class _UserModules(MetaPathFinder):
    """Find what the other finders find; note the user's modules, and refuse those of data."""

    def find_spec(self, fullname: str, path: Any, target: object = None) -> ModuleSpec | None:
        spec = _find(fullname, path)
        for folder, trusted in _data_folders:
            if spec is None and path is None:  # a run would find it beside its YAML
                spec = PathFinder.find_spec(fullname, [str(folder)])
            is_trusted = any(f"{name}.".startswith(f"{fullname}.") for name in trusted)
            if spec is not None and not is_trusted and _lies_in(folder, spec):
                raise ConfigError(
                    f"The module {fullname} lies in {folder}, which is read as data. If you trust "
                    f"it, pass --import {fullname}, or in Python `user_modules`."
                )
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return spec
        if not is_library(spec.loader.path):
            spec.loader = NotedModule(fullname, spec.loader.path)
        return spec


def note_user_modules() -> None:
    """Note the source of the user's modules from now on, and of those that are imported."""
    sys.meta_path.insert(0, _UserModules())
    user_sources(*sys.modules)


def _is_called_by_sbkit() -> bool:
    """Return whether a function of sbkit's imports a module, perhaps through other modules."""
    for frame, _ in walk_stack(sys._getframe()):
        caller = frame.f_globals.get("__name__", "")
        if caller.startswith(("sbkit.", "recipes.")) and caller != __name__:
            return frame.f_code.co_name != "<module>"  # that one imports what it is made of
    return False


def _lies_in(folder: Path, spec: ModuleSpec) -> bool:
    """Return whether the file of a module lies in a folder, perhaps by links."""
    if not spec.has_location or str(spec.origin).startswith(LIBRARIES):
        return False
    parents = Path(str(spec.origin)).absolute().parents
    return any(parent.resolve().is_relative_to(folder) for parent in parents)


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


def user_sources(*names: str, with_unimported: bool = False) -> dict[str, bytes]:
    """Return the source of modules of the user's and of those of theirs that they import, by name.

    Empty for a module that is not imported, and for one of sbkit, recipes or an installed package.

    with_unimported: add the source, as it is now, of those that are not imported, and of packages.
    """
    sources: dict[str, bytes] = {}
    pending, seen = [*names], {"", "__main__"}
    while pending:
        name = pending.pop()
        if name in seen or is_library(_variables(name).get("__file__") or ""):
            continue
        seen.add(name)
        source, package = source_of(name), _variables(name).get("__package__") or ""
        if with_unimported:
            pending.append(name.rpartition(".")[0])
            if name not in sys.modules:
                source, package = _read_unimported(name)
        if source is not None:
            sources[name] = source
            pending += imported_modules(source, package)
    return sources


def _read_unimported(name: str) -> tuple[bytes | None, str]:
    """Return the source of a module of the user's that is not imported, and its package."""
    spec = _find_unimported(name)
    file = str(spec.origin) if spec is not None and spec.has_location else ""
    if spec is None or not file.endswith(".py") or is_library(file):
        return None, ""
    return Path(file).read_bytes(), spec.parent or ""


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
    nodes: list[ast.AST] = []
    with suppress(SyntaxError):  # which importing it will raise, with its file
        nodes += ast.walk(ast.parse(source))
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


def require_current(names: Iterable[str] = (), given_modules: Collection[str] = ()) -> bool:
    """Import anew all modules that sbkit has imported, if one of them has changed.

    Return whether they are. Objects that exist keep their classes. What the user's own code has
    imported, or needs for the classes that it gives, stays.

    names: what the run needs of the user's, too: modules, or classes in them.
    given_modules: those of the classes.
    """
    paths = {path for name in names for path in accumulate(name.split("."), "{}.{}".format)}
    loaders = {name: _variables(name).get("__loader__") for name in [*sys.modules]}
    ours = {name for name, loader in loaders.items() if getattr(loader, "is_ours", False)}
    needed = user_sources(*given_modules, *paths)
    invalidate_caches()
    changed = {*filter(_has_changed, ours | needed.keys())}
    own = user_sources(*(loaders.keys() - ours), *given_modules) if changed else {}
    for name in changed & needed.keys() & own.keys():
        file = f"{name.replace('.', '/')}.py"
        raise ConfigError(f"{file} has changed since this kernel imported it. Restart the kernel.")
    ours -= own.keys()
    is_old = not changed.isdisjoint(ours)
    for name in ours if is_old else ():
        parent, _, child = name.rpartition(".")
        _variables(parent).pop(child, None)
        del sys.modules[name]
    return is_old


def _has_changed(name: str) -> bool:
    """Return whether Python would import another source now; a file that is gone is no change."""
    parent = name.rpartition(".")[0]
    spec = _find(name, _variables(parent).get("__path__", []) if parent else None)
    file = Path(spec.origin or "") if spec is not None and spec.has_location else Path()
    return file.suffix == ".py" and file.is_file() and file.read_bytes() != source_of(name)


def is_reading_data() -> bool:
    """Return whether a run folder is read as data."""
    return bool(_data_folders)


def require_trusted(module: str) -> None:
    """Refuse a module that a run names while it is read as data, unless the user has named it."""
    trusted = {name for _, names in _data_folders for name in names}
    if _data_folders and not module.startswith(("sbkit.", "recipes.")) and module not in trusted:
        raise ConfigError(
            f"The run in {_data_folders[-1][0]} is read as data, but names the module {module}. If "
            f"you trust it, pass --import {module}, or in Python `user_modules`."
        )


@contextmanager
def reading_data(folder: Path, trusted: Collection[str] = ()) -> Iterator[None]:
    """Refuse in this block to import a module that lies in a folder, except ``trusted`` ones."""
    _data_folders.append((folder.resolve(), trusted))
    try:
        yield
    finally:
        _data_folders.pop()


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
        inside: list[str] | None = [] if is_package else None
        return spec_from_file_location(
            fullname, module.path, loader=module, submodule_search_locations=inside
        )


def import_user_modules(
    names: Collection[str], bundles: Mapping[Path, Mapping[str, bytes]] = MappingProxyType({})
) -> frozenset[str]:
    """Import the modules that `--import` names, and return their names.

    The working folder and then bundles are searched last. The path of each module that runs is
    logged.

    bundles: the verified source of the modules in each bundle, by folder and module. Python must
        not search these folders, even if one is the working folder: it would run other files.
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
    finally:
        sys.meta_path.remove(finder)
    for name, module in bundled:
        running: Any = getattr(sys.modules[name], "__loader__", None)
        is_noted = isinstance(running, NotedModule)
        if is_noted and running.is_bundled and running.source != module.source:
            raise ConfigError(
                f"The module {name} is {running.path}, but {module.path} is another module of that "
                "name. Restart this process."
            )
    return frozenset(names)
