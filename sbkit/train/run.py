"""A run: the steps from a YAML and its overrides to a Brain, each taken once, when it is needed.

Training, `sbkit check` and the tests take the same steps here.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.checkpointer import NORMALIZER, TASK, Checkpointer
from sbkit.checkpoint.folder import newest_described
from sbkit.checkpoint.run_config import CHECKPOINTS, Declaration
from sbkit.config.hparams import load_hparams, read_knobs
from sbkit.config.ranges import RANGES, require_in_range
from sbkit.data.batch import Loaders, user_columns
from sbkit.data.corpus import describe_corpus
from sbkit.data.splits import Splits
from sbkit.distributed.device import Count, Placement, count_here, resolve
from sbkit.evaluate.run_results import SUMMARY
from sbkit.evaluate.slices import require_columns
from sbkit.logs.log import log
from sbkit.models.encoder import require_rate
from sbkit.models.pretrained.folder import find_folder, load_weights
from sbkit.tasks.task import Task
from sbkit.text.normalize import table_to_store
from sbkit.text.tokenizer import Tokenizer
from sbkit.train.brain import Brain
from sbkit.train.initialize import initialize_from, with_encoder_config
from sbkit.train.recipe import Recipe, load_recipe
from sbkit.train.scoring import is_finished


class Run:
    """A YAML with its overrides, and what training makes of it, step by step.

    Raises SbkitError: the YAML cannot be read, or the pretrained encoder that it names.
    """

    def __init__(
        self,
        yaml_file: Path,
        overrides: Mapping[str, object],
        *,
        recipe: Recipe | None = None,
        count: Count = count_here,
    ) -> None:
        """Read the YAML; ``recipe`` stands in for the one that it names."""
        self.yaml_file, self.overrides = yaml_file, with_encoder_config(yaml_file, overrides)
        self.knobs: dict[str, Any] = read_knobs(yaml_file, self.overrides)
        self._recipe, self._count = recipe, count

    @property
    def folder(self) -> Path:
        """Name the folder that the run writes to."""
        return Path(self.knobs["output_folder"])

    @cached_property
    def recipe(self) -> Recipe:
        """Import the recipe that the YAML names."""
        return self._recipe or load_recipe(self.knobs, self.yaml_file)

    @cached_property
    def placement(self) -> Placement:
        """Choose the device and the precision."""
        device, precision = self.knobs.get("device"), self.knobs.get("precision", "fp32")
        return resolve(device, precision, count=self._count)

    def check_ranges(self) -> None:
        """Raise SbkitError for a number that no run of this recipe can have."""
        require_in_range(self.knobs, {**RANGES, **self.recipe.ranges})

    @cached_property
    def splits(self) -> Splits:
        """Prepare the data that is not prepared yet."""
        splits = self.recipe.prepare_splits(self.knobs)
        columns = {name: user_columns(each.column_names) for name, each in splits.test.items()}
        require_columns(self.knobs.get("report_by") or [], columns)
        return splits

    @cached_property
    def labels(self) -> Any:
        """Open what turns labels into ids; make it where the run folder has none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.recipe.prepare_labels(self.knobs, self.splits)

    @property
    def label_file(self) -> Path | None:
        """Name the file of labels in the run folder, once it is there."""
        file = self.folder / (self.recipe.task.label_file or "")
        return file if file.is_file() else None

    def declare(self) -> Declaration:
        """Describe which run this is, as far as its labels are there."""
        data = self.splits.fingerprints
        return Declaration.of(self.yaml_file, self.overrides, data=data, label_file=self.label_file)

    @cached_property
    def hparams(self) -> dict[str, Any]:
        """Build the objects of the YAML, with the random numbers of its seed."""
        _ = self.recipe, self.labels  # their modules and file are what the YAML opens
        torch.manual_seed(self.knobs["seed"])
        hparams = load_hparams(self.yaml_file, self.overrides)
        if "sample_rate" in hparams:
            require_rate(hparams, hparams["sample_rate"])
        if isinstance(checkpointer := hparams["checkpointer"], Checkpointer):
            checkpointer.meta[TASK] = self.recipe.task.name
            if isinstance(self.labels, Tokenizer):
                checkpointer.meta[NORMALIZER] = table_to_store(self.knobs["language"])
        return hparams

    @cached_property
    def loaders(self) -> Loaders:
        """Plan the batches of every split."""
        return self.recipe.make_loaders(self.hparams, self.splits, self.labels, self.placement)

    @property
    def is_begun(self) -> bool:
        """Return whether the run has a checkpoint."""
        return newest_described(self.folder / CHECKPOINTS) is not None

    @property
    def is_finished(self) -> bool:
        """Return whether the run has trained its last epoch, or has stopped early."""
        return is_finished(
            self.folder,
            number_of_epochs=self.hparams["epoch_counter"].limit,
            patience=self.knobs.get("early_stopping", 0),
        )

    @property
    def facts_of_data(self) -> dict[str, Any]:
        """Return the sample rate, language and corpus of the data, for its report."""
        corpus = self.recipe.corpus and self.recipe.corpus(self.knobs)
        return {
            "sample_rate": self.knobs["sample_rate"],
            "language": self.knobs.get("language"),
            "corpus": describe_corpus(corpus, self.knobs),
        }

    def set_results_aside(self) -> None:
        """Rename the summary of a run that is trained further: it is of an earlier model."""
        if not (summary := self.folder / SUMMARY).is_file():
            return
        newest = newest_described(self.folder / CHECKPOINTS)
        epoch = newest.meta.get("epoch", 0) if newest else 0
        kept = summary.rename(summary.with_stem(f"{summary.stem}-{epoch}"))
        log(
            f"The figures after epoch {epoch} are kept as {kept.name}. The report, the utterances "
            "and the decoder are replaced by those of the next test."
        )

    def load_initial_weights(self) -> list[str]:
        """Load `pretrained`, and what fits of `init_from`, unless the run has its own weights.

        Returns lines about what is loaded.
        """
        lines: list[str] = []
        if self.is_begun:
            return lines
        if named := self.knobs.get("pretrained"):
            lines.append(load_weights(find_folder(named), self.hparams.values()))
        if source := self.knobs.get("init_from"):
            lines += initialize_from(Path(source), self.hparams, self.recipe.task)
        return lines

    def make_brain(self, **run_opts: Any) -> Brain:
        """Make the recipe's Brain; ``run_opts`` go before what the YAML says."""
        trained, task = getattr(self.recipe.brain, "task", None), self.recipe.task
        if isinstance(trained, Task) and trained.model_class != task.model_class:
            raise SbkitError(
                f"The Brain must train what its bundle is rebuilt as, {task.model_class}, but "
                f"trains {trained.model_class}. Set `task` of its class to {task.name}."
            )
        several = "optimizers" in self.hparams
        brain: Brain = self.recipe.brain(
            modules={"model": self.hparams["model"]},
            opt_class=self.hparams.get("opt_class") if several else self.hparams["opt_class"],
            hparams=self.hparams,
            run_opts={"device": self.placement.device, **run_opts},
            checkpointer=self.hparams["checkpointer"],
        )
        return brain
