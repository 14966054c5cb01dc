"""Unread: keys of the YAML that do nothing, because nothing reads them.

What may read them is the script, what it imports, and sbkit. Tables of ranges and the checks name
knobs too, without doing anything by them: they do not count.
"""

import ast
import inspect
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from ruamel.yaml.comments import CommentedMap
from speechbrain.utils.run_opts import RunOptions

from sbkit.check.finding import Finding
from sbkit.check.model.unused import CHECK
from sbkit.check.planned_run import PlannedRun
from sbkit.config.document import (
    INCLUDE_TAG,
    REFERENCE_TAGS,
    Document,
    Keys,
    did_you_mean,
    dotted,
    tag_of,
    walk,
)
from sbkit.config.references import REFERENCE, key_parts, text_of
from sbkit.train.recipe import Recipe

SBKIT = Path(__file__).parents[2]
STANDARD = Path(sysconfig.get_path("stdlib")).resolve()
INSTALLED = ("site-packages", "dist-packages")  # of this environment, or another that it builds on
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


@dataclass(frozen=True)
class Source:
    """What a file names, and the modules that it imports."""

    reading: Reading
    imported: frozenset[str]


def check_unread(planned: PlannedRun) -> Iterator[Finding]:
    """Find the keys that nothing reads, where there is a recipe to search."""
    if not planned.has_recipe:
        yield planned.finding(
            "recipe",
            declared="a YAML must name its `recipe` to be checked whole",
            effect="this one names none: no data, batch or step was looked at",
            fix="Write `recipe: recipes.asr.recipe.ASR`, or MODULE.NAME of your own. A YAML for a "
            "script of its own needs none.",
            stops=False,
        )
        return
    named = str(planned.knobs.get("recipe")).rpartition(".")[0], str(planned.knobs.get("corpus"))
    reading = read_by(planned.recipe, *named)
    known = {*RunOptions().as_dict(), *reading.asked} - set(planned.document.root)
    for keys in unread(planned.document, reading):
        yield planned.finding(
            CHECK,
            *keys,
            declared=f"`{dotted(keys)}` must be read by something",
            effect="no reference, no code of the recipe and no option reads it: it does nothing",
            fix=f"Correct its name, or take it out.{did_you_mean(str(keys[-1]), known)}",
        )


def unread(document: Document, reading: Reading) -> Iterator[Keys]:
    """Find the keys that no reference names, no code reads, and no option of SpeechBrain's is.

    Below a plain mapping too, unless it is handed on as a whole. What an object is made of is read
    by it: it would have refused the rest.
    """
    walker = _Walker(reading, reading.named | set(RunOptions().as_dict()))
    yield from walker.walk(document, (), document.root, references(document))


def references(document: Document) -> set[Keys]:
    """Collect the keys that the references of a file reach."""
    texts = (text_of(node) for _, node in walk(document.root) if tag_of(node) in REFERENCE_TAGS)
    names = (name for text in texts for name in REFERENCE.findall(text))
    return {key_parts(name.partition(".")[0]) for name in names}


@dataclass(frozen=True)
class _Walker:
    reading: Reading
    names: frozenset[str]

    def walk(
        self, document: Document, above: Keys, mapping: CommentedMap, named: set[Keys]
    ) -> Iterator[Keys]:
        """Visit one mapping; the references are paths from it."""
        for key, child in mapping.items():
            below = {keys[1:] for keys in named if keys[0] == key}
            if tag_of(child).startswith("!apply:"):
                continue  # it was called when the YAML was built, and may have had its effect
            if not below and key not in self.names and not key.startswith("_"):
                yield (*above, key)
            elif () not in below and (below or not self.reading.passes_on(key)):
                yield from self._inside(document, (*above, key), child, below)

    def _inside(
        self, document: Document, keys: Keys, child: object, named: set[Keys]
    ) -> Iterator[Keys]:
        if tag_of(child).startswith(INCLUDE_TAG):
            file = document.included(keys, child)
            yield from self.walk(file, keys, file.root, named | references(file))
        elif isinstance(child, CommentedMap) and not tag_of(child):
            yield from self.walk(document, keys, child, named)


def read_by(recipe: Recipe, *modules: str) -> Reading:
    """Return what is read by a recipe, by modules that the YAML names, and by sbkit.

    What they import counts, too, unless it is installed and of another package.
    """
    readings = [vars(source_of(file).reading) for file in sources(recipe, *modules)]
    names = (each.name for each in fields(Reading))
    return Reading(
        **{name: frozenset().union(*(each[name] for each in readings)) for name in names}
    )


def sources(recipe: Recipe, *modules: str) -> set[Path]:
    """Return the files of a recipe and of modules, and those that they import."""
    parts = (recipe.prepare_splits, recipe.prepare_labels, recipe.make_loaders, recipe.brain)
    first = [*modules, *(getattr(each, "func", each).__module__ for each in parts)]  # of a partial
    packages = frozenset(name.partition(".")[0] for name in ("sbkit", "recipes", *first))
    brains = inspect.getmro(recipe.brain) if inspect.isclass(recipe.brain) else ()
    found: set[Path] = set()
    waiting = [
        SBKIT / "train/main.py",
        *_own_files([*first, *(each.__module__ for each in brains)], packages),
    ]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting.extend(_own_files(source_of(file).imported, packages))
    return found


@cache
def source_of(file: Path) -> Source:
    """Collect what one file names and imports; kept, the nodes of all would take 38 MB."""
    nodes = list(ast.walk(ast.parse(file.read_bytes())))
    return Source(_reading(nodes), _imported(nodes))


def _reading(nodes: Sequence[ast.AST]) -> Reading:
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


def _imported(nodes: Sequence[ast.AST]) -> frozenset[str]:
    """Name the modules that are imported, and what is taken of them, which may be modules."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update((node.module, *(f"{node.module}.{each.name}" for each in node.names)))
    return frozenset(names)


def _own_files(modules: Iterable[str], packages: frozenset[str]) -> Iterator[Path]:
    for name in modules:
        file = getattr(sys.modules.get(name), "__file__", None)
        is_named = name.partition(".")[0] in packages
        if file is not None and (own := _own_file(file, is_named)) is not None:
            yield own


@cache  # most modules import the same ones: without it this took a sixth of a small run
def _own_file(name: str, is_named: bool) -> Path | None:
    """Resolve the source of a module; None of compiled ones, others', and what speaks of knobs."""
    file = Path(name).resolve()
    if file.suffix != ".py" or any(folder in file.parents for folder in SPEAKING):
        return None
    is_installed = STANDARD in file.parents or not {*INSTALLED}.isdisjoint(file.parts)
    return file if is_named or not is_installed else None
