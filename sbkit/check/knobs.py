"""Knobs that the run would refuse, and keys that no reference and no code reads.

Code is what defines the recipe and the corpus, and sbkit: a key counts as read where its name
stands there in quotes, but not as a key of a table, or as an attribute of the hparams. sbkit's
checks and its config name keys without using them, and do not count.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from speechbrain.utils.run_opts import RunOptions

from sbkit.check.dry_run import UNUSED_CHECK
from sbkit.check.finding import Finding, words_of
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.config.document import Document, did_you_mean, referenced, tag_of, walk
from sbkit.config.hparams import resolve
from sbkit.config.ranges import RANGES, out_of_range
from sbkit.train.recipe import Recipe

SBKIT = Path(__file__).parents[1]
NAMING = (SBKIT / "check", SBKIT / "config", SBKIT / "serve")  # they name, and read no knob
NAME = re.compile(r"""["'](\w+)["'](?!:)|\b(?:hparams|knobs|modules)\.(\w+)""")


def check_ranges(planned: PlannedRun) -> Iterator[Finding]:
    """Find each knob, and each argument of a class that declares its ranges, out of its range."""
    ranges = dict(RANGES)
    with suppress(MissingPartError):
        ranges |= planned.load_recipe().ranges
    reported: set[str | int] = set()
    for name, sentence in out_of_range(planned.knobs, ranges):
        reported.add(name)
        yield planned.finding("ranges", name, **words_of(sentence))
    resolved = resolve(planned.yaml_file, planned.overrides)
    for keys, sentence in resolved.arguments_out_of_range():
        if keys[0] not in reported:
            yield planned.finding("ranges", *keys, **words_of(sentence))


def check_unread(planned: PlannedRun) -> Iterator[Finding]:
    """Find the keys that nothing reads; those of a base count only where they are given."""
    names = names_read_by(planned.load_recipe(), str(planned.knobs.get("corpus")))
    known = {*RunOptions().as_dict(), *names} - set(planned.document.root)
    declared = {*planned.document.own, *planned.given}
    for key in filter(declared.__contains__, unread(planned.document, names)):
        yield planned.finding(
            UNUSED_CHECK,
            key,
            declared=f"`{key}` must be read by something",
            effect="no reference, no code of the recipe and no option reads it: it does nothing",
            fix=f"Correct its name, or take it out.{did_you_mean(key, known)}",
        )


def unread(document: Document, names: frozenset[str]) -> Iterator[str]:
    """Yield the keys that no reference reaches, no code names, and no option of SpeechBrain is.

    What an object is made of is read by it: it would have refused the rest.
    """
    reached = {str(keys[0]) for _, node in walk(document.root) for keys in referenced(node)}
    read = reached | names | set(RunOptions().as_dict())
    for key, node in document.root.items():
        was_called = tag_of(node).startswith("!apply:")  # and may have had its effect
        if not (key in read or key.startswith("_") or was_called):
            yield key


def names_read_by(recipe: Recipe, corpus: str = "") -> frozenset[str]:
    """Return what the code of a recipe, of a corpus and of sbkit may read."""
    parts = (recipe.prepare_splits, recipe.prepare_labels, recipe.make_loaders, recipe.brain)
    modules = {corpus, *(getattr(each, "func", each).__module__ for each in parts)}  # of a partial
    if inspect.isclass(recipe.brain):
        modules |= {each.__module__ for each in inspect.getmro(recipe.brain)}
    files = (_files_beside(name) for name in {"sbkit", *modules} if name in sys.modules)
    found = (_names_in(file) for file in {each for several in files for each in several})
    return frozenset().union(*found)


def _files_beside(module: str) -> Iterable[Path]:
    """Return the files of a module's package, or of its folder if it is in none."""
    package, is_inside, _ = module.partition(".")
    file = getattr(sys.modules[package], "__file__", None)
    if package in ("torch", "speechbrain") or package in sys.stdlib_module_names:
        return ()
    if file is None:  # a folder without __init__.py
        folders = [Path(each) for each in sys.modules[package].__path__]
        return [each for folder in folders for each in folder.rglob("*.py")]
    return Path(file).parent.glob("**/*.py" if is_inside or package == "sbkit" else "*.py")


@cache
def _names_in(file: Path) -> frozenset[str]:
    """Collect the names in quotes in a file, and the attributes that it takes of the hparams."""
    if any(folder in file.parents for folder in NAMING):
        return frozenset()
    found = NAME.findall(file.read_text(encoding="utf-8"))
    return frozenset(name for names in found for name in names if name)
