"""The modules of the user's that a bundle names: their source goes with it, and so do versions."""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path


def source_files(user_modules: Iterable[str]) -> dict[str, bytes]:
    """Return the source of modules by the name of its file in a bundle, as `--import` reads it.

    That of an installed package is not copied, nor are compiled modules.
    """
    installed, found = packages_distributions(), dict[str, bytes]()
    for name in sorted(user_modules):
        file = Path(getattr(sys.modules[name], "__file__", None) or "")
        if name.partition(".")[0] not in installed and file.suffix == ".py":
            found[f"{name}.py"] = file.read_bytes()
    return found


def describe_recipes(sources: Mapping[str, bytes]) -> Iterator[str]:
    """Yield a note for each file that imports recipes, which an installed sbkit does not have."""
    for file, source in sources.items():
        names = sorted({name for name in _imported(source) if name.partition(".")[0] == "recipes"})
        if names:
            yield (
                f"note: {file} imports {', '.join(names)}, so that the bundle loads in a checkout "
                "of sbkit only, not where it is installed."
            )


def distributions(user_modules: Iterable[str], sources: Mapping[str, bytes]) -> list[str]:
    """Return the installed packages that modules are from, or whose source imports them."""
    known = packages_distributions()
    names = {*user_modules, *(name for source in sources.values() for name in _imported(source))}
    tops = {name.partition(".")[0] for name in names}
    return sorted({each for top in tops for each in known.get(top, ())})


def _imported(source: bytes) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
