"""`sbkit new`: a project of your own, with the recipes as code to edit, and notebooks."""

import shutil
from argparse import Namespace
from pathlib import Path

from sbkit.base.errors import ConfigError
from sbkit.base.imports import COPIED_FROM
from sbkit.base.libraries import PROJECT
from sbkit.base.versions import library_version
from sbkit.cli.arguments import Parser

PROJECT_FILES = ("train.py", "hparams/*.yaml", "docs/notebooks/*.ipynb", "recipes/**/*.py")
FIRST_YAML = "hparams/ctc.yaml"
GITIGNORE = "/.venv/\n/results/\n__pycache__/\n"
RECIPES = '"""Recipes of sbkit, copied by `sbkit new`."""\n\n{name} = "{version}"\n'
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


def new(options: Namespace) -> None:
    """Make a project in a new folder."""
    folder: Path = options.folder
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty. Name a new folder.")
    files = [file for pattern in PROJECT_FILES for file in sorted(PROJECT.glob(pattern))]
    names = [file.relative_to(PROJECT) for file in files]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PROJECT / name, folder / name)
    version = library_version()
    texts = {
        "README.md": README.format(name=folder.resolve().name, version=version, yaml=FIRST_YAML),
        "recipes/__init__.py": RECIPES.format(name=COPIED_FROM, version=version),
        ".gitignore": GITIGNORE,
    }
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    print(f"{folder}: {len(names)} files. Next: cd {folder} && python train.py {FIRST_YAML}")
