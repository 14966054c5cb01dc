"""What a run is made of, before it trains: a frozen record, made in two steps.

    values -> recipe -> splits -> labels -> objects of the YAML -> loaders

The files of a run folder, in the order that a run writes them:

.lock                  locked while a run trains here
hyperparams.yaml       the YAML as it took effect, with the overrides
run_config.json        the run configuration, which a resumed run is compared with
tokenizer.model        the tokenizer of a recognizer
symbols.txt            the symbols of a synthesizer
lm.safetensors         the language models of a recognizer
data_report.html       the report on the data: hours, speakers, lengths, transcripts
data_report.json       the figures of this report
left_out.tsv           utterances that are left out, with reasons
misaligned.tsv         clips that the training of a synthesizer skips, if any
train.log              the printed messages, with the time
train_log.jsonl        figures of logged steps, epochs and tests; a test has its weights' epoch
tensorboard/           the same figures for TensorBoard, with the extra `curves`
curves.png             the curves of training, with the extra `curves`
figures/               the pictures that a Brain logs, `NAME-STEP.png`
nonfinite/             a step whose loss was not finite, for debugging
heartbeat-N            while process N trains: where it is; after a hang, its stacks
checkpoints/           the last checkpoint and the best ones
bundle/                the exported model with its fitted decoder, which the test measured
bundle-EPOCH/          the bundle after that epoch of a run that was continued
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
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from sbkit.base.errors import ConfigError, concerning
from sbkit.base.files import write_bytes_atomically
from sbkit.base.imports import require_unedited, user_sources
from sbkit.base.ranges import RANGES, require_in_range
from sbkit.bundle.task import dotted_path
from sbkit.checkpoint.checkpointer import NORMALIZER, TASK, Checkpointer
from sbkit.checkpoint.folder import newest_checkpoint
from sbkit.checkpoint.rng import isolated_rng
from sbkit.checkpoint.run_config import CHECKPOINTS, RunConfig, folder_override
from sbkit.config.hparams import OUTPUT_FOLDER, RECIPE, Settings, load_hparams, read_settings
from sbkit.config.hparams import resolve as resolve_yaml
from sbkit.config.overrides import nest_overrides
from sbkit.config.reached import list_reached
from sbkit.data.batch import Loaders, user_columns
from sbkit.data.sampler import RankSampler
from sbkit.data.splits import Splits
from sbkit.decoding.beam import BeamDecoder
from sbkit.decoding.decoder import LANGUAGE_MODELS_FILE
from sbkit.distributed.device import DeviceCounter, Placement, count_local_devices, resolve
from sbkit.evaluate.slices import require_columns
from sbkit.models.encoder import require_rate
from sbkit.models.pretrained.folder import load_weights
from sbkit.models.pretrained.hub import find_folder
from sbkit.text.normalization import table_to_store, text_table
from sbkit.text.tokenizer import Tokenizer
from sbkit.train.brain import Brain
from sbkit.train.initialize import init_sources, initialize_from, with_encoder_config
from sbkit.train.ownership import prepare_helpers
from sbkit.train.recipe import Recipe, load_recipe
from sbkit.train.stopping import is_finished

logger = logging.getLogger(__name__)

# -- the values ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunValues:
    """A YAML with its overrides: what is known of a run before anything is made.

    Attributes:
        overrides: nested; with `output_folder` if the YAML is that of a run.
        given_overrides: nested, without it.
        settings: the plain values of the YAML.
        given_recipe: replaces the recipe that the YAML names.
        count: counts the devices of a type.
    """

    yaml_file: Path
    overrides: Mapping[str, object]
    given_overrides: Mapping[str, object]
    settings: Settings
    given_recipe: type[Recipe] | None = None
    count: DeviceCounter = count_local_devices

    @property
    def folder(self) -> Path:
        return Path(str(self.settings[OUTPUT_FOLDER]))

    def load_recipe(self) -> Recipe:
        if self.given_recipe is not None:
            return self.given_recipe()
        return load_recipe(self.settings, self.yaml_file)

    @property
    def given_keys(self) -> set[str]:
        """The keys that the user has set, but not in the YAML."""
        return {*self.given_overrides, *(() if self.given_recipe is None else (RECIPE,))}

    def user_modules(self) -> frozenset[str]:
        """Return the user's modules that the YAML and the task of its recipe reach."""
        names = resolve_yaml(self.yaml_file, self.overrides).module_names
        return frozenset(user_sources(self.load_recipe().name, *names, with_unimported=True))

    def require_unedited(self) -> None:
        """Refuse modules of the user's that were edited after they were imported."""
        resolved = resolve_yaml(self.yaml_file, self.overrides)
        require_unedited(*given_modules(self.given_recipe), *resolved.module_names)

    def with_overrides(self, **overrides: object) -> "RunValues":
        changed = {**self.overrides, **overrides}
        return replace(self, overrides=changed, settings=read_settings(self.yaml_file, changed))

    def require_in_range(self) -> None:
        require_in_range(self.settings, {**RANGES, **self.load_recipe().ranges})

    def has_checkpoint(self) -> bool:
        return newest_checkpoint(self.folder / CHECKPOINTS) is not None

    def make_run_config(
        self, splits: Splits | None = None, label_file: bytes | None = None
    ) -> RunConfig:
        overrides = self.overrides
        if self.given_recipe is not None:
            overrides = {**overrides, "recipe": dotted_path(self.given_recipe)}
        return RunConfig.from_yaml(
            self.yaml_file,
            overrides,
            data=None if splits is None else splits.fingerprints,
            label_file=label_file,
        )


