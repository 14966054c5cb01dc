"""The run that is checked, in a scratch folder.

A check asks a planned run for what it needs, and yields findings. Everything is made once. If
something cannot be made, that is reported once, and the checks that need it are left out.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn
from torch.optim import Optimizer

from sbkit.base.errors import ConfigError, SbkitError
from sbkit.base.messages import printable
from sbkit.checkpoint.rng import preserve_rng
from sbkit.config.document import dotted, read_document
from sbkit.config.hparams import insert_defaults, read_knobs
from sbkit.data.batch import Loaders
from sbkit.data.sampler import TrainSampler
from sbkit.data.splits import Splits
from sbkit.decoding.decoder import LANGUAGE_MODELS_FILE
from sbkit.distributed.device import count_local_devices, counter_of_target, parse_device, resolve
from sbkit.logs.handlers import quiet
from sbkit.train.brain import Brain
from sbkit.train.recipe import Recipe
from sbkit.train.setup import Result, RunSetup, once

ON_CPU = resolve("cpu", "fp32")
HANDED_OVER = ("splits", "labels")
Ids = tuple[str, ...]
CPU_OPTIONS: dict[str, Any] = {
    "device": ON_CPU.device,
    "precision": "fp32",
    "eval_precision": "fp32",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One difference between what is declared and what would take effect.

    Attributes:
        where: FILE:LINE, or "override of KEY".
        problem: a sentence without its period.
        fix: advice; empty if the problem includes it.
        stops: the run is not started (an error); otherwise the finding is a note.
        ids: the utterances concerned.

    >>> print(Finding(where="ctc.yaml:3", problem="`lr` is negative", fix="Raise it.", check="lr"))
    ctc.yaml:3: error: `lr` is negative [lr]
      fix: Raise it.
    """

    where: str
    problem: str
    fix: str = ""
    stops: bool = True
    ids: Ids = field(default=(), repr=False)
    check: str = ""

    @property
    def severity(self) -> str:
        return "error" if self.stops else "note"

    def __str__(self) -> str:
        line = printable(f"{self.where}: {self.severity}: {self.problem} [{self.check}]")
        return f"{line}\n  fix: {printable(self.fix)}" if self.fix else line

    def as_sentence(self) -> str:
        """Write the finding as one paragraph, with its place unless that is only the file."""
        text = f"{self.problem}. {self.fix}".rstrip()
        is_located = self.where in text or self.where.endswith(":1")
        return printable(text if is_located else f"{text} ({self.where})")

    def as_record(self) -> dict[str, object]:
        return {"severity": self.severity, **asdict(self)}


class MissingPartError(Exception):
    """Raised when a check asks for a part that cannot be made; the fault is reported elsewhere."""


