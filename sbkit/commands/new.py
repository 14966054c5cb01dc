"""`sbkit new`: a project of your own, with the recipes as source to edit.

A project keeps the files that it was made from in `.sbkit/VERSION`, so that `--diff` can show what
a newer sbkit changed in them, whatever you have edited since.
"""

import shutil
from argparse import Namespace
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path

from sbkit.base.errors import ConfigError
from sbkit.base.versions import __version__
from sbkit.commands.cli import RECIPE_FOLDERS
from sbkit.config.document import read_document

PACKAGE = Path(__file__).parents[1]
ORIGINALS = ".sbkit"  # the folder of a project that holds its originals, by version
IGNORED = "/.venv/\n/results/\n__pycache__/\n"
README = """# {name}

Made by `sbkit new`, version {version}. The recipes and the YAMLs are yours to edit.

    sbkit check {yaml}
    python train.py {yaml}
    sbkit export RUN --out my-model
    sbkit serve my-model

RUN is the run folder that training prints. `sbkit new --diff .` shows what a newer sbkit changed in
these files.
"""


def new(options: Namespace) -> int:
    """Make a project, or show what sbkit changed since it was made; return the exit code."""
    if options.diff:
        print("".join(_diff(options.folder)), end="")
    else:
        _make(options.folder, options.recipe)
    return 0


def _make(folder: Path, recipe: str | None) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty. Name a new folder.")
    names = list(project_files(recipe))
    for target in (folder, folder / ORIGINALS / __version__):
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(project_source() / name, target / name)
    yamls = [str(name) for name in names if name.suffix == ".yaml"]
    yaml = "hparams/ctc.yaml" if "hparams/ctc.yaml" in yamls else yamls[0]
    text = README.format(name=folder.resolve().name, version=__version__, yaml=yaml)
    (folder / "README.md").write_text(text, encoding="utf-8")
    (folder / ".gitignore").write_text(IGNORED, encoding="utf-8")
    print(f"{folder}: {len(names)} files. Next: cd {folder} && python train.py {yaml}")


def project_source() -> Path:
    """Return the folder with train.py, hparams and recipes: in the wheel, or the checkout."""
    installed = PACKAGE / "project"
    return installed if installed.is_dir() else PACKAGE.parent


def project_files(recipe: str | None) -> Iterator[Path]:
    """Yield the files of a project with all recipes, or with those that one task needs."""
    source = project_source()
    yield Path("train.py")
    for file in sorted((source / "hparams").glob("*.yaml")):
        if recipe is None or read_document(file).root["recipe"].split(".")[1] == recipe:
            yield file.relative_to(source)
    for file in sorted((source / "recipes").rglob("*")):
        name = file.relative_to(source)
        is_other = name.parts[1] in RECIPE_FOLDERS and recipe not in (None, name.parts[1])
        if file.suffix == ".py" and not is_other:
            yield name


def _diff(folder: Path) -> Iterator[str]:
    """Yield a unified diff from a project's originals to the files of this sbkit."""
    versions = [path for path in (folder / ORIGINALS).glob("*") if path.is_dir()]
    if not versions:
        raise ConfigError(f"{folder} was not made by `sbkit new`: it has no {ORIGINALS}/VERSION.")
    if len(versions) > 1:
        raise ConfigError(
            f"{folder / ORIGINALS} has the files of several versions "
            f"({', '.join(sorted(path.name for path in versions))}). Keep only the version that "
            "made the project."
        )
    (originals,) = versions
    recipes = {name.name for name in (originals / "recipes").iterdir()} & {*RECIPE_FOLDERS}
    names = {file.relative_to(originals) for file in originals.rglob("*") if file.is_file()}
    names |= set(project_files(recipes.pop() if len(recipes) == 1 else None))
    for name in sorted(names):
        before, after = _lines(originals / name), _lines(project_source() / name)
        yield from unified_diff(before, after, f"{originals.name}/{name}", f"{__version__}/{name}")


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
