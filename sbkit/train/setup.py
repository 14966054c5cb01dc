"""The setup of a run: what leads from a YAML and its overrides to a Brain.

    load_recipe, choose_placement -> prepare_splits -> prepare_labels -> build_hparams
        -> make_loaders -> make_brain

A method first calls those whose results it needs. Training, `sbkit check` and the tests share them.

The files of a run folder, in the order that a run writes them:

.lock                  locked while a run trains here
hyperparams.yaml       the YAML as it took effect, with the overrides
run_config.json        the run configuration, which a resumed run is compared with
tokenizer.model        the tokenizer of a recognizer
symbols.txt            the symbols of a synthesizer
lm.safetensors         the language models of a recognizer
data_report.html       the report on the data: hours, speakers, lengths, levels, transcripts
data_report.json       the figures of this report
left_out.tsv           utterances that are left out, with reasons
misaligned.tsv         clips that the training of a synthesizer skips, if any
train.log              the printed messages, with the time
train_log.jsonl        the figures of training: a line for each logged step and for each epoch
tensorboard/           the same figures for TensorBoard, with the extra `curves`
curves.png             the curves of training, with the extra `curves`
nonfinite/             a step whose loss was not finite, for debugging
checkpoints/           the last checkpoint and the best ones
bundle/                the exported model with its fitted decoder, which the test measured
bundle-EPOCH/          the bundle after that epoch of a run that was continued
earlier_bundle/        the bundle that the last `sbkit tune` replaced
wer_SET.txt            every utterance of a test set of a recognizer, with its errors, for people
utterances_SET.jsonl   the same for programs
suspicious_SET.tsv     utterances that were recognized as another text with confidence, if any
codes_SET.tsv          the use of the codes of a codec, also as `.png`
speech_SET.png         utterances of a test set as recorded and as synthesized, also as `.mp3`
report_by_SET.tsv      with `report_by`: the metrics by the values of these columns
summary.json           the results and their provenance
summary-EPOCH.json     the results after that epoch of a run that was continued
report.html            the results as one page with audio, which loads nothing from elsewhere
"""

import logging
import shutil
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch

from sbkit.base.errors import ConfigError
from sbkit.base.ranges import RANGES, require_in_range
from sbkit.bundle.task import dotted_path
from sbkit.checkpoint.checkpointer import NORMALIZER, TASK, Checkpointer
from sbkit.checkpoint.folder import newest_checkpoint
from sbkit.checkpoint.rng import isolated_rng
from sbkit.checkpoint.run_config import BUNDLE, CHECKPOINTS, RunConfig, folder_override
from sbkit.config.hparams import Knobs, load_hparams, read_knobs
from sbkit.config.hparams import resolve as resolve_yaml
from sbkit.config.overrides import nest_overrides
from sbkit.data.batch import Loaders, user_columns
from sbkit.data.splits import Splits
from sbkit.distributed.device import DeviceCounter, Placement, count_local_devices, resolve
from sbkit.evaluate.run_results import SUMMARY
from sbkit.evaluate.slices import require_columns
from sbkit.models.encoder import require_rate
from sbkit.models.pretrained.folder import load_weights
from sbkit.models.pretrained.hub import find_folder
from sbkit.text.normalization import table_to_store, text_table
from sbkit.text.tokenizer import Tokenizer
from sbkit.train.brain import Brain
from sbkit.train.initialize import initialize_from, with_encoder_config
from sbkit.train.recipe import Recipe, load_recipe
from sbkit.train.stopping import is_finished

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def once(name: str) -> Callable[[Callable[[Any], Result]], Callable[[Any], Result]]:
    """Carry out a method of a `RunSetup` once, and keep its result by ``name``."""

    def decorate(method: Callable[[Any], Result]) -> Callable[[Any], Result]:
        @wraps(method)
        def make_once(setup: "RunSetup") -> Result:
            return setup.make_once(name, partial(method, setup))

        return make_once

    return decorate


