"""Imports at run time: optional packages, and the user's modules.

The user's modules are imported by Python. A module of a bundle runs the verified bytes. Before a
run begins, modules that were edited after their import are refused: `require_unedited`.
"""

import ast
import logging
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from importlib import import_module, invalidate_caches
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, module_from_spec, resolve_name
from inspect import unwrap
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from sbkit.base.errors import ConfigError, SbkitError
from sbkit.base.files import is_run
from sbkit.base.libraries import is_library
from sbkit.base.versions import library_version

COPIED_FROM = "COPIED_FROM"  # the variable of the `recipes` of a project: a version of sbkit

logger = logging.getLogger(__name__)


def require_package(name: str, *, extra: str) -> ModuleType:
    """Import a package of an optional extra, or raise SbkitError."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0].replace("_", "-")
        fault = f"This needs the package {package}, which cannot be imported ({error})."
        raise SbkitError(f"{fault} Install it: pip install 'sbkit[{extra}]'") from error


def import_recipe(name: str) -> ModuleType:
    """Import `recipes`, or a module of a recipe.

    Raises ConfigError; that of a copy by `sbkit new` names the version that it was copied from.
    """
    try:
        return import_module(name)
    except SbkitError:
        raise
    except Exception as error:  # a user's module may fail in any way
        if isinstance(error, ModuleNotFoundError) and error.name == "recipes":
            raise ConfigError(
                "The folder `recipes` is missing. `sbkit new FOLDER` makes a project that has it; "
                "start in the folder of the project."
            ) from error
        fault = f"{name} cannot be imported: it raised {type(error).__name__} ({error})."
        origin, version = _variables("recipes").get(COPIED_FROM), library_version()
        if name.startswith("recipes.") and origin not in (None, version):
            fault += (
                f" It was copied from sbkit {origin}, and this is sbkit {version}. Install the "
                "former, or make a new project by `sbkit new` and move your changes there."
            )
        raise ConfigError(fault) from error


def explain_torchaudio(error: Exception) -> str:
    """Explain why torchaudio, which speechbrain imports, cannot be imported, and how to install it.

    The wheel of torchaudio 2.11.0 accepts only CUDA 13.0, which torch 2.11 to 2.14 use; the wheel
    of 2.11.1 accepts only CUDA 13.2, which torch 2.15 uses. Neither accepts a torch without CUDA.
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


# ---- the user's modules

_code: WeakKeyDictionary[ModuleType, bytes] = WeakKeyDictionary()  # the code that each module runs
_yaml_folders: list[str] = []  # entries of sys.path added for YAMLs, the latest first


class BundledModule(SourceFileLoader):
    """A module of a bundle, which runs exactly the verified bytes, and never a compiled file."""

    def __init__(self, name: str, path: str, code: bytes) -> None:
        super().__init__(name, path)
        self.code = code

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.code, self.path)


def _variables(name: str) -> dict[str, Any]:
    return getattr(sys.modules.get(name), "__dict__", {})  # an attribute could import a lazy module


def code_of(name: str) -> bytes | None:
    """Return the code that an imported module runs, even if its file is edited later.

    None for a compiled module. If the file was edited before the first call, its new content.
    """
    loader, file = _variables(name).get("__loader__"), _variables(name).get("__file__") or ""
    if isinstance(loader, BundledModule):
        return loader.code
    if not file.endswith(".py"):
        return None
    module = sys.modules[name]
    if module in _code or not Path(file).is_file():
        return _code.get(module)
    code = Path(file).read_bytes()
    if _runs(module, code):
        _code[module] = code
    return code


