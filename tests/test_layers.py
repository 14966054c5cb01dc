"""The house stands: imports go down, by the file that defines the name, and functions fit a screen.

A function's length is its lines from `def` to its end, without its decorators and docstring.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = (
    "base",
    "config",
    "text",
    "lm",
    "audio",
    "distributed",
    "logs",
    "evaluate",
    "models",
    "decoding",
    "tasks",
    "checkpoint",
    "data",
    "train",
    "inference",
    "live",
    "serve",
    "check",
    "main",
    "cli",
    "__main__",
)
LONGEST = 45  # lines
TOP_LEVEL = ("sbkit", "recipes", "tools")


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def files(*names: str) -> Iterator[Path]:
    for name in names:
        yield from sorted((ROOT / name).rglob("*.py"))


MODULES = {module_name(file): ast.parse(file.read_text()) for file in files(*TOP_LEVEL)}
SBKIT = [name for name in MODULES if name.startswith("sbkit.")]


def imports(name: str) -> Iterator[str]:
    """Name the modules that a module imports, also inside functions."""
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield "." * node.level
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else str(node.module)


def layer(name: str) -> int:
    """Return the place of a module; `train/main.py` starts what lies above the rest of `train`."""
    return LAYERS.index("main" if name == "sbkit.commands.train" else name.split(".")[1])


def test_the_tree_is_there() -> None:
    assert {name.split(".")[1] for name in SBKIT} <= set(LAYERS)
    assert len(SBKIT) > 20


@pytest.mark.parametrize("name", SBKIT)
def test_a_file_imports_only_from_below(name: str) -> None:
    for imported in imports(name):
        top = imported.split(".")[0]
        assert top not in ("recipes", "tools", "tests", ""), f"{name} imports {imported}"
        assert imported != "sbkit", f"{name} must name the defining file, not sbkit"
        if top == "sbkit":
            assert layer(imported) <= layer(name), f"{name} imports {imported} from above"


def test_a_name_is_imported_from_the_file_that_defines_it() -> None:
    for name in MODULES:
        for imported in imports(name):
            is_package = (ROOT / imported.replace(".", "/") / "__init__.py").is_file()
            assert not (imported.startswith("sbkit.") and is_package), f"{name}: {imported}"


def test_no_module_needs_itself() -> None:
    graph = {
        name: {each for each in imports(name) if each in MODULES and each != "sbkit"}
        for name in MODULES
        if name != "sbkit"  # lazy: it names sbkit.Brain for type checkers
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"an import cycle: {' -> '.join(error.args[1])}")


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    lines = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        lines -= (function.body[0].end_lineno or 0) - function.body[0].lineno + 1
    return lines


def test_functions_fit_a_screen() -> None:
    sources = [*files(*TOP_LEVEL), *ROOT.glob("train.py")]
    long = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}: {length(node)} lines"
        for file in sources
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and length(node) > LONGEST
    ]
    assert not long, "\n".join(long)
