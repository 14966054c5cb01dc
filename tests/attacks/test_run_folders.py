"""A run folder is data: none of its modules runs unless `--import` names it."""

import py_compile
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sbkit.base import imports
from sbkit.base.errors import SbkitError
from sbkit.checkpoint.run_config import read_run_knobs
from sbkit.commands.cli import run
from sbkit.run.run import Run
from sbkit.runtime.test_sets import prepare_test_sets
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


@pytest.fixture(scope="module")
def original(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "run"
    return make_run(folder, data_folder=str(workplace.release))


@pytest.fixture
def folder(
    original: Path, workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Yield a copy of a run; leave no module of it in memory."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    yield Path(shutil.copytree(original, tmp_path / "run"))
    for name in [name for name in sys.modules if name.startswith("evil")]:
        del sys.modules[name]
    imports._yaml_folders.clear()


def name_in_yaml(folder: Path, key: str, module: str) -> None:
    yaml = folder / "hyperparams.yaml"
    yaml.write_text(re.sub(rf"(?m)^{key}:.*$", f"{key}: {module}", yaml.read_text()))


def write_file(folder: Path) -> None:
    (folder / "evil.py").write_text(EVIL)


def write_package(folder: Path) -> None:
    (folder / "evil").mkdir()
    (folder / "evil/__init__.py").write_text(EVIL)


def write_compiled(folder: Path) -> None:
    (folder / "other.py").write_text(EVIL)
    py_compile.compile(str(folder / "other.py"), str(folder / "evil.pyc"))


def link_file(folder: Path) -> None:
    (folder.parent / "evil-elsewhere.py").write_text(EVIL)
    (folder / "evil.py").symlink_to(folder.parent / "evil-elsewhere.py")


def link_package(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    (folder.parent / "elsewhere/__init__.py").write_text(EVIL)
    (folder / "evil").symlink_to(folder.parent / "elsewhere")


def search_file(folder: Path) -> None:
    """Put the run folder on the path, by a link."""
    write_file(folder)
    (folder.parent / "link").symlink_to(folder)
    sys.path.insert(0, str(folder.parent / "link"))


@pytest.mark.parametrize("key", NAMES)
@pytest.mark.parametrize(
    "write", [write_file, write_package, write_compiled, link_file, link_package, search_file]
)
def test_module_in_a_run_folder_is_not_imported(
    folder: Path, write: Callable[[Path], None], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder)
    name_in_yaml(folder, key, NAMES[key])
    monkeypatch.chdir(folder)
    with pytest.raises(SbkitError, match="evil lies in .* If you trust it, pass --import evil"):
        prepare_test_sets(folder)
    assert "evil" not in sys.modules and not [*folder.parent.rglob("*.ran")]


@pytest.mark.parametrize("key", NAMES)
def test_score_runs_a_module_of_a_run_folder_only_if_it_is_named(
    folder: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_file(folder)
    name_in_yaml(folder, key, NAMES[key])
    with pytest.raises(SbkitError, match="pass --import evil"):
        run(["score", str(folder)])
    with pytest.raises(SbkitError, match="pass --import evil"):
        Run.open(folder).tune()
    assert not (folder / "evil.ran").exists() and str(folder) not in sys.path
    run(["score", str(folder), "--import", "evil"])
    assert capsys.readouterr().out.startswith("test: CER")


def test_module_beside_the_yaml_of_a_run_is_imported_from_there(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was started in another folder, where its recipe lies."""
    write_file(tmp_path)
    name_in_yaml(folder, "recipe", "evil.Asr")
    monkeypatch.chdir(tmp_path)
    assert [*prepare_test_sets(folder)] == ["test"]


def test_reading_the_yaml_of_a_run_imports_no_recipe(folder: Path) -> None:
    """Without the key `output_folder`, the recipe was asked whether it has this key."""
    write_file(folder)
    yaml = folder / "hyperparams.yaml"
    yaml.write_text(yaml.read_text().replace("<output_folder>", str(folder)))
    yaml.write_text(re.sub(r"(?m)^output_folder:.*\n", "", yaml.read_text()))
    name_in_yaml(folder, "recipe", "evil.Asr")
    with pytest.raises(SbkitError):
        read_run_knobs(folder)
    with pytest.raises(SbkitError):
        Run.open(folder)
    assert "evil" not in sys.modules
