"""What the code of a run reads of its hparams: the script, what it imports, and sbkit.

Tables of ranges and the checks name knobs too, without doing anything by them: they do not count.
"""

import ast
import inspect
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from sbkit.base import version
from sbkit.train.recipe import Recipe

SBKIT = Path(version.__file__).parents[1]
INSTALLED = tuple({Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")})
SPEAKING = (SBKIT / "check", SBKIT / "config")  # these name knobs, to judge them: no use of them
TABLES = ("RANGES",)  # of a class or file: likewise
HOLDERS = ("hparams", "knobs", "modules")  # `brain.hparams.lr`, `knobs["lr"]`


@dataclass(frozen=True)
class Reading:
    """Names that code reads.

    named: in any text; asked: of the hparams; whole: asked for and used as it is; indexed: asked
    for something in it.
    """

    named: frozenset[str]
    asked: frozenset[str]
    whole: frozenset[str]
    indexed: frozenset[str]

    def passes_on(self, name: str) -> bool:
        """Return whether a mapping is handed to something else, which may read any key of it."""
        return name in self.whole or name not in self.indexed


def read_by(recipe: Recipe) -> Reading:
    """Return what is read by a recipe, by what it imports that is not installed, and by sbkit."""
    readings = [vars(reading_of(file)) for file in sources(recipe)]
    names = (each.name for each in fields(Reading))
    return Reading(
        **{name: frozenset().union(*(each[name] for each in readings)) for name in names}
    )


def sources(recipe: Recipe) -> set[Path]:
    """Return the files of a recipe and those that they import."""
    found: set[Path] = set()
    waiting = list(_first(recipe))
    while waiting:
        file = waiting.pop()
        if file not in found and _is_own(file):
            found.add(file)
            waiting.extend(_imported(file))
    return found


@cache
def reading_of(file: Path) -> Reading:
    """Collect what one file names."""
    nodes = _nodes(file)
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Subscript | ast.Attribute)}
    tables = {id(each) for node in nodes if _is_table(node) for each in ast.walk(node)}
    found: dict[str, set[str]] = {field.name: set() for field in fields(Reading)}
    for node in nodes:
        name = _asked_for(node)
        if name is not None:
            found["indexed" if id(node) in inner else "whole"].add(name)
            found["named"].add(name)
        if name is not None and _holder(node) in HOLDERS:
            found["asked"].add(name)
        if isinstance(node, ast.Constant) and id(node) not in tables:
            found["named"].add(str(node.value))
    return Reading(**{name: frozenset(names) for name, names in found.items()})


def _is_table(node: ast.AST) -> bool:
    match node:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name in TABLES
    return False


@cache
def _nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_bytes())))


def _asked_for(node: ast.AST) -> str | None:
    """Return the name in `knobs["name"]` and `hparams.name`."""
    match node:
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return name
        case ast.Attribute(attr=name) if _holder(node) in HOLDERS:
            return name
    return None


def _holder(node: ast.AST) -> str:
    match node:
        case ast.Subscript(value=value) | ast.Attribute(value=value):
            return str(getattr(value, "id", getattr(value, "attr", "")))
    return ""


def _first(recipe: Recipe) -> Iterator[Path]:
    yield SBKIT / "training.py"
    for part in (recipe.prepare_splits, recipe.prepare_labels, recipe.make_loaders):
        yield from _files([part.__module__])
    brains = inspect.getmro(recipe.brain) if inspect.isclass(recipe.brain) else [recipe.brain]
    yield from _files(each.__module__ for each in brains)


def _imported(file: Path) -> Iterator[Path]:
    for node in _nodes(file):
        if isinstance(node, ast.Import):
            yield from _files(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from _files([node.module, *(f"{node.module}.{each.name}" for each in node.names)])


def _files(modules: Iterable[str]) -> Iterator[Path]:
    for name in modules:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None:
            yield Path(file).resolve()


def _is_own(file: Path) -> bool:
    if any(folder in file.parents for folder in SPEAKING):
        return False
    return SBKIT in file.parents or not any(folder in file.parents for folder in INSTALLED)
