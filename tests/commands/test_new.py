"""`sbkit new`, from a wheel: projects that train, and what a newer sbkit changed in them."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sbkit.base.errors import SbkitError
from sbkit.base.versions import __version__
from sbkit.commands.cli import run as sbkit
from tests.runs import ROOT, Workplace
from tests.test_server_install import copy_source

MAX_WHEEL_BYTES = 2e6


def test_new_writes_only_the_files_of_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "voice"
    assert sbkit(["new", str(project), "--recipe", "synthesis"]) == 0
    assert [file.name for file in (project / "hparams").iterdir()] == ["tts.yaml"]
    assert (project / "recipes/synthesis/recipe.py").exists()
    assert not (project / "recipes/asr").exists()
    assert len((project / "README.md").read_text().splitlines()) <= 12
    assert "torchrun train.py hparams/tts.yaml" in capsys.readouterr().out


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


@pytest.mark.slow(60)
@pytest.mark.ddp
def test_project_of_a_wheel_trains_and_exports_in_an_empty_folder(
    workplace: Workplace, tmp_path: Path
) -> None:
    source, target = copy_source(tmp_path / "source"), tmp_path / "installed"
    wheel = tmp_path / f"sbkit-{__version__}-py3-none-any.whl"
    for command in (
        ("wheel", "--no-deps", "-w", tmp_path, source),
        ("install", "--no-deps", "--target", target, wheel),
    ):
        subprocess.run([sys.executable, "-m", "pip", "-q", *command], check=True, cwd=tmp_path)
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    assert {"sbkit/py.typed", "sbkit/project/train.py"} <= {*zipfile.ZipFile(wheel).namelist()}
    environment = {**os.environ, "PYTHONPATH": str(target), "SBKIT_CACHE": str(workplace.cache)}

    def call(*words: object, cwd: Path) -> None:
        command = [sys.executable, "-m", *map(str, words)]
        process = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )
        assert process.returncode == 0, process.stderr
        assert str(ROOT) not in process.stdout + process.stderr

    call("sbkit", "new", "mine", cwd=tmp_path)
    options = workplace.arguments(tmp_path / "run", "--number_of_epochs=1")
    launcher = ("torch.distributed.run", "--standalone")
    call(*launcher, "train.py", *options, cwd=tmp_path / "mine")
    call("sbkit", "export", tmp_path / "run", "--out", "model", cwd=tmp_path / "mine")
    assert (tmp_path / "mine/model/model.safetensors").exists()
