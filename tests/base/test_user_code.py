"""Code that changed is noticed: a run takes what lies in the files, or is refused."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from sbkit.base import imports
from sbkit.base.errors import ConfigError
from sbkit.base.imports import import_user_modules
from sbkit.config.hparams import load_hparams
from sbkit.export.export import source_files
from sbkit.train.setup import read_values

ENCODER = "class Encoder:\n    size = {}\n"


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave no module of a test in memory."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in [name for name in sys.modules if name.startswith(("my_", "edited_"))]:
        del sys.modules[name]
    imports._yaml_folders.clear()


def write(folder: Path, **sources: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)


def build(folder: Path, name: str = "edited_models.Encoder") -> Any:
    """Return the object that the YAML of a new run in a folder declares."""
    (folder / "run.yaml").write_text(f"output_folder: results\npart: !new:{name}\n")
    values = read_values(folder / "run.yaml", {})
    return load_hparams(values.yaml_file, values.overrides)["part"]


@pytest.mark.parametrize("writes_bytecode", [True, False])
def test_edited_module_takes_effect_in_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes_bytecode: bool
) -> None:
    """The edit has the same length and second, so that Python takes a compiled file for it."""
    monkeypatch.setattr(sys, "dont_write_bytecode", not writes_bytecode)
    write(tmp_path, edited_models=ENCODER.format(32))
    first = build(tmp_path)
    assert type(build(tmp_path)) is type(first)  # nothing has changed
    write(tmp_path, edited_models=ENCODER.format(64))
    second = build(tmp_path)
    assert (first.size, second.size) == (32, 64)
    write(tmp_path, edited_models=ENCODER.format(96))
    held = source_files(["edited_models"])["edited_models.py"]
    assert b"size = 64" in held  # which made `second`
    import_user_modules(["edited_models"], {tmp_path / "bundle": {"edited_models": held}})
    assert import_module("edited_models").Encoder is type(second)
    (tmp_path / "edited_models.py").unlink()
    assert build(tmp_path).size == 64


def test_edited_part_of_a_package_takes_effect(tmp_path: Path) -> None:
    for size in (32, 64):
        models = "from .sizes import SIZE\n" + ENCODER.format("SIZE")
        write(tmp_path / "my_lab", __init__="from . import models", models=models)
        write(tmp_path / "my_lab", sizes=f"SIZE = {size}")
        assert build(tmp_path, "my_lab.models.Encoder").size == size
    assert {*imports.user_sources("my_lab.models")} == {"my_lab.models", "my_lab.sizes"}


def test_yaml_of_another_folder_has_its_own_module(tmp_path: Path) -> None:
    for name, size in (("a", 32), ("b", 64), ("a", 32)):
        write(tmp_path / name, edited_models=ENCODER.format(size))
        assert build(tmp_path / name).size == size


def test_edited_module_of_the_users_cell_is_refused(tmp_path: Path) -> None:
    models = "import edited_sizes\n" + ENCODER.format(32)
    write(tmp_path, edited_sizes="SIZE = 32", edited_models=models, edited_plots="x = 1")
    sys.path.append(str(tmp_path))
    encoder = import_module("edited_models").Encoder
    import_module("edited_plots")
    write(tmp_path, edited_plots="x = 2")
    assert type(build(tmp_path)) is encoder  # needs no edited_plots
    write(tmp_path, edited_sizes="SIZE = 64")
    with pytest.raises(ConfigError, match=r"^edited_sizes.py has changed .* Restart the kernel.$"):
        build(tmp_path)
    with pytest.raises(ConfigError, match="Restart the kernel"):
        import_user_modules(["edited_models"])


def test_recipe_that_a_cell_gives_is_refused_once_its_file_has_changed(tmp_path: Path) -> None:
    recipe = "from sbkit.train.recipe import Recipe\nclass Mine(Recipe): ...\n"
    write(tmp_path, edited_recipe=recipe)
    (tmp_path / "run.yaml").write_text("output_folder: results\nrecipe: edited_recipe.Mine\n")
    mine = read_values(tmp_path / "run.yaml", {}).load_recipe()
    derived = type("Derived", (type(mine),), {})
    write(tmp_path, edited_recipe=recipe + "x = 1\n")
    with pytest.raises(ConfigError, match=r"^edited_recipe.py has changed"):
        read_values(tmp_path / "run.yaml", {}, recipe=derived)
