"""`sbkit new`: a project of your own, with the recipes as source to edit, and notebooks."""

import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from sbkit.base.errors import ConfigError
from sbkit.base.versions import __version__
from sbkit.cli.arguments import Parser

PACKAGE = Path(__file__).parents[1]
RECIPE_FOLDERS = ("asr", "codec", "synthesis", "vad")  # in recipes/, by task
IGNORED = "/.venv/\n/results/\n__pycache__/\n"
README = """# {name}

Made by `sbkit new`, version {version}. The recipes and the YAMLs are yours to edit.

    sbkit check {yaml}
    python train.py {yaml}
    sbkit export RUN --out my-model
    sbkit serve my-model

RUN is the run folder that training prints.
"""


def add_commands(parser: Parser) -> None:
    """Add `new`."""
    add = parser.add_command("new", new, "make a project with recipes to edit")
    add("folder", metavar="FOLDER", type=Path, help="the new project")
    add("--recipe", choices=RECIPE_FOLDERS, help="copy only this recipe (default: all)")


def new(options: Namespace) -> None:
    """Make a project; raises ConfigError if its folder has files."""
    folder: Path = options.folder
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty. Name a new folder.")
    installed = PACKAGE / "project"
    source = installed if installed.is_dir() else PACKAGE.parent  # in the wheel, or the checkout
    names = list(project_files(source, options.recipe))
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, folder / name)
    yamls = [str(name) for name in names if name.suffix == ".yaml"]
    yaml = "hparams/ctc.yaml" if "hparams/ctc.yaml" in yamls else yamls[0]
    text = README.format(name=folder.resolve().name, version=__version__, yaml=yaml)
    (folder / "README.md").write_text(text, encoding="utf-8")
    (folder / ".gitignore").write_text(IGNORED, encoding="utf-8")
    print(f"{folder}: {len(names)} files. Next: cd {folder} && python train.py {yaml}")


def project_files(source: Path, recipe: str | None) -> Iterator[Path]:
    """Yield the files of a project with all recipes, or with those that one task needs."""
    from sbkit.config.document import read_document

    yield Path("train.py")
    for file in sorted((source / "hparams").glob("*.yaml")):
        if recipe is None or read_document(file).root["recipe"].split(".")[1] == recipe:
            yield file.relative_to(source)
    if recipe in (None, "asr"):
        notebooks = sorted((source / "docs/notebooks").glob("*.ipynb"))
        yield from (file.relative_to(source) for file in notebooks)
    for file in sorted((source / "recipes").rglob("*")):
        name = file.relative_to(source)
        is_other = name.parts[1] in RECIPE_FOLDERS and recipe not in (None, name.parts[1])
        if file.suffix == ".py" and not is_other:
            yield name
