"""A run folder is data: none of its modules runs unless `--import` names it."""

import json
import py_compile
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbkit.base import imports
from sbkit.base.checksums import write_checksums
from sbkit.base.errors import SbkitError
from sbkit.checkpoint.run_config import read_run_settings
from sbkit.commands.cli import run
from sbkit.export.export import export_run
from sbkit.run.run import Run
from tests.runs import Workplace
from tests.runtime.bundles import make_run

# The file is a recipe and a corpus; it leaves a mark if it runs.
EVIL = """
from pathlib import Path
from recipes.CommonVoice.corpus import *
from recipes.asr.recipe import Asr
Path(__file__.partition("evil")[0], "evil.ran").touch()
"""
NAMES = {"recipe": "evil.Asr", "corpus": "evil"}


@pytest.fixture
def folder(workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder of a run; leave no module of it in memory."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    yield make_run(tmp_path / "run", data_folder=str(workplace.release))
    sys.modules.pop("evil", None)
    imports._yaml_folders.clear()


def score(folder: Path, *options: str) -> None:
    run(["score", str(folder), *options])


def name_in_yaml(folder: Path, key: str) -> None:
    yaml = folder / "hyperparams.yaml"
    yaml.write_text(re.sub(rf"(?m)^{key}:.*$", f"{key}: {NAMES[key]}", yaml.read_text()))


@pytest.mark.parametrize("key", NAMES)
@pytest.mark.parametrize("name", ["evil.py", "evil/__init__.py", "evil.pyc"])
@pytest.mark.parametrize("is_linked", [False, True])
def test_module_in_a_run_folder_is_not_imported(
    folder: Path, name: str, key: str, is_linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found in the working folder, or by a link to the run folder, where links lie."""
    home = folder.parent / "elsewhere" if is_linked else folder
    (folder.parent / "source.py").write_text(EVIL)
    (home / name).parent.mkdir(parents=True, exist_ok=True)
    copy = py_compile.compile if name.endswith(".pyc") else shutil.copy
    copy(str(folder.parent / "source.py"), str(home / name))
    monkeypatch.chdir(folder)
    if is_linked:
        top = Path(name).parts[0]
        Path(top).symlink_to(home / top)
        (folder.parent / "link").symlink_to(folder)
        monkeypatch.syspath_prepend(folder.parent / "link")
    name_in_yaml(folder, key)
    with pytest.raises(SbkitError, match="names the module evil. If you trust it, pass --import"):
        score(folder)
    assert "evil" not in sys.modules and not [*folder.parent.rglob("*.ran")]


@pytest.mark.parametrize("key", NAMES)
def test_score_runs_a_module_of_a_run_folder_only_if_it_is_named(
    folder: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "evil.py").write_text(EVIL)
    name_in_yaml(folder, key)
    with pytest.raises(SbkitError, match="pass --import evil"):
        score(folder)
    with pytest.raises(SbkitError, match="pass --import evil"):
        Run.open(folder).tune()
    assert not (folder / "evil.ran").exists() and str(folder) not in sys.path
    score(folder, "--import", "evil")
    assert capsys.readouterr().out.startswith("test: CER")


def test_export_of_a_run_runs_no_module_of_its_bundle(folder: Path) -> None:
    export_run(folder, folder / "bundle")
    config = folder / "bundle/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "user_modules": ["evil"]}))
    (folder / "bundle/evil.py").write_text(EVIL)
    write_checksums(folder / "bundle")
    Run.open(folder).export(folder.parent / "out")
    assert "evil" not in sys.modules


def test_module_of_a_run_is_imported_from_elsewhere_if_it_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was started in another folder, where its recipe lies."""
    (tmp_path / "evil.py").write_text(EVIL)
    name_in_yaml(folder, "recipe")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SbkitError, match="names the module evil"):
        score(folder)
    score(folder, "--import", "evil")


def test_reading_the_yaml_of_a_run_imports_no_recipe(folder: Path) -> None:
    """Without the key `output_folder`, the recipe was asked whether it has this key."""
    (folder / "evil.py").write_text(EVIL)
    yaml = folder / "hyperparams.yaml"
    yaml.write_text(yaml.read_text().replace("<output_folder>", str(folder)))
    yaml.write_text(re.sub(r"(?m)^output_folder:.*\n", "", yaml.read_text()))
    name_in_yaml(folder, "recipe")
    with pytest.raises(SbkitError):
        read_run_settings(folder)
    with pytest.raises(SbkitError):
        Run.open(folder)
    assert "evil" not in sys.modules
