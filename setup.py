"""Put the project that `sbkit new` copies into the wheel; all else is declared in setup.cfg."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PROJECT = ("train.py", "hparams", "recipes", "docs/notebooks")


class BuildWithProject(build_py):
    """Copy the recipes beside the package, as data: a top-level `recipes` would be everyone's."""

    def run(self) -> None:
        """Build the package, then add the project."""
        super().run()
        if self.editable_mode:  # a checkout has them at its root
            return
        target = Path(self.build_lib, "sbkit/project")
        ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "*.png")
        for name in PROJECT:
            if Path(name).is_dir():
                shutil.copytree(name, target / name, ignore=ignored, dirs_exist_ok=True)
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy(name, target)


setup(cmdclass={"build_py": BuildWithProject})