def read_values(
    yaml_file: Path | str,
    overrides: Mapping[str, object],
    *,
    recipe: type[Recipe] | None = None,
    count: DeviceCounter = count_local_devices,
) -> RunValues:
    """Read a YAML with its overrides; that of a run folder is for the folder where it lies.

    overrides: by key, such as `lr` or `Transformer.dropout`.
    recipe: replaces the recipe that the YAML names.
    """
    yaml_file = Path(yaml_file)
    given_overrides = nest_overrides(overrides)
    overrides = with_encoder_config(yaml_file, {**folder_override(yaml_file), **given_overrides})
    return RunValues(
        yaml_file=yaml_file,
        overrides=overrides,
        given_overrides=given_overrides,
        settings=read_settings(yaml_file, overrides),
        given_recipe=recipe,
        count=count,
    )


def given_modules(recipe: type[Recipe] | None) -> set[str]:
    """Return the modules of a recipe given in Python, of its Brain, and of their base classes."""
    classes = [] if recipe is None else [recipe, getattr(recipe, "brain", Brain)]
    return {base.__module__ for class_ in classes for base in class_.__mro__}


# -- what is made of them --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The data and the labels of a run, before the objects of its YAML are built.

    Attributes:
        labels: the tokenizer or the list of classes; None for a recipe without labels.
        label_files: the contents of the files of labels and language models, by name.
    """

    values: RunValues
    recipe: Recipe
    placement: Placement
    splits: Splits = field(repr=False)
    labels: Any
    label_files: Mapping[str, bytes] = field(repr=False)

    def make_run_config(self, helpers: Mapping[str, str] | None = None) -> RunConfig:
        label_file = self.label_files.get(self.recipe.label_file or "")
        resolved = resolve_yaml(self.values.yaml_file, self.values.overrides)
        modules, files = list_reached(resolved, given_modules(self.values.given_recipe))
        config = self.values.make_run_config(self.splits, label_file)
        return replace(config, modules=modules, files=files, helpers=helpers)

    def check_resumable(self, helpers: Mapping[str, str] | None = None) -> str | None:
        """Refuse to resume another run in the folder; describe changed values."""
        folder = self.values.folder
        has_ended = is_finished(folder, self.values.settings)
        return self.make_run_config(helpers).check_resumable(folder, has_ended=has_ended)


@dataclass(frozen=True, kw_only=True)
class RunSetup(RunData):
    """What a run is made of; `make_brain` makes the Brain that trains it.

    hparams: the values and objects of the YAML.
    """

    hparams: Settings = field(repr=False)
    loaders: Loaders = field(repr=False)


def prepare_run(values: RunValues) -> RunSetup:
    """Make all that a run needs, and write its label files, which the objects open."""
    data = prepare_data(values)
    write_label_files(data)
    return build_run(data)


def prepare_data(values: RunValues, placement: Placement | None = None) -> RunData:
    """Prepare the data and the labels of a run; nothing is written into its folder.

    placement: by default the one that the YAML declares.
    """
    with concerning("recipe"):
        recipe = values.load_recipe()
    placement = placement or choose_placement(values)
    with concerning("data_folder"):
        splits = prepare_splits(values, recipe)
    labels, label_files = prepare_labels(values, recipe, splits)
    return RunData(
        values=values,
        recipe=recipe,
        placement=placement,
        splits=splits,
        labels=labels,
        label_files=label_files,
    )


def build_run(data: RunData) -> RunSetup:
    """Build the objects of the YAML and the loaders; every rank does, once the labels are there."""
    hparams = build_objects(data)
    loaders = data.recipe.make_loaders(hparams, data.splits, data.labels, data.placement)
    dealer = loaders.train.batch_sampler
    if isinstance(dealer, RankSampler):
        dealer.use(data.recipe.make_sampler(hparams, loaders.splits, dealer.sampler))
    elif type(data.recipe).make_sampler is not Recipe.make_sampler:
        raise ConfigError(
            "`make_sampler` of the recipe has no effect on the training loader of its own "
            "`make_loaders`. Leave one of them out."
        )
    prepared: dict[str, Any] = {item.name: getattr(data, item.name) for item in fields(RunData)}
    return RunSetup(**prepared, hparams=hparams, loaders=loaders)


def choose_placement(values: RunValues) -> Placement:
    """Choose the device and the precision."""
    device, precision = values.settings.get("device"), values.settings.get("precision", "fp32")
    return resolve(device, precision, count=values.count)


def prepare_splits(values: RunValues, recipe: Recipe) -> Splits:
    """Prepare the data that is not prepared yet."""
    splits = recipe.prepare_splits(values.settings)
    columns = {name: user_columns(rows.column_names) for name, rows in splits.test.items()}
    require_columns(values.settings["report_by"] or (), columns)
    return splits


def prepare_labels(
    values: RunValues, recipe: Recipe, splits: Splits
) -> tuple[Any, Mapping[str, bytes]]:
    """Open the tokenizer or the list of classes; make it if the run folder has none.

    Returns it with the contents of its files, of those of the run folder or of new ones.
    """
    names = [name for name in (recipe.label_file, LANGUAGE_MODELS_FILE) if name]
    with TemporaryDirectory(prefix="sbkit-labels") as scratch:
        for name in names:
            if (file := values.folder / name).is_file():
                if name == recipe.label_file:
                    recipe.read_labels(file, file.read_bytes())  # an error names the run folder
                shutil.copyfile(file, Path(scratch, name))
        settings = values.settings.with_values({OUTPUT_FOLDER: scratch})
        labels = recipe.prepare_labels(settings, splits)
        files = [file for name in names if (file := Path(scratch, name)).is_file()]
        return labels, {file.name: file.read_bytes() for file in files}


def write_label_files(data: RunData, folder: Path | None = None) -> None:
    """Write the tokenizer, list of classes and language models, by default into the run folder."""
    folder = folder or data.values.folder
    for name, content in data.label_files.items():
        file = folder / name
        is_there = file.is_file() and file.read_bytes() == content
        if not is_there:
            folder.mkdir(parents=True, exist_ok=True)
            write_bytes_atomically(file, content)
        elif name == data.recipe.label_file and not data.values.has_checkpoint():
            logger.info(
                f"note: {file} was there before the first checkpoint. To have it made again, "
                "remove it."
            )


def build_objects(data: RunData) -> Settings:
    """Build the objects of the YAML, with random numbers from its seed."""
    values = data.values
    with isolated_rng(torch.device("cpu")):  # where they are built, also for another machine
        torch.manual_seed(values.settings["seed"])
        hparams = load_hparams(values.yaml_file, values.overrides)
    if "sample_rate" in hparams:
        require_rate(hparams, hparams["sample_rate"])
    if isinstance(checkpointer := hparams["checkpointer"], Checkpointer):
        checkpointer.meta[TASK] = data.recipe.name
        if isinstance(data.labels, Tokenizer):
            table = text_table(values.settings["language"], values.settings.get("text"))
            checkpointer.meta[NORMALIZER] = table_to_store(table)
    return hparams


def build_again(setup: RunSetup, **overrides: object) -> RunSetup:
    """Return a setup with other objects of the YAML, of the same data, labels and loaders."""
    changed = replace(setup, values=setup.values.with_overrides(**overrides))
    return replace(changed, hparams=build_objects(changed))


def load_initial_weights(setup: RunSetup) -> list[str]:
    """Load `pretrained`, and the fitting part of `init_from`, into the objects of a setup.

    Returns lines that describe the loaded weights.
    """
    values, hparams = setup.values, setup.hparams
    lines: list[str] = []
    if name := values.settings.get("pretrained"):
        source = (values.settings.get("encoder_config") or {}).get("source") or {}
        with concerning("pretrained"):
            folder = find_folder(name, source.get("revision"))
            lines.append(load_weights(folder, hparams.values()))
    if sources := init_sources(values.settings):
        root = resolve_yaml(values.yaml_file, values.overrides).tree
        with concerning("init_from"):
            parts = (*setup.recipe.brain.parts, *setup.recipe.brain.optional_parts)
            lines += initialize_from(sources, hparams, setup.recipe, root, parts)
    return lines


def make_brain(setup: RunSetup, *, can_fit: bool = False, **run_opts: Any) -> Brain:
    """Make the Brain of a recipe.

    can_fit: it will train on the loaders of the setup.
    run_opts: take precedence over the YAML.
    """
    recipe, hparams = setup.recipe, setup.hparams.with_values({RECIPE: setup.recipe})
    if isinstance(hparams.get("decoder"), BeamDecoder):
        recipe.require_frames("`decoder` in the YAML")
    opt_class = hparams.get("opt_class") if "optimizers" in hparams else hparams["opt_class"]
    brain = recipe.brain(
        modules={"model": hparams["model"]},
        opt_class=opt_class,
        hparams=hparams,
        run_opts={"device": setup.placement.device, **run_opts},
        checkpointer=hparams["checkpointer"],
    )
    if recipe.has_model and not isinstance(brain.network, recipe.model_class()):
        raise ConfigError(
            f"`network` of the Brain must be a {recipe.model_class().__name__}, which bundles of "
            f"this run contain, but is a {type(brain.network).__name__}."
        )
    prepare_helpers(brain)
    brain.loaders = setup.loaders if can_fit else None
    return brain