class RunSetup:
    """A YAML with its overrides, and what has been made from them; `sbkit.Run` trains it.

    Attributes:
        knobs: the plain values of the YAML.
        results: what has been made so far, by name.
    """

    def __init__(
        self,
        yaml_file: Path | str,
        overrides: Mapping[str, object],
        *,
        recipe: type[Recipe] | None = None,
        count: DeviceCounter = count_local_devices,
    ) -> None:
        """Read the YAML.

        Args:
            yaml_file: the YAML of the run. That of a run folder is for the folder where it lies.
            overrides: values that replace the YAML's, by key, such as `lr` or
                `Transformer.dropout`.
            recipe: replaces the recipe that the YAML names.
            count: counts the devices of a type.

        Raises:
            SbkitError: the YAML, or the pretrained encoder that it names, cannot be read.
        """
        self.yaml_file = Path(yaml_file)
        overrides = {**folder_override(self.yaml_file), **nest_overrides(overrides)}
        self.overrides = with_encoder_config(self.yaml_file, overrides)
        self.knobs = read_knobs(self.yaml_file, self.overrides)
        self.count = count
        self.results: dict[str, Any] = {} if recipe is None else {"recipe": recipe()}

    def make_once(self, name: str, make: Callable[[], Result]) -> Result:
        """Make a result, or return it if it has been made."""
        if name not in self.results:
            self.results[name] = make()
        result: Result = self.results[name]
        return result

    # -- preparations ---------------------------------------------------------------------------

    @once("recipe")
    def load_recipe(self) -> Recipe:
        """Import the recipe that the YAML names."""
        return load_recipe(self.knobs, self.yaml_file)

    @once("placement")
    def choose_placement(self) -> Placement:
        """Choose the device and the precision."""
        device, precision = self.knobs.get("device"), self.knobs.get("precision", "fp32")
        return resolve(device, precision, count=self.count)

    @once("splits")
    def prepare_splits(self) -> Splits:
        """Prepare the data that is not prepared yet."""
        splits = self.load_recipe().prepare_splits(self.knobs)
        columns = {name: user_columns(rows.column_names) for name, rows in splits.test.items()}
        require_columns(self.knobs["report_by"] or (), columns)
        return splits

    @once("labels")
    def prepare_labels(self) -> Any:
        """Open the tokenizer or the list of classes; make it if the run folder has none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.load_recipe().prepare_labels(self.knobs, self.prepare_splits())

    @once("hparams")
    def build_hparams(self) -> Knobs:
        """Build the objects of the YAML, with random numbers from its seed."""
        recipe, labels = self.load_recipe(), self.prepare_labels()  # the YAML opens their files
        with isolated_rng(torch.device("cpu")):  # where they are built, also for another machine
            torch.manual_seed(self.knobs["seed"])
            hparams = load_hparams(self.yaml_file, self.overrides)
        if "sample_rate" in hparams:
            require_rate(hparams, hparams["sample_rate"])
        if isinstance(checkpointer := hparams["checkpointer"], Checkpointer):
            checkpointer.meta[TASK] = recipe.name
            if isinstance(labels, Tokenizer):
                table = text_table(self.knobs["language"], self.knobs.get("text"))
                checkpointer.meta[NORMALIZER] = table_to_store(table)
        return hparams

    @once("loaders")
    def make_loaders(self) -> Loaders:
        """Plan the batches of every split."""
        return self.load_recipe().make_loaders(
            self.build_hparams(),
            self.prepare_splits(),
            self.prepare_labels(),
            self.choose_placement(),
        )

    def make_brain(self, loaders: Loaders | None = None, **run_opts: Any) -> Brain:
        """Make a Brain of the recipe.

        loaders: what the Brain will train on; it may not `fit` without them.
        run_opts: take precedence over the YAML.
        """
        recipe = self.load_recipe()
        hparams = self.build_hparams()
        opt_class = hparams.get("opt_class") if "optimizers" in hparams else hparams["opt_class"]
        brain: Brain = recipe.brain(
            modules={"model": hparams["model"]},
            opt_class=opt_class,
            hparams=hparams,
            run_opts={"device": self.choose_placement().device, **run_opts},
            checkpointer=hparams["checkpointer"],
            task=recipe,
        )
        if recipe.has_model and not isinstance(brain.network, recipe.model_class()):
            raise ConfigError(
                f"`network` of the Brain must be the model that bundles of this run contain, a "
                f"{recipe.model_class().__name__}, but is a {type(brain.network).__name__}. Set "
                "`self.network` to it in the Brain, or correct `model_class` of the task."
            )
        brain.loaders = loaders
        return brain

    # -- before and between them ----------------------------------------------------------------

    def check_ranges(self) -> None:
        """Raise ConfigError for a number that no run of this recipe can have."""
        require_in_range(self.knobs, {**RANGES, **self.load_recipe().ranges})

    def load_initial_weights(self) -> list[str]:
        """Load `pretrained`, and the fitting part of `init_from`, if the run has no checkpoint.

        Returns lines that describe the loaded weights.
        """
        lines: list[str] = []
        if self.has_checkpoint():
            return lines
        if name := self.knobs.get("pretrained"):
            source = (self.knobs.get("encoder_config") or {}).get("source") or {}
            folder = find_folder(name, source.get("revision"))
            lines.append(load_weights(folder, self.build_hparams().values()))
        if source := self.knobs.get("init_from"):
            root = resolve_yaml(self.yaml_file, self.overrides).tree
            lines += initialize_from(Path(source), self.build_hparams(), self.load_recipe(), root)
        return lines

    # -- the run folder -------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """The folder that the run writes to."""
        return Path(self.knobs["output_folder"])

    def find_label_file(self) -> Path | None:
        """Return the label file in the run folder, None if it is not there yet."""
        file = self.folder / (self.load_recipe().label_file or "")
        return file if file.is_file() else None

    def make_run_config(self) -> RunConfig:
        """Describe the run, with its data, and with its labels once they are prepared."""
        overrides = {**self.overrides, "recipe": dotted_path(type(self.load_recipe()))}
        return RunConfig.from_yaml(
            self.yaml_file,
            overrides,
            data=self.prepare_splits().fingerprints,
            label_file=self.find_label_file(),
        )

    def has_checkpoint(self) -> bool:
        """Return whether the run has saved a checkpoint."""
        return newest_checkpoint(self.folder / CHECKPOINTS) is not None

    def is_finished(self) -> bool:
        """Return, before training, whether the run has trained its last epoch or stopped early."""
        return is_finished(
            self.folder,
            number_of_epochs=self.build_hparams()["epoch_counter"].limit,
            patience=self.knobs.get("early_stopping", 0),
        )

    def set_results_aside(self) -> None:
        """Rename the bundle and summary of a run that is trained further.

        The next test replaces its other results.
        """
        newest = newest_checkpoint(self.folder / CHECKPOINTS)
        epoch = newest.meta.get("epoch", 0) if newest else 0
        for file in (self.folder / BUNDLE, self.folder / SUMMARY):
            if file.exists():
                renamed = file.with_stem(f"{file.stem}-{epoch}")
                shutil.rmtree(renamed, ignore_errors=True)  # of an earlier try
                file.rename(renamed)
                logger.info(f"{file.name} after epoch {epoch} is kept as {renamed.name}.")
