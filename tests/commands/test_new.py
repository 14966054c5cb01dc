"""`sbkit new`: the files of a project."""

from pathlib import Path

import pytest

from sbkit.commands.cli import run as sbkit


def test_new_writes_only_the_files_of_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "voice"
    assert sbkit(["new", str(project), "--recipe", "synthesis"]) == 0
    assert [file.name for file in (project / "hparams").iterdir()] == ["tts.yaml"]
    assert (project / "recipes/synthesis/recipe.py").exists()
    assert not (project / "recipes/asr").exists()
    assert not (project / "docs").exists()
    assert len((project / "README.md").read_text().splitlines()) <= 12
    assert "python train.py hparams/tts.yaml" in capsys.readouterr().out
