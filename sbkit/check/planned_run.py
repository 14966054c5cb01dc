"""What is checked: a run, made part by part, none of it before a check asks for it.

A part that cannot be made is a fault by itself, reported once; the checks that need it are left
out. Everything is built in a folder of its own, so that a check leaves no trace in the run's.
"""

import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from torch import nn

from sbkit.base.errors import SbkitError
from sbkit.check.finding import Finding
from sbkit.config.document import Document, read_document
from sbkit.config.hparams import Resolved, load_hparams, read_knobs
from sbkit.config.hparams import resolve as resolve_yaml
from sbkit.data.corpora.splits import Splits
from sbkit.distributed.device import SUPPORTED, Count, Placement, count_here, count_on, resolve
from sbkit.logs.log import quiet
from sbkit.train.brain import Brain
from sbkit.train.recipe import Recipe
from sbkit.train.run import Run

Value = TypeVar("Value")

TOKENIZER = "tokenizer.model"  # of a YAML that names no recipe
PARTS = ("recipe", "placement", "splits", "labels", "hparams", "model", "loaders", "brain")


class MissingPartError(Exception):
    """A part that a check asked for and that cannot be made; its fault is reported elsewhere."""


class PlannedRun:
    """A YAML with its overrides, and everything that training would make of it.

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
        self.yaml_file, self.overrides = yaml_file, dict(overrides)
        self.target = target
        self.document: Document = read_document(yaml_file)
        self.knobs: dict[str, Any] = read_knobs(yaml_file, overrides)
        self.parts: dict[str, Any] = {}
        self.faults: dict[str, SbkitError] = {}
        self._closing = ExitStack()
        self._scratch = Path(self._closing.enter_context(TemporaryDirectory()))
        self.has_recipe = recipe is not None or "recipe" in self.knobs
        self._recipe = recipe

    def __enter__(self) -> "PlannedRun":
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    @cached_property
    def run(self) -> Run:
        """Return the run that is checked, in the folder of the check."""
        return Run(self.yaml_file, self.building_overrides, recipe=self._recipe, count=self.count)

    def once(
        self,
        name: str,
        make: Callable[[], Value],
        *,
        must: str = "`{}` of the run must be made without an error",
        fix: str = "Correct the part of the YAML that it is made of.",
    ) -> Value:
        """Return what is made under a name, made once or failed once.

        An error is kept in `faults`; ``must`` and ``fix`` make a sentence of one that is none yet.
        Raises MissingPartError where it cannot be made.
        """
        if name in self.faults:
            raise MissingPartError(name)
        if name not in self.parts:
            try:
                self.parts[name] = make()
            except MissingPartError:
                raise
            except Exception as error:
                came = f"{type(error).__name__} was raised: {error}"
                sentence = SbkitError(f"{must.format(name)}, but {came}. {fix}")
                sentence.__cause__ = error
                self.faults[name] = error if isinstance(error, SbkitError) else sentence
                raise MissingPartError(name) from error
        made: Value = self.parts[name]
        return made

    # -- the parts, in the order of a run ------------------------------------------------------

    @property
    def recipe(self) -> Recipe:
        """Return the recipe that the YAML names; SpeechBrain's YAMLs name none."""
        if not self.has_recipe:
            raise MissingPartError("recipe")
        return self.once("recipe", lambda: self.run.recipe)

    @property
    def placement(self) -> Placement:
        """Return the device and the precision that the run would take."""
        return self.once("placement", lambda: self.run.placement)

    @property
    def splits(self) -> Splits:
        """Prepare the data as training does, and open it."""
        _ = self.recipe
        return self.once("splits", lambda: _quietly(lambda: self.run.splits))

    @property
    def labels(self) -> Any:
        """Open what turns labels into ids; one that is made stays in the folder of the check."""
        _ = self.splits
        return self.once("labels", lambda: _quietly(lambda: self.run.labels))

    @property
    def hparams(self) -> dict[str, Any]:
        """Build the objects of the YAML."""
        return self.once("hparams", self._build)

    @property
    def model(self) -> nn.ModuleList:
        """Return the one ModuleList."""
        return self.once("model", self._find_model)

    @property
    def loaders(self) -> Any:
        """Plan the batches of every split."""
        parts = self.hparams, self.splits, self.labels, resolve("cpu", "fp32")
        make = self.recipe.make_loaders
        return self.once("loaders", lambda: _quietly(lambda: make(*parts)))

    @property
    def brain(self) -> Brain:
        """Make the recipe's Brain on the CPU, in fp32."""
        _ = self.recipe
        return self.once("brain", lambda: self.make_brain(resolve("cpu", "fp32")))

    def make_brain(self, placement: Placement) -> Brain:
        """Make the recipe's Brain for a device and a precision, evaluating as it is declared."""
        self.run.hparams = self.hparams | {"model": self.model}
        return self._make_brain(self.run, placement)

    def build_again(self) -> Brain:
        """Build the objects of the YAML and the Brain once more."""
        run = Run(self.yaml_file, self.building_overrides, recipe=self._recipe, count=self.count)
        run.hparams = self._build()
        return self._make_brain(run, resolve("cpu", "fp32"))

    @property
    def count(self) -> Count:
        """Count devices as this machine has them, or the one meant."""
        return count_here if self.target is None else count_on(self.target)

    @property
    def resolved(self) -> Resolved:
        """Return the YAML as it takes effect."""
        return resolve_yaml(self.yaml_file, self.overrides)

    # -- words and places ----------------------------------------------------------------------

    @property
    def run_folder(self) -> Path | None:
        """Return the real run's folder, which a check only reads."""
        folder = self.knobs.get("output_folder")
        return None if folder is None else Path(folder)

    @cached_property
    def building_overrides(self) -> dict[str, Any]:
        """Return the overrides, with the folder of the check in place of the run's."""
        if self.run_folder is None:
            return self.overrides
        for name in {TOKENIZER, self._label_file()}:
            if name is not None and (self.run_folder / name).is_file():
                shutil.copy(self.run_folder / name, self._scratch)
        return self.overrides | {"output_folder": str(self._scratch)}

    def place(self, *keys: str | int) -> str:
        """Return FILE:LINE of a key, or of the last of its keys that the file has."""
        return self.document.place(keys)

    def as_in_training(self, sentence: str) -> str:
        """Name the run's folder where a sentence names that of the check."""
        return sentence.replace(str(self._scratch), str(self.run_folder))

    def finding(self, check: str, *keys: str | int, **words: Any) -> Finding:
        """Make a finding about a key."""
        return Finding(check=check, where=self.place(*keys), **words)

    # -- inside --------------------------------------------------------------------------------

    def _label_file(self) -> str | None:
        try:
            return Run(self.yaml_file, self.overrides, recipe=self._recipe).recipe.task.label_file
        except SbkitError:  # of a recipe that cannot be imported, which is reported
            return None

    def _build(self) -> dict[str, Any]:
        if self.has_recipe and not (self._scratch / (self.recipe.task.label_file or "")).exists():
            _ = self.labels  # its file is what the YAML opens
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.knobs.get("seed", 0))
            return load_hparams(self.yaml_file, self.building_overrides)

    def _find_model(self) -> nn.ModuleList:
        model = self.hparams.get("model")
        if model is None and not self.has_recipe:
            raise MissingPartError("model")  # SpeechBrain's YAMLs have `modules`
        if not isinstance(model, nn.ModuleList):
            raise SbkitError(
                "`model` must be the one torch.nn.ModuleList of all parts, but is "
                f"{type(model).__name__}. Write `model: !new:torch.nn.ModuleList` over a list of "
                "`!ref`s."
            )
        return model

    def _make_brain(self, run: Run, placement: Placement) -> Brain:
        evaluation = str(self.knobs.get("eval_precision", "fp32"))
        if evaluation not in SUPPORTED[placement.device.type]:
            evaluation = "fp32"  # on this stand-in, or a fault that the placement check names
        return run.make_brain(
            device=placement.device, precision=placement.precision, eval_precision=evaluation
        )


def _quietly(make: Callable[[], Value]) -> Value:
    """Make something without its log, which training writes itself."""
    with quiet():
        return make()
