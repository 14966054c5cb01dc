"""No foreign name becomes an object, wherever it stands in the description of a part."""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle, islice, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sbkit.base.errors import SbkitError
from sbkit.bundle.module_spec import MAX_SPEC_DEPTH, build_from_spec
from sbkit.bundle.task import load_task
from sbkit.checkpoint.weights import limit_parameters
from sbkit.config.document import tag_of
from sbkit.config.hparams import read_spec
from sbkit.export.export import part_facts
from sbkit.train.recipe import load_recipe
from tests.attacks.hostile import watched

ROOT = Path(__file__).parents[2]
MODULE = "module_that_leaves_a_trace"
ALLOWED = "torch.nn.modules.linear.Identity"  # takes any arguments
PLACES: tuple[Callable[[Any], Any], ...] = (
    *(lambda value: [value], lambda value: {"a": value}),
    *(lambda value: {"tuple": [value]}, lambda value: {"tuple": value}),
    *(lambda value: new(value), lambda value: new([value])),
    *(lambda value: {"name": ALLOWED, "arguments": value}, lambda value: new({"a": value})),
    *(lambda value: {"name": ALLOWED, "arguments": [value]}, lambda value: {**new([]), "b": value}),
    *(lambda name: {"new": name, "arguments": []}, lambda name: {"name": name, "arguments": {}}),
    lambda value: {"name": ALLOWED, "arguments": {"a": value}},
)


def new(arguments: Any) -> dict[str, Any]:
    return {"new": ALLOWED, "arguments": arguments}


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file that is created when a foreign name is imported or called."""
    trace = f"open({str(tmp_path / 'canary')!r}, 'w').close()"
    (tmp_path / f"{MODULE}.py").write_text(
        f"from torch import nn\n{trace}\n\nclass Layer(nn.Module):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "canary"


def foreign_objects(canary: Path) -> list[dict[str, Any]]:
    """Describe calls of forbidden names, each of which would leave a trace."""
    touch, file = [f"touch {canary}"], {"file": str(canary), "mode": "w"}
    calls: dict[str, Any] = {
        **dict.fromkeys(("posix.system", "os.system", "speechbrain.core.os.system"), touch),
        **{"subprocess.getoutput": touch, "builtins.open": file, "io.open": file},
        **{"builtins.eval": [f"open({str(canary)!r}, 'w')"], "torch.save": [[], str(canary)]},
        **{"sbkit.tasks.codec.model.torch.save": [[], str(canary)], f"{MODULE}.Layer": []},
        **{"sbkit.bundle.allowed_classes.import_module": [MODULE], "pydoc.locate": [MODULE]},
        **{"importlib.import_module": [MODULE], f"recipes.{canary.parent}/{MODULE}.Layer": {}},
        **{f"{ALLOWED}.__class__": [], "torch.nn.modules.linear.Module": [], "": [], ".": []},
        **{"torch.hub.load": [], "sbkit.commands.cli.run": [["doctor"]], "functools.partial": []},
    }
    return [
        {tag: name, "arguments": arguments}
        for (name, arguments), tag in product(calls.items(), ("new", "name"))
    ]


def nested(value: Any, depth: int) -> Iterator[Any]:
    """Yield a value nested in every combination of places, up to a depth."""
    yield value
    if depth:
        for place in PLACES:
            yield from nested(place(value), depth - 1)


def real_parts() -> Iterator[dict[str, Any]]:
    """Describe the parts of each task's model, as an export does."""
    labels = SimpleNamespace(vocab_size=12, size=12)
    for name in ("ctc", "ctc_speechbrain", "vad", "codec", "tts"):
        spec = read_spec(ROOT / f"hparams/{name}.yaml", {"data_folder": "", "output_folder": ""})
        recipe = load_recipe(spec)
        brain = recipe.brain_class()
        names = (*brain.parts, *brain.optional_parts)
        names = tuple(name for name in names if tag_of(spec.tree.get(name)))
        objects = {} if recipe.task.label_file is None else {recipe.task.label_key: labels}
        yield part_facts(spec.tree, objects, load_task(recipe.task.name), names)["parts"]


def mutate(plain: Any, draw: random.Random, foreign: list[Any]) -> Any:
    """Change a random place: replace it, wrap it, or name something else."""
    if isinstance(plain, list | dict) and plain and draw.random() < 0.7:
        key = draw.choice([*plain] if isinstance(plain, dict) else range(len(plain)))
        changed: Any = plain.copy()
        changed[key] = mutate(plain[key], draw, foreign)
        return changed
    value = draw.choice(foreign)
    name = next(iter(value.values()))
    replacements = (value, value, name, draw.choice(PLACES)(plain), draw.choice(PLACES)(value))
    return draw.choice((*replacements, None, -1, 10**400, float("nan"), [], {}, "", plain))


def foreign_in_all_places(canary: Path, turns: int = 2) -> Iterator[Any]:
    """Put foreign objects into all places to a depth of three, ``turns`` of them into each."""
    foreign = cycle(foreign_objects(canary))
    for place in map(json.dumps, nested("FOREIGN", 3)):
        for value in islice(foreign, turns):
            yield json.loads(place.replace('"FOREIGN"', json.dumps(value)))


def changed_parts(canary: Path, rounds: int = 30) -> Iterator[Any]:
    """Change each part of each task's model in one to three places, ``rounds`` times."""
    draw, foreign = random.Random(0), foreign_objects(canary)
    for parts in real_parts():
        for _, plain in product(range(rounds), parts.values()):
            for _ in range(draw.randint(1, 3)):
                plain = mutate(plain, draw, foreign)
            yield plain


def test_build_refuses_foreign_objects_in_every_place(canary: Path) -> None:
    with watched(canary):
        for plain in foreign_in_all_places(canary):  # 4760 of them
            with pytest.raises(SbkitError):
                build_from_spec(plain)
            assert not canary.exists(), plain


def test_build_of_mutated_parts_runs_nothing_foreign(canary: Path) -> None:
    with watched(canary):
        for plain in changed_parts(canary):  # 930 of them
            with suppress(Exception), limit_parameters({}):  # classes refuse in their own ways
                build_from_spec(plain)
            assert not canary.exists(), plain


@pytest.mark.parametrize(
    "plain",
    [
        *(float("nan"), float("inf"), ("a",), {1}, b"", print),
        *({"tuple": {}}, {"tuple": "ab"}, {"new": ALLOWED}, {"arguments": []}),
        *({"new": ALLOWED, "arguments": value} for value in ("", None, 1, {"new": 1})),
        json.loads("[" * (MAX_SPEC_DEPTH + 1) + "]" * (MAX_SPEC_DEPTH + 1)),
    ],
    ids=lambda plain: f"{plain!r:.40}",
)
def test_build_refuses_data_outside_the_grammar(plain: Any) -> None:
    with pytest.raises(SbkitError, match="invalid specification"):
        build_from_spec({"new": ALLOWED, "arguments": [plain]})
