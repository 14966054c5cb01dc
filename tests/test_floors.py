"""A file imports only from its own floor and from lower ones."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = (
    "base",
    "config",
    "text",
    "audio",
    "lm",
    "distributed",
    "logs",
    "evaluate",
    "models",
    "decoding",
    "checkpoint",
    "bundle",
    "data",
    "train",
    "runtime",
    "cli",
    "tasks",
    "export",
    "serve",
    "check",
    "run",
    "commands",
    "__main__",
)
TASK_IMPORTS = {("asr", "vad")}  # no other task imports a task
TOP_LEVEL = ("sbkit", "recipes", "tools", "docs")


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def files(*names: str) -> Iterator[Path]:
    for name in names:
        yield from sorted((ROOT / name).rglob("*.py"))


MODULES = {module_name(file): ast.parse(file.read_text()) for file in files(*TOP_LEVEL)}
SBKIT = [name for name in MODULES if name.startswith("sbkit.")]


def imports(name: str) -> Iterator[str]:
    """Name the modules that a module imports, including imports inside functions."""
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield "." * node.level
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else str(node.module)


def folder(name: str) -> str:
    """Return the folder of a module; a package is its own folder."""
    is_package = (ROOT / name.replace(".", "/")).is_dir()
    return name if is_package else name.rpartition(".")[0]


def room(name: str) -> str:
    return name.split(".")[1]


def test_every_floor_is_listed() -> None:
    rooms = {room(name) for name in SBKIT}
    assert rooms == set(FLOORS), "add a new folder to FLOORS, at the lowest floor that it can have"


@pytest.mark.parametrize("name", SBKIT)
def test_file_imports_only_from_its_floor_and_below(name: str) -> None:
    own = room(name)
    for imported in imports(name):
        top = imported.partition(".")[0]
        assert top not in ("recipes", "tools", "docs", "tests", ""), f"{name} imports {imported}"
        assert imported != "sbkit", f"{name} must name the defining file, not sbkit"
        if top == "sbkit":
            other = room(imported)
            assert FLOORS.index(other) <= FLOORS.index(own), f"{name} imports {imported} from above"
            if own == other == "tasks":
                task, imported_task = (module.split(".")[2] for module in (name, imported))
                is_allowed = task == imported_task or (task, imported_task) in TASK_IMPORTS
                assert is_allowed, f"{name} imports {imported}, another task"


# A file with one of these words in its name writes or runs a format of recognizers.
RECOGNIZER_FORMATS = re.compile("recognizer|whisper|sherpa|huggingface|transformers|format_table")


@pytest.mark.parametrize("name", ["bundle", "check", "export", "run", "runtime", "train"])
def test_room_of_all_tasks_has_no_word_of_recognizers(name: str) -> None:
    """What such a word is about belongs into `sbkit/tasks/asr` or `recipes/asr`."""
    words = re.compile(r"(?i)(?<!abstra)ctc(?!\w*\.yaml)|blank|token(?!_type)|hotword|transcript")
    for file in files(f"sbkit/{name}"):
        if name in ("export", "runtime") and RECOGNIZER_FORMATS.search(file.name):
            continue
        for line in file.read_text("utf-8").splitlines():
            assert not words.search(line), f"{file}: {line}"


def test_folders_form_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    for name in MODULES:
        imported_folders = {folder(imported) for imported in imports(name) if imported in MODULES}
        graph.setdefault(folder(name), set()).update(imported_folders - {folder(name), "sbkit"})
    assert_no_circle(graph)


def test_modules_form_no_circle() -> None:
    assert_no_circle(
        {
            name: {imported for imported in imports(name) if imported in MODULES} - {"sbkit"}
            for name in MODULES
            if name != "sbkit"  # it names Brain and others only for type checkers
        }
    )


def assert_no_circle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"an import circle: {' -> '.join(error.args[1])}")


def test_what_writes_a_corpus_imports_nothing_of_training_or_serving() -> None:
    pending = [
        "sbkit.data.prepared",
        *(n for n in MODULES if n.startswith("recipes.") and n.endswith(".corpus")),
    ]
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name in MODULES and name not in seen:
            seen.add(name)
            pending += imports(name)
    assert seen >= {"sbkit.data.work_units", "sbkit.audio.decode", "recipes.OwnData.corpus"}
    assert not [name for name in seen if name.startswith(("sbkit.serve", "sbkit.train"))]
