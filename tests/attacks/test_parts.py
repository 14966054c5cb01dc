"""Whatever stands wherever in the description of a part, no foreign name becomes an object."""

import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.comparison import limit_parameters
from sbkit.config.document import read_document
from sbkit.config.hparams import save_resolved
from sbkit.inference.bundle.export import plain_parts
from sbkit.inference.bundle.module_spec import MAX_DEPTH, build
from sbkit.tasks.task import load_task
from tests.attacks.hostile import watched

ROOT = Path(__file__).parents[2]
MODULE = "module_that_leaves_a_trace"
ALLOWED = "torch.nn.modules.linear.Identity"  # takes any arguments
PLACES: tuple[Callable[[Any], Any], ...] = (
    lambda value: [value],
    lambda value: {"a": value},
    lambda value: {"tuple": [value]},
    lambda value: {"tuple": value},
    *(
        lambda value, kind=kind, place=place: {kind: ALLOWED, "arguments": place(value)}
        for kind, place in product(
            ("new", "name"), (lambda v: v, lambda v: [v], lambda v: {"a": v})
        )
    ),
    lambda value: {"new": value, "arguments": []},
    lambda value: {"name": value, "arguments": {}},
    lambda value: {"new": ALLOWED, "arguments": [], "more": value},
)
TASKS = {
    "ctc": "sbkit.tasks.speech_recognition.SPEECH_RECOGNITION",
    "ctc_speechbrain": "sbkit.tasks.speech_recognition.SPEECH_RECOGNITION",
    "language_id": "sbkit.tasks.utterance_classification.UTTERANCE_CLASSIFICATION",
    "vad": "sbkit.tasks.voice_activity.VOICE_ACTIVITY",
    "codec": "recipes.codec.task.CODEC",
    "tts": "recipes.synthesis.task.SYNTHESIS",
}


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Name a file that exists once a foreign name was imported or called."""
    trace = f"open({str(tmp_path / 'canary')!r}, 'w').close()"
    (tmp_path / f"{MODULE}.py").write_text(
        f"from torch import nn\n{trace}\n\nclass Layer(nn.Module):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "canary"


def foreign_objects(canary: Path) -> list[dict[str, Any]]:
    """Describe calls that would each leave a trace, of names that no bundle may have."""
    touch, file = [f"touch {canary}"], {"file": str(canary), "mode": "w"}
    calls: dict[str, Any] = {
        **dict.fromkeys(("posix.system", "os.system", "speechbrain.core.os.system"), touch),
        **{"subprocess.getoutput": touch, "builtins.open": file, "io.open": file},
        **{"builtins.eval": [f"open({str(canary)!r}, 'w')"], "torch.save": [[], str(canary)]},
        **{"recipes.codec.parts.torch.save": [[], str(canary)], f"{MODULE}.Layer": []},
        **{"importlib.import_module": [MODULE], "sbkit.config.allowed.import_module": [MODULE]},
        **{"pydoc.locate": [MODULE], f"recipes.{canary.parent}/{MODULE}.Layer": {}},
        **{f"{ALLOWED}.__class__": [], "torch.nn.modules.linear.Module": [], "": [], ".": []},
    }
    return [
        {kind: name, "arguments": arguments}
        for (name, arguments), kind in product(calls.items(), ("new", "name"))
    ]


def nested(value: Any, depth: int) -> Iterator[Any]:
    """Put a value into every place, and that into every place, up to a depth."""
    yield value
    if depth:
        for place in PLACES:
            yield from nested(place(value), depth - 1)


def try_grammar(canary: Path, depth: int, *, whole: bool = False) -> int:
    """Try to build foreign objects in all places; every one takes turns, or is in each if whole."""
    foreign, turns = foreign_objects(canary), cycle(foreign_objects(canary))
    count = 0
    for position in nested("FOREIGN", depth):
        for value in foreign if whole else [next(turns), next(turns)]:
            plain = json.loads(json.dumps(position).replace('"FOREIGN"', json.dumps(value)))
            with pytest.raises(SbkitError):
                build(plain)
            assert not canary.exists(), plain
            count += 1
    return count


def real_parts(folder: Path) -> Iterator[dict[str, Any]]:
    """Describe the parts of a model of each task, as an export does."""
    labels = SimpleNamespace(vocab_size=12, size=12)
    for name, path in TASKS.items():
        task, knobs = load_task(path), {"data_folder": "", "output_folder": ""}
        save_resolved(folder / "resolved.yaml", ROOT / f"hparams/{name}.yaml", knobs)
        root = read_document(folder / "resolved.yaml").root
        objects = {} if task.labels is None else {task.labels.key: labels}
        yield plain_parts(root, objects, task)["parts"]


def mutate(plain: Any, draw: random.Random, foreign: list[Any]) -> Any:
    """Change a random place: put something else there, put it elsewhere, or name another."""
    if isinstance(plain, list | dict) and plain and draw.random() < 0.7:
        key = draw.choice([*plain] if isinstance(plain, dict) else range(len(plain)))
        changed: Any = plain.copy()
        changed[key] = mutate(plain[key], draw, foreign)
        return changed
    value = draw.choice(foreign)
    name = next(iter(value.values()))
    others = (value, value, name, draw.choice(PLACES)(plain), draw.choice(PLACES)(value))
    return draw.choice((*others, None, -1, 10**400, float("nan"), [], {}, "", plain))


def try_mutations(canary: Path, rounds: int) -> int:
    """Try to build mutations of real parts; those that are harmless may be built."""
    draw, foreign, count = random.Random(0), foreign_objects(canary), 0
    for parts in real_parts(canary.parent):
        for _, plain in product(range(rounds), parts.values()):
            changed = plain
            for _ in range(draw.randint(1, 3)):
                changed = mutate(changed, draw, foreign)
            # Classes refuse arguments in their own ways; 10**400 layers are refused as a bundle's.
            with suppress(Exception), limit_parameters({}):
                build(changed)
            assert not canary.exists(), changed
            count += 1
    return count


def test_no_foreign_name_is_imported_or_called(canary: Path) -> None:
    with watched(canary):
        count = try_grammar(canary, depth=3) + try_mutations(canary, rounds=30)
    assert MODULE not in sys.modules
    print(f"{count} hostile configurations were tried")


@pytest.mark.parametrize(
    "plain",
    [
        *(float("nan"), float("inf"), ("a",), {1}, b"", object()),
        *({"tuple": {}}, {"tuple": "ab"}, {"new": ALLOWED}, {"arguments": []}),
        *({"new": ALLOWED, "arguments": value} for value in ("", None, 1, {"new": 1})),
        json.loads("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)),
    ],
    ids=lambda plain: f"{plain!r:.40}",
)
def test_what_is_outside_of_the_grammar_is_refused(plain: Any) -> None:
    with pytest.raises(SbkitError, match="grammar"):
        build({"new": ALLOWED, "arguments": [plain]})
