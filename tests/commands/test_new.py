"""Commands outside of a project, or in one whose recipes are of another version of sbkit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sbkit.commands.cli import run as sbkit
from tests.runs import ROOT


@pytest.mark.slow(20)
def test_missing_or_unfit_recipes_are_named_with_the_cure(tmp_path: Path) -> None:
    """sbkit is installed elsewhere, without the `recipes` of a checkout."""
    installed, project, empty = (tmp_path / name for name in ("installed", "project", "empty"))
    for folder in (installed, empty):
        folder.mkdir()
    (installed / "sbkit").symlink_to(ROOT / "sbkit")
    assert sbkit(["new", str(project)]) == 0

    def errors(*words: str, cwd: Path) -> str:
        command = [sys.executable, "-m", "sbkit", *words]
        environment = {**os.environ, "PYTHONPATH": str(installed)}
        process = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )
        assert process.returncode and "Traceback" not in process.stderr, process.stderr
        return process.stdout + process.stderr

    yaml = str(project / "hparams/ctc.yaml")
    for words in (["check", yaml], ["prepare", yaml], ["train", yaml]):
        assert "`sbkit new FOLDER`" in errors(*words, cwd=empty), words
    version = project / "recipes/__init__.py"
    recipe = project / "recipes/asr/recipe.py"
    recipe.write_text(recipe.read_text().replace("import", "from sbkit import gone\nimport", 1))
    assert "copied from sbkit" not in errors("check", yaml, cwd=project)
    version.write_text('COPIED_FROM = "0.0.9"\n')
    assert "It was copied from sbkit 0.0.9, and this is sbkit 0.1.0" in errors(
        "check", yaml, cwd=project
    )