def user_code(*names: str, with_unimported: bool = False) -> dict[str, bytes]:
    """Return the code of the user's modules, and of the user's modules that they import, by name.

    Modules that are not imported are left out, and so are sbkit, recipes and installed packages.

    with_unimported: add modules that are not imported, as their files are now, and packages.
    """
    code_by_name: dict[str, bytes] = {}
    pending, seen = [*names], {"", "__main__"}
    while pending:
        name = pending.pop()
        if name in seen or is_library(_variables(name).get("__file__") or ""):
            continue
        seen.add(name)
        code, package = code_of(name), _variables(name).get("__package__") or ""
        if with_unimported:
            pending.append(name.rpartition(".")[0])
            spec = None if name in sys.modules else _find(name)
            file = _code_file(spec)
            if spec is not None and file is not None and not is_library(str(file)):
                code, package = file.read_bytes(), spec.parent or ""
        if code is not None:
            code_by_name[name] = code
            pending += imported_modules(code, package)
    return code_by_name


def user_digests(*names: str) -> dict[str, str]:
    """Return a digest of each of the user's modules that these import, imported yet or not."""
    code_by_name = user_code(*names, with_unimported=True)
    return {name: sha256(code).hexdigest() for name, code in sorted(code_by_name.items())}


def _find(name: str) -> ModuleSpec | None:
    """Find what Python would import now, without importing its package."""
    parent = name.rpartition(".")[0]
    if parent:
        package = _find(parent)
        path = None if package is None else package.submodule_search_locations
        with suppress(KeyError):  # a folder in one that is not imported, both without __init__.py
            return PathFinder.find_spec(name, path) if path else None
        return None
    spec = PathFinder.find_spec(name)
    if spec is None and name not in sys.modules:
        spec = find_spec(name)  # finds packages that are installed from a checkout
    return spec or _variables(name).get("__spec__")


def _code_file(spec: ModuleSpec | None) -> Path | None:
    file = Path(str(spec.origin)) if spec is not None and spec.has_location else Path()
    return file if file.suffix == ".py" and file.is_file() else None


@lru_cache(maxsize=1000)  # each module of a YAML is looked up a dozen times
def imported_modules(code: bytes, package: str = "") -> frozenset[str]:
    """Return the modules that code imports when it runs, without imports for type checkers only.

    MODULE.NAME of each `from MODULE import NAME` is included, because it may be a module.

    package: the package of the code, to which relative imports refer; without it they are skipped.
    """
    nodes: list[ast.AST] = []
    with suppress(SyntaxError):  # importing it will raise the error, with its file
        nodes += ast.walk(ast.parse(code))
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


def dotted_path(class_: type) -> str:
    """Return the path that a class is imported by."""
    return f"{class_.__module__}.{class_.__qualname__}"


def search_folders(folders: Collection[str] = ()) -> None:
    """Make Python search a YAML's folders for modules, after its own and before other YAMLs'.

    The working folder is searched as well, unless it lies in a run folder.
    """
    cwd = Path.cwd()
    folders = [*folders, *([] if any(map(is_run, (cwd, *cwd.parents))) else [str(cwd)])]
    entries = [entry for entry in sys.path if entry not in _yaml_folders]
    new_folders = [folder for folder in folders if folder not in entries]
    _yaml_folders[:] = dict.fromkeys([*new_folders, *_yaml_folders])
    sys.path[:] = [*entries, *_yaml_folders]


def require_unedited(*names: str) -> None:
    """Refuse modules of the user's that were edited after they were imported.

    A file is compared with its content when it was first read; its functions and methods, compiled
    again, are compared with the running ones. A module is also refused if Python would now import
    another file.

    names: modules, or classes in them; the user's modules that they import are checked as well.
    """
    invalidate_caches()
    for name, code in user_code(*names, with_unimported=True).items():
        if (module := sys.modules.get(name)) is None:
            continue
        file = _code_file(_find(name))
        is_changed = file is not None and file.read_bytes() != code
        if is_changed and str(file) != module.__file__:
            raise ConfigError(
                f"{name} was imported from {module.__file__}, but this run needs {file}. Restart "
                "the kernel."
            )
        if is_changed or not _runs(module, code):
            raise ConfigError(f"{name} was edited after it was imported. Restart the kernel.")


