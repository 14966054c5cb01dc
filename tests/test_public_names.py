"""A package's public names are its modules' names; importing packages does not import torch."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.runs import ROOT

PACKAGES = {
    ".".join(file.parent.relative_to(ROOT).parts): file
    for file in sorted((ROOT / "sbkit").rglob("__init__.py"))
}


def public_names(file: Path) -> list[tuple[str, str]]:
    """Return the modules and names that an `__init__.py` imports for type checkers."""
    blocks = (node for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.If))
    imports = (node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom))
    return [(str(node.module), alias.name) for node in imports for alias in node.names]


@pytest.mark.parametrize("package", [name for name, file in PACKAGES.items() if public_names(file)])
def test_lazy_names_resolve_to_those_that_type_checkers_see(package: str) -> None:
    for module, name in public_names(PACKAGES[package]):
        assert getattr(import_module(package), name) is getattr(import_module(module), name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = import_module(package).nothing


def test_importing_packages_does_not_import_torch() -> None:
    code = f"import sys, {', '.join(PACKAGES)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
