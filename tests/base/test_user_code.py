"""`import sbkit` changes nothing, and a run is refused once its code was edited in this process."""

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from sbkit.base import imports
from sbkit.base.errors import ConfigError
from sbkit.base.imports import import_user_modules
from sbkit.export.export import code_files
from sbkit.run.run import Run
from sbkit.train.setup import require_unedited_modules
from tests.runs import ROOT

PROCESS = """
import os, sys, warnings
def state():
    return {**os.environ}, [*sys.meta_path], [*warnings.filters], [*sys.path]
before = state()
import sbkit
assert state() == before
"""


def test_import_of_sbkit_sets_nothing_and_hooks_nothing() -> None:
    subprocess.run([sys.executable, "-c", PROCESS], cwd=ROOT, env={}, check=True)


# -- modules that were edited ----------------------------------------------------------------------

MODELS = """
import functools
from dataclasses import dataclass
from . import sizes

def twice(function):
    @functools.wraps(function)
    def call(self):
        return function(self) + function(self)
    return call

@dataclass
class Encoder:
    size: int = sizes.SIZE
    half = staticmethod(lambda x: x // 2)

    @twice
    def width(self):
        return 32

    @property
    def height(self):
        return 48

    @classmethod
    def make(cls, __secret=1):
        def inner():
            return 64
        return inner

    class Inner:
        def depth(self):
            return 96

Encoder.again = Encoder
if sizes.SIZE:
    def chosen(): ...
else:
    def chosen(): return 1
"""
SIZES = "SIZE = 32"


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave no module of a test in memory."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(imports, "_yaml_folders", [])
    yield
    for name in [name for name in sys.modules if name.startswith(("my_lab", "edited_"))]:
        del sys.modules[name]


def write(folder: Path, **sources: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)


def import_lab(folder: Path) -> None:
    sources = {"models": MODELS, "sizes": SIZES, "plots": "def show(): ..."}
    write(folder / "edited_lab", __init__="from . import models", **sources)
    sys.path.append(str(folder))
    import_module("edited_lab.plots")


def run_in(folder: Path, name: str = "edited_lab.models.Encoder") -> Run:
    """Return a run whose YAML names a class."""
    yaml = folder / "run.yaml"
    yaml.write_text(
        f"output_folder: {folder}/run\nrecipe: recipes.asr.recipe.AsrRecipe\npart: !new:{name}\n"
    )
    return Run(yaml)


EDITED = r"^edited_{} was edited after it was imported\. Restart the kernel\.$"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(("return 32", "return 33"), ("return 48", "return 49"), ("return 64", "return 65")),
        *(("return 96", "return 97"), ("x // 2", "x // 3"), ("depth(self)", "width(self)")),
        *(("@dataclass", "@dataclass("), ("\nimport", "\n\nimport")),
    ],
)
def test_run_is_refused_if_its_module_was_imported_and_then_edited(
    old: str, new: str, tmp_path: Path
) -> None:
    import_lab(tmp_path)
    write(tmp_path / "edited_lab", models=MODELS.replace(old, new))
    with pytest.raises(ConfigError, match=EDITED.format("lab.models")):
        run_in(tmp_path).train()
    with pytest.raises(ConfigError, match=EDITED.format("lab.models")):
        import_user_modules(["edited_lab.models"])


def test_constant_that_was_edited_after_a_run_is_noticed(tmp_path: Path) -> None:
    """The edit has the same length, and a bundle still gets what the module runs."""
    import_lab(tmp_path)
    require_unedited_modules(run_in(tmp_path).spec)
    write(tmp_path / "edited_lab", plots="")  # which the run does not need
    require_unedited_modules(run_in(tmp_path).spec)
    write(tmp_path / "edited_lab", sizes="SIZE = 64")
    with pytest.raises(ConfigError, match=EDITED.format("lab.sizes")):
        run_in(tmp_path).train()
    held = code_files(["edited_lab.sizes"])["edited_lab.sizes.py"]
    assert held.decode() == SIZES
    import_user_modules(["edited_lab.sizes"], {tmp_path / "bundle": {"edited_lab.sizes": held}})
    (tmp_path / "edited_lab/sizes.py").unlink()
    require_unedited_modules(run_in(tmp_path).spec)


def test_recipe_of_a_cell_is_refused_once_the_file_of_its_base_was_edited(tmp_path: Path) -> None:
    recipe = "from recipes.asr.recipe import AsrRecipe\nclass Mine(AsrRecipe): ...\n"
    write(tmp_path, edited_recipe=recipe)
    sys.path.append(str(tmp_path))
    derived = type("Derived", (import_module("edited_recipe").Mine,), {"__module__": "__main__"})
    run = Run(ROOT / "hparams/ctc.yaml", recipe=derived)
    require_unedited_modules(run.spec)
    write(tmp_path, edited_recipe=recipe + "x = 1\n")
    with pytest.raises(ConfigError, match=EDITED.format("recipe")):
        run.check()


def test_module_of_that_name_beside_another_yaml_is_refused(tmp_path: Path) -> None:
    for name, size in (("a", 32), ("b", 64)):
        write(tmp_path / name, edited_models=f"class Encoder:\n    size = {size}\n")
    first, second = (run_in(tmp_path / name, "edited_models.Encoder") for name in "ab")
    require_unedited_modules(first.spec)
    assert import_module("edited_models").Encoder.size == 32
    with pytest.raises(ConfigError, match="was imported from .*/a/.* needs .*/b/edited_models.py"):
        second.train()
    require_unedited_modules(first.spec)


def test_modules_of_a_bundle_import_one_another(tmp_path: Path) -> None:
    """They are those of a package whose own source the bundle lacks."""
    sources = {
        "my_lab.models": b"from my_lab.sizes import SIZE\nfrom . import sizes as again",
        "my_lab.sizes": b"SIZE = 32",
        "edited_models": b"import my_lab.models\nSIZE = my_lab.models.again.SIZE",
    }
    import_user_modules([*sources], {tmp_path: sources})
    assert import_module("edited_models").SIZE == 32
