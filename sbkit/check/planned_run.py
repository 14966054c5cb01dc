"""What is checked: a run in a scratch folder, each of its parts made once, or failed once.

A part that cannot be made is a fault, reported once; the checks that need it are left out.
"""

import shutil
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from torch import nn

from sbkit.base.errors import SbkitError
from sbkit.check.finding import Finding
from sbkit.checkpoint.rng import preserve_rng
from sbkit.config.document import dotted, read_document
from sbkit.config.hparams import read_knobs
from sbkit.data.batch import Loaders
from sbkit.distributed.device import count_here, count_on, resolve
from sbkit.logs.log import quiet
from sbkit.train.brain import Brain
from sbkit.train.recipe import Recipe
from sbkit.train.run import Run

Value = TypeVar("Value")

PARTS = ("recipe", "placement", "splits", "labels", "hparams", "model", "loaders", "brain")
ON_CPU = resolve("cpu", "fp32")
STAND_IN = {"device": ON_CPU.device, "precision": "fp32", "eval_precision": "fp32"}


class MissingPartError(Exception):
    """A part that a check asked for and that cannot be made; its fault is reported elsewhere."""


class PlannedRun(Run):
    """A run that leaves no trace in its folder, which is ``run_folder``.

    Each of `PARTS` raises MissingPartError where it cannot be made, and its error is in `faults`.
    Raises SbkitError when the YAML cannot be read at all.
    """

    def __init__(
        self,
        yaml_file: Path,
        overrides: Mapping[str, object],
        *,
        recipe: Recipe | None = None,
        target: str | None = None,
    ) -> None:
        count = count_here if target is None else count_on(target)
        super().__init__(yaml_file, overrides, recipe=recipe, count=count)
        self.run_folder, self.count, self.target = self.folder, count, target
        self.document, self.given = read_document(yaml_file), overrides
        self.faults: dict[str, SbkitError] = {}
        self.made: dict[str, Any] = {}
        self._scratch = TemporaryDirectory(prefix="sbkit-check")
        self.overrides["output_folder"] = self._scratch.name
        self.knobs = read_knobs(yaml_file, self.overrides)

    def __enter__(self) -> "PlannedRun":
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch.cleanup()

    def __getattribute__(self, name: str) -> Any:
        """Return a part, made once or failed once; all else as it is."""
        get = super().__getattribute__
        return self.once(name, lambda: get(name)) if name in PARTS else get(name)

    def once(self, name: str, make: Callable[[], Value]) -> Value:
        """Return what is made under a name; raises MissingPartError where it cannot be made."""
        if name in self.faults:
            raise MissingPartError(name)
        if name not in self.made:
            try:
                with quiet(), preserve_rng(ON_CPU.device):  # training logs it, and draws, itself
                    self.made[name] = make()
            except MissingPartError:
                raise
            except Exception as error:
                self.faults[name] = _as_sentence(error, name)
                raise MissingPartError(name) from error
        made: Value = self.made[name]
        return made

    # -- parts that differ from those of the run -----------------------------------------------

    @cached_property
    def labels(self) -> Any:
        """Open what turns labels into ids, from a copy of the run's file where it has one."""
        name = self.recipe.task.label_file
        if name and (self.run_folder / name).is_file():
            shutil.copy(self.run_folder / name, self.folder)
        return super().labels

    @cached_property
    def model(self) -> nn.ModuleList:
        """Return the one ModuleList."""
        model = self.hparams["model"]
        if not isinstance(model, nn.ModuleList):
            raise SbkitError(
                "`model` must be the one torch.nn.ModuleList of all parts, but is "
                f"{type(model).__name__}. Write `model: !new:torch.nn.ModuleList` over a list of "
                "`!ref`s."
            )
        return model

    @cached_property
    def loaders(self) -> Loaders:
        """Plan the batches of every split; the device meant may be another machine's."""
        return self.recipe.make_loaders(self.hparams, self.splits, self.labels, ON_CPU)

    @cached_property
    def brain(self) -> Brain:
        """Make the recipe's Brain on the CPU, in fp32."""
        _ = self.model
        return self.make_brain(**STAND_IN)

    def build_again(self, **run_opts: Any) -> Brain:
        """Build the objects of the YAML and the Brain once more."""
        again = Run(self.yaml_file, self.overrides, recipe=self.recipe, count=self.count)
        again.splits, again.labels = self.splits, self.labels
        return again.make_brain(**run_opts)

    # -- words and places ----------------------------------------------------------------------

    def place(self, *keys: str | int) -> str:
        """Return --KEY of the command line; else FILE:LINE of the last key that the file has."""
        if keys == ("data_folder",) and self.knobs.get("manifest"):
            keys = ("manifest",)  # which is read in its place
        given: Any = self.given
        declared: Any = self.document.root
        for depth, key in enumerate(keys, start=1):
            if not isinstance(given, Mapping) or key not in given:
                break
            given = given[key]
            declared = declared.get(key) if isinstance(declared, Mapping) else None
            if not (isinstance(given, Mapping) and declared):
                return f"--{dotted(keys[:depth])}"
        return self.document.place(keys)

    def finding(self, check: str, *keys: str | int, **words: Any) -> Finding:
        """Make a finding about a key."""
        return Finding(check=check, where=self.place(*keys), **words)


def _as_sentence(error: Exception, part: str) -> SbkitError:
    if isinstance(error, SbkitError):
        return error
    return SbkitError(
        f"`{part}` of the run must be made without an error, but {type(error).__name__} was "
        f"raised: {error}. Correct the part of the YAML that it is made of."
    )
