"""A healthy run with one fault, and the findings that `sbkit check` must report.

The faults are in tests/check/mutations/, a list `MUTATIONS` in each file.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from recipes.asr.brain import AsrBrain
from recipes.asr.recipe import AsrRecipe
from sbkit.check.check import Check, check_run, checks_of, open_checked_run
from sbkit.check.checked_run import CheckedRun, Finding, RunSpec
from sbkit.check.cost import check_cost
from sbkit.config.document import Document, Keys, read_document
from sbkit.config.overrides import parse_command
from sbkit.train.recipe import Recipe
from sbkit.train.setup import declare_run
from tests.runs import ROOT, TINY, Workplace, one_thread

Edit = Callable[[Path], None]
CHECKS = checks_of(AsrRecipe())
WITHOUT_COST = tuple(check for check in CHECKS if check is not check_cost)  # which takes seconds


@dataclass(frozen=True)
class Expected:
    """A finding: its check, its place, and words in its text.

    at: a key of the YAML (``model.0.3``), whose line or option must be named; or the end of
    another place.
    """

    check: str
    at: str
    words: tuple[str, ...]
    stops: bool


def error(check: str, at: str, *words: str) -> Expected:
    return Expected(check, at, words, stops=True)


def note(check: str, at: str, *words: str) -> Expected:
    return Expected(check, at, words, stops=False)


def changed(**attributes: Any) -> type[AsrRecipe]:
    return type("Changed", (AsrRecipe,), attributes)


def brain(brain: type[AsrBrain]) -> type[AsrRecipe]:
    return changed(brain=brain)


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A fault, and the findings that must be reported: no more and no less.

    Attributes:
        text: replacements in the YAML; each must match exactly once.
        tiny: options of the command line that make a model small.
        options: more options of the command line.
        recipe: replaces the recipe.
        release, run: edit a copy of the release, the run folder.
        checks: those that run; by default all but the slow `check_cost`.
    """

    name: str
    expected: tuple[Expected, ...] = ()
    yaml: str = "hparams/ctc.yaml"
    text: tuple[tuple[str, str], ...] = ()
    tiny: Sequence[str] = TINY
    options: tuple[str, ...] = ()
    recipe: type[Recipe] = AsrRecipe
    release: Edit | None = None
    run: Edit | None = None
    target: str | None = None
    checks: tuple[Check, ...] = WITHOUT_COST


def mutation(name: str, *expected: Expected, **options: Any) -> Mutation:
    return Mutation(name=name, expected=expected, **options)


def findings_of(mutation: Mutation, workplace: Workplace, folder: Path) -> list[Finding]:
    yaml, run = folder / "mutated.yaml", folder / "run"
    yaml.write_text(_broken_text(mutation), encoding="utf-8")
    if mutation.release is not None:
        shutil.copytree(workplace.release, folder / "release")
        mutation.release(folder / "release")
        workplace = Workplace(folder / "release", workplace.cache)
    if mutation.run is not None:
        run.mkdir()
        mutation.run(run)
    changes: Any = {"recipe": mutation.recipe, "yaml": yaml, "target": mutation.target}
    changes["tiny"] = mutation.tiny
    with declared_run(workplace, run, *mutation.options, **changes) as declared:
        return check_run(declared, checks=mutation.checks).findings


@contextmanager
def checked_run(*arguments: Any, **options: Any) -> Iterator[CheckedRun]:
    with declared_run(*arguments, **options) as declared, open_checked_run(declared) as run:
        yield run


@contextmanager
def declared_run(
    workplace: Workplace,
    run: Path,
    *arguments: str,
    recipe: type[Recipe] | None = AsrRecipe,
    yaml: Path = ROOT / "hparams/ctc.yaml",
    tiny: Sequence[str] = TINY,
    target: str | None = None,
) -> Iterator[RunSpec]:
    """Declare a run on the release of a workplace, in one thread and with its cache."""
    command = parse_command(workplace.arguments(run, *arguments, yaml=str(yaml), tiny=tiny))
    with patch.dict(os.environ, {"SBKIT_CACHE": str(workplace.cache)}), one_thread():
        yield declare_run(*command, recipe=recipe, target=target)


def assert_found(mutation: Mutation, findings: list[Finding], yaml: Path) -> None:
    printed = "\n".join(map(str, findings)) or "nothing"
    unexpected, document = list(findings), read_document(yaml)
    for expected in mutation.expected:
        match = [finding for finding in unexpected if _is(finding, expected, document)]
        assert match, f"{expected} is not found, but:\n{printed}"
        unexpected.remove(match[0])
    assert not unexpected, "\n".join(map(str, unexpected))


def _broken_text(mutation: Mutation) -> str:
    text = (ROOT / mutation.yaml).read_text(encoding="utf-8")
    text = text.replace("base: ctc.yaml", f"base: {ROOT}/hparams/ctc.yaml")
    for before, after in mutation.text:
        assert text.count(before) == 1, f"{before!r} is {text.count(before)} times in the YAML"
        text = text.replace(before, after)
    return text


def _is(finding: Finding, expected: Expected, document: Document) -> bool:
    keys: Keys = tuple(int(key) if key.isdecimal() else key for key in expected.at.split("."))
    place = document.place(keys) if keys[0] in document.root else expected.at
    return (
        finding.check == expected.check
        and (finding.where.endswith(place) or finding.where == f"override of {expected.at}")
        and all(word in str(finding) for word in expected.words)
        and finding.stops == expected.stops
    )