class PlannedRun(RunSetup):
    """A run that leaves no trace in its folder, ``run_folder``.

    target: the machine to check for, such as cuda:8; by default this one.
    run: the run that follows. Its splits are used if it has them; what is made here is logged, as
        the run will not make it again.

    >>> with PlannedRun(Path("hparams/ctc.yaml"), {"lr": 25.0}) as planned:  # doctest: +SKIP
    ...     for finding in check_planned_run(planned):
    ...         print(finding)
    override of lr: error: Two steps at a learning rate of 25 raise the loss ...
    """

    def __init__(
        self,
        yaml_file: Path,
        overrides: Mapping[str, object],
        *,
        recipe: type[Recipe] | None = None,
        target: str | None = None,
        run: RunSetup | None = None,
    ) -> None:
        recipe = recipe if run is None else type(run.load_recipe())
        count = count_local_devices if target is None else counter_of_target(target)
        super().__init__(yaml_file, overrides, recipe=recipe, count=count)
        self.run_folder = self.folder
        self.target = target
        self.document = read_document(yaml_file)
        insert_defaults(self.document, overrides)
        self.user_overrides = overrides
        self.faults: dict[str, SbkitError] = {}
        self._run = run
        self._scratch = TemporaryDirectory(prefix="sbkit-check")
        self.overrides["output_folder"] = self._scratch.name
        self.knobs = read_knobs(yaml_file, self.overrides)

    def __enter__(self) -> "PlannedRun":
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch.cleanup()

    def make_once(self, name: str, make: Callable[[], Result]) -> Result:
        """Make a result without a trace: nothing is logged, and no random number is drawn.

        Raises MissingPartError if that failed, now or before; the error is in `faults`.
        """
        if name in self.faults:
            raise MissingPartError(name)
        try:
            is_handed_over = self._run is not None and name in HANDED_OVER
            with nullcontext() if is_handed_over else quiet(), preserve_rng(ON_CPU.device):
                return super().make_once(name, make)
        except MissingPartError:  # of something that it needs
            raise
        except SbkitError as error:
            self.faults[name] = error
        except Exception as error:  # whatever a part raises
            self.faults[name] = ConfigError(
                f"The {name} of the run cannot be made: {type(error).__name__}: {error}. Correct "
                "the part of the YAML or the recipe that makes it."
            )
        raise MissingPartError(name)

    def make_all(self) -> None:
        """Make the Brain, the loaders and all that they need; the errors are in `faults`."""
        for make in (
            self.choose_placement,
            self.prepare_splits,  # these two first, as `make_once` is quiet about the others
            self.prepare_labels,
            self.make_loaders,
            self.make_cpu_brain,
        ):
            with suppress(MissingPartError):
                make()

    # -- what differs from training ------------------------------------------------------------

    @once("splits")
    def prepare_splits(self) -> Splits:
        """Prepare the data, unless the run that follows has done so."""
        if self._run is not None and "splits" in self._run.results:
            self.knobs.names_read |= self._run.knobs.names_read
            splits: Splits = self._run.results["splits"]
            return splits
        return super().prepare_splits()

    @once("labels")
    def prepare_labels(self) -> object:
        """Open the tokenizer or the classes, from copies of the run's files if it has them."""
        for name in self._label_file_names():
            if (self.run_folder / name).is_file():
                shutil.copy(self.run_folder / name, self.folder)
        return super().prepare_labels()

    def _label_file_names(self) -> list[str]:
        """Name the files that `prepare_labels` may write."""
        return [name for name in (self.load_recipe().label_file, LANGUAGE_MODELS_FILE) if name]

    def hand_over(self) -> dict[str, bytes]:
        """Give the splits to the run that follows; return the contents of its label files."""
        if self._run is not None and "splits" in self.results:
            self._run.results["splits"] = self.results["splits"]
            self._run.knobs.names_read |= self.knobs.names_read
        files = [self.folder / name for name in self._label_file_names()]
        return {file.name: file.read_bytes() for file in files if file.is_file()}

    @once("model")
    def require_model(self) -> nn.ModuleList:
        model = self.build_hparams()["model"]
        if not isinstance(model, nn.ModuleList):
            raise ConfigError(
                f"`model` must be the one torch.nn.ModuleList of all parts, not a "
                f"{type(model).__name__}. Write `model: !new:torch.nn.ModuleList` over a list of "
                "`!ref`s."
            )
        return model

    @once("loaders")
    def make_loaders(self) -> Loaders:
        """Plan the batches of every split for the CPU: the run's device may be elsewhere."""
        return self.load_recipe().make_loaders(
            self.build_hparams(), self.prepare_splits(), self.prepare_labels(), ON_CPU
        )

    @once("brain")
    def make_cpu_brain(self) -> Brain:
        self.require_model()
        return self.make_brain(**CPU_OPTIONS)

    @once("optimizers")
    def make_optimizers(self) -> list[Optimizer]:
        brain = self.make_cpu_brain()
        try:
            brain.init_optimizers()
        except Exception as error:  # whatever an optimizer or a recipe raises
            raise ConfigError(
                f"The optimizers cannot be made: {type(error).__name__}: {error}. Correct "
                "`opt_class`, or the recipe's `init_optimizers`."
            ) from error
        return list((brain.optimizers_dict or {}).values())

    def build_again(self, **run_opts: Any) -> Brain:
        """Build a second Brain, with other objects of the YAML, from the same data and labels."""
        return self.plan_again({}).make_brain(**run_opts)

    def plan_again(self, overrides: Mapping[str, object]) -> RunSetup:
        """Return a setup with more overrides, from the same data and labels."""
        overrides = {**self.overrides, **overrides}
        recipe = type(self.load_recipe())
        again = RunSetup(self.yaml_file, overrides, recipe=recipe, count=self.count)
        again.results |= {"splits": self.prepare_splits(), "labels": self.prepare_labels()}
        return again

    # -- how an epoch is shared ----------------------------------------------------------------

    def require_sampler(self) -> TrainSampler:
        """Return the sampler of the training set; a recipe may plan its batches in another way."""
        sampler = self.make_loaders().train.batch_sampler
        if not isinstance(sampler, TrainSampler):
            raise MissingPartError("sampler")
        return sampler

    def count_processes(self) -> int:
        """Count torchrun's processes, or one for each device of the target."""
        if self.target is None:
            return int(os.environ.get("WORLD_SIZE", "1"))
        return max(1, self.count(parse_device(self.target).type))

    @property
    def accumulation(self) -> int:
        """The micro-batches of each process in a step."""
        return int(self.knobs.get("grad_accumulation_factor", 1))

    # -- findings and their places -------------------------------------------------------------

    def place(self, *keys: str | int) -> str:
        """Return "override of KEY" if the key is overridden, else FILE:LINE."""
        if keys == ("data_folder",) and self.knobs.get("manifest"):
            keys = ("manifest",)  # which is read instead
        override: object = self.user_overrides
        declared: object = self.document.root
        for depth, key in enumerate(keys, start=1):
            if not isinstance(override, Mapping) or key not in override:
                break
            override = override[key]
            declared = declared.get(key) if isinstance(declared, Mapping) else None
            if not (isinstance(override, Mapping) and declared):
                return f"override of {dotted(keys[:depth])}"
        return self.document.place(keys)

    def finding(
        self, *keys: str | int, problem: str, fix: str = "", stops: bool = True, ids: Ids = ()
    ) -> Finding:
        return Finding(where=self.place(*keys), problem=problem, fix=fix, stops=stops, ids=ids)