def _runs(module: ModuleType, code: bytes) -> bool:
    """Return whether this code has every function and method that a module runs."""
    if type(module.__loader__) is not SourceFileLoader:
        return True  # a bundle's module runs its own code; a hook such as pytest's changes code
    file = str(module.__file__)
    compiled: set[CodeType] = set()
    try:
        pending = [compile(code, file, "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return False
    while pending:
        block = pending.pop()
        compiled.add(block)
        pending += [inner for inner in block.co_consts if isinstance(inner, CodeType)]
    return all(block in compiled for block in _functions_of(module) if block.co_filename == file)


def _functions_of(owner: ModuleType | type, qualname: str = "") -> Iterator[CodeType]:
    """Yield the code of the functions of a module or a class, and of classes in it."""
    for value in vars(owner).values():
        function: Any = value.fget if isinstance(value, property) else value
        if isinstance(function, classmethod | staticmethod):
            function = function.__func__
        if isinstance(function, FunctionType):
            yield getattr(unwrap(function), "__code__", function.__code__)
        elif isinstance(value, type) and value.__qualname__.rpartition(".")[0] == qualname:
            yield from _functions_of(value, value.__qualname__)


# ---- `--import`


def import_user_modules(
    names: Collection[str], bundles: Mapping[Path, Mapping[str, bytes]] = MappingProxyType({})
) -> frozenset[str]:
    """Import the modules that `--import` names, and return their names.

    The working folder and then bundles are searched last. The path of each module that runs is
    logged.

    bundles: the verified code of the modules in each bundle, by folder and module. Python must
        not search these folders, even if one is the working folder: it would run other files.
    """
    if not names:
        return frozenset()
    search_folders()  # the installed command does not search the working folder
    folders = {folder.resolve() for folder in bundles}
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() not in folders]
    bundled = [
        BundledModule(name, str(folder / f"{name}.py"), code)
        for folder, code_by_name in bundles.items()
        for name, code in code_by_name.items()
    ]
    unfound = [loader for loader in bundled if getattr(_find(loader.name), "origin", None) is None]
    loaders = {loader.name: loader for loader in reversed(unfound)}  # the first bundle wins
    try:
        for name in sorted(names, key=loaders.__contains__, reverse=True):
            if name not in sys.modules:
                file = loaders[name].path if name in loaders else getattr(_find(name), "origin", "")
                logger.info(f"--import {name}: running {file}")
                _import_bundled(name, loaders)
            import_module(name)
    except SbkitError:
        raise
    except Exception as error:  # the user's module may fail in any way
        raise ConfigError(
            f"The user's module {name} cannot be imported: it raised {type(error).__name__} "
            f"({error}). Start in the folder of {name}.py, or put that folder on PYTHONPATH."
        ) from error
    for loader in bundled:
        running: Any = _variables(loader.name).get("__loader__")
        if isinstance(running, BundledModule) and running.code != loader.code:
            raise ConfigError(
                f"The module {loader.name} is {running.path}, but {loader.path} is another module "
                "with the same name. Restart this process."
            )
    code_by_name = {loader.name: loader.code for loader in bundled}  # without later edits
    require_unedited(*(name for name in names if code_of(name) != code_by_name.get(name)))
    return frozenset(names)


def _import_bundled(name: str, loaders: Mapping[str, BundledModule]) -> None:
    """Import a module of a bundle, after its package and the bundled modules that it imports."""
    is_package = any(other.startswith(f"{name}.") for other in loaders)
    if name in sys.modules or not (is_package or name in loaders):
        return
    parent, _, child = name.rpartition(".")
    _import_bundled(parent, loaders)
    loader = loaders.get(name)
    if loader is None and _find(name) is not None:
        import_module(name)  # the bundle has only other modules of this package
        return
    origin = None if loader is None else loader.path
    spec: Any = ModuleSpec(name, loader, origin=origin, is_package=is_package)
    spec.has_location = loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    if parent:
        setattr(sys.modules[parent], child, module)
    if loader is None:
        return
    try:
        for other in imported_modules(loader.code, str(module.__package__)):
            _import_bundled(other, loaders)
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
