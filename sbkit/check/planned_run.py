"""The run that is checked: in a scratch folder, each of its steps taken once, or failed once.

A step that fails is reported once; the checks that need its result are left out.
"""

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from sbkit.base.errors import ConfigError, SbkitError
from sbkit.check.finding import Finding
from sbkit.checkpoint.rng import preserve_rng
from sbkit.config.document import dotted, read_document
from sbkit.config.hparams import read_knobs
from sbkit.data.batch import Loaders
from sbkit.distributed.device import count_local_devices, counter_of_target, resolve
from sbkit.logs.handlers import quiet
from sbkit.train.brain import Brain
from sbkit.train.recipe import Recipe
from sbkit.train.run import Result, Run, step

ON_CPU = resolve("cpu", "fp32")
STAND_IN = {"device": ON_CPU.device, "precision": "fp32", "eval_precision": "fp32"}


class MissingPartError(Exception):
    """A part that a check asked for and that cannot be made; its fault is reported elsewhere."""


class PlannedRun(Run):
    """A run that leaves no trace in its folder, which is ``run_folder``.

    A step that fails raises MissingPartError, however often it is taken, and its error is in
    `faults` once. Raises SbkitError when the YAML cannot be read at all.
    """

    def __init__(
        self,
        yaml_file: Path,
        overrides: Mapping[str, object],
        *,
        recipe: Recipe | None = None,
        target: str | None = None,
    ) -> None:
        count = count_local_devices if target is None else counter_of_target(target)
        super().__init__(yaml_file, overrides, recipe=recipe, count=count)
        self.run_folder, self.target = self.folder, target
        self.document, self.given = read_document(yaml_file), overrides
        self.faults: dict[str, SbkitError] = {}
        self._scratch = TemporaryDirectory(prefix="sbkit-check")
        self.overrides["output_folder"] = self._scratch.name
        self.knobs = read_knobs(yaml_file, self.overrides)

    def __enter__(self) -> "PlannedRun":
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch.cleanup()

    def take(self, name: str, step: Callable[[], Result]) -> Result:
        """Take a step without a trace: nothing is logged, and no random number is drawn.

        Raises:
            MissingPartError: the step failed; its error is kept in `faults`, once.
        """
        if name in self.faults:
            raise MissingPartError(name)
        if name in self.results:
            return super().take(name, step)
        try:
            with quiet(), preserve_rng(ON_CPU.device):
                return super().take(name, step)
        except MissingPartError:  # a step before it failed
            raise
        except Exception as error:
            self.faults[name] = _as_sentence(error, name)
            raise MissingPartError(name) from error

    def take_steps(self) -> None:
        """Take every step; the errors of those that fail are in `faults`."""
        for take in (
            self.load_recipe,
            self.choose_placement,
            self.prepare_splits,
            self.prepare_labels,
            self.build_hparams,
            self.require_model,
            self.make_loaders,
            self.make_cpu_brain,
        ):
            with suppress(MissingPartError):
                take()

    # -- steps that differ from those of training ----------------------------------------------

    @step("labels")
    def prepare_labels(self) -> Any:
        """Open what turns labels into ids, from a copy of the run's file if it has one."""
        name = self.load_recipe().task.label_file
        if name and (self.run_folder / name).is_file():
            shutil.copy(self.run_folder / name, self.folder)
        return super().prepare_labels()

    @step("model")
    def require_model(self) -> nn.ModuleList:
        """Return the one ModuleList."""
        model = self.build_hparams()["model"]
        if not isinstance(model, nn.ModuleList):
            raise ConfigError(
                "`model` must be the one torch.nn.ModuleList of all parts, but is "
                f"{type(model).__name__}. Write `model: !new:torch.nn.ModuleList` over a list of "
                "`!ref`s."
            )
        return model

    @step("loaders")
    def make_loaders(self) -> Loaders:
        """Plan the batches of every split for the CPU: the run's device may be elsewhere."""
        return self.load_recipe().make_loaders(
            self.build_hparams(), self.prepare_splits(), self.prepare_labels(), ON_CPU
        )

    @step("brain")
    def make_cpu_brain(self) -> Brain:
        """Make the recipe's Brain on the CPU, in fp32."""
        self.require_model()
        return self.make_brain(**STAND_IN)

    @step("optimizers")
    def make_optimizers(self) -> list[Any]:
        """Make the optimizers of the Brain."""
        brain = self.make_cpu_brain()
        try:
            brain.init_optimizers()
        except Exception as error:  # whatever an optimizer or a recipe raises
            raise ConfigError(
                f"The optimizers cannot be made ({type(error).__name__}: {error}). Correct "
                "`opt_class`, or the recipe's `init_optimizers`."
            ) from error
        return list((brain.optimizers_dict or {}).values())

    def build_again(self, **run_opts: Any) -> Brain:
        """Build the objects of the YAML and the Brain once more, from the same data and labels."""
        again = Run(self.yaml_file, self.overrides, recipe=self.load_recipe(), count=self.count)
        again.results |= {"splits": self.prepare_splits(), "labels": self.prepare_labels()}
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
