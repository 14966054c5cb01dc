"""`sbkit new`: the files of a project, and what a newer sbkit changed in them."""

from pathlib import Path

import pytest

from sbkit.base.errors import SbkitError
from sbkit.base.versions import __version__
from sbkit.commands.cli import run as sbkit


def test_new_writes_only_the_files_of_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "voice"
    assert sbkit(["new", str(project), "--recipe", "synthesis"]) == 0
    assert [file.name for file in (project / "hparams").iterdir()] == ["tts.yaml"]
    assert (project / "recipes/synthesis/recipe.py").exists()
    assert not (project / "recipes/asr").exists()
    assert len((project / "README.md").read_text().splitlines()) <= 12
    assert "python train.py hparams/tts.yaml" in capsys.readouterr().out


def test_new_diff_shows_upstream_changes_but_not_edits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sbkit(["new", str(tmp_path / "mine")]) == 0
    (tmp_path / "mine/train.py").write_text("edited\n")
    capsys.readouterr()
    assert sbkit(["new", "--diff", str(tmp_path / "mine")]) == 0
    assert capsys.readouterr().out == ""
    original = tmp_path / "mine/.sbkit" / __version__ / "hparams/ctc.yaml"
    original.write_text(original.read_text().replace("d_model:", "width:", 1))
    assert sbkit(["new", "--diff", str(tmp_path / "mine")]) == 0
    changes = [line for line in capsys.readouterr().out.splitlines() if line[:1] in "+-"]
    assert len(changes) == 4 and changes[2].startswith("-width:")


@pytest.mark.parametrize(
    ("versions", "says"),
    [([], "was not made by"), (["0.1", "0.2"], r"several versions \(0.1, 0.2\)")],
)
def test_new_diff_needs_one_version(tmp_path: Path, versions: list[str], says: str) -> None:
    for version in versions:
        (tmp_path / ".sbkit" / version).mkdir(parents=True)
    with pytest.raises(SbkitError, match=says):
        sbkit(["new", "--diff", str(tmp_path)])
