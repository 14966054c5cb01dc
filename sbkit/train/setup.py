"""What a run is made of before it trains. Each record includes the one before it.

    RunSpec (values) -> RunData (recipe, splits, labels) -> PreparedRun (objects, loaders) -> Brain

The files of a run folder, in the order that a run writes them:

.lock                  locked while a run trains here
hyperparams.yaml       the YAML as it took effect, with the overrides
run_config.json        the description of the run, which a resumed run is compared with
symbols.txt            the symbols of a synthesizer
lm.safetensors         the language models of a recognizer
labels.json            which of the files of labels this run has made, and from what
data_report.json       figures of the data: hours, speakers, lengths, texts
left_out.tsv           utterances that are left out, with reasons
misaligned.tsv         clips that the training of a synthesizer skips, if any
before_training.json   the scores of the recognizer that the run starts from, if it starts from one
train.log              the printed messages, with the time
train_log.jsonl        figures of logged steps, epochs and tests; a test has its weights' epoch
tensorboard/           the same figures for TensorBoard, with the extra `curves`
curves.png             the curves of training, with the extra `curves`
figures/               the pictures that a Brain logs, `NAME-STEP.png`
heartbeat-N            while process N trains: where it is; after a hang, its stacks
checkpoints/           the last checkpoint and the best ones
bundle/                the exported model with its fitted decoder, which the test measured
bundle-EPOCH/          the bundle after that epoch of a run that was continued
wer_SET.txt            every utterance of a test set of a recognizer, with its errors, for people
utterances_SET.jsonl   the same for programs
codes_SET.tsv          the use of the codes of a codec, also as `.png`
speech_SET.png         utterances of a test set as recorded and as synthesized, also as `.mp3`
report_by_SET.tsv      with `report_by`: the metrics by the values of these columns
summary.json           the results and their provenance
summary-EPOCH.json     the results after that epoch of a run that was continued
report.html            the results as one page with audio, which loads nothing from elsewhere
"""

import json
import logging
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch

from sbkit.base.checksums import READ_ERRORS, checksum
from sbkit.base.errors import ConfigError, SbkitError, concerning
from sbkit.base.files import from_plain, read_file, to_json, write_bytes_atomically
from sbkit.base.imports import require_unedited, search_folders, user_code
from sbkit.base.versions import data_versions, versions
from sbkit.bundle.side_inputs import SIDE_SHAPES, make_side_inputs, shapes_of
from sbkit.checkpoint.folder import TASK
from sbkit.checkpoint.ranking import NORMALIZER
from sbkit.checkpoint.rng import isolated_rng
from sbkit.checkpoint.run_config import (
    CHECKPOINTS,
    LIMIT_PATH,
    RunDescription,
    describe_spec,
    has_checkpoint,
    read_description,
    require_resumable,
)
from sbkit.config.dependencies import hash_dependencies
from sbkit.config.document import Document, children, dotted, read_document
from sbkit.config.hparams import (
    EPOCH_COUNTER,
    EPOCH_LIMIT,
    OUTPUT_FOLDER,
    RECIPE,
    RunSpec,
    Settings,
    build_hparams,
    make_spec,
)
from sbkit.config.keys import KEYS, Key
from sbkit.config.overrides import nest_overrides
from sbkit.data.batch import (
    Collate,
    CollateWithSides,
    Loaders,
    UtteranceDataset,
    length_of,
    user_columns,
)
from sbkit.data.forgetting import find_forgotten
from sbkit.data.sampler import RankSampler, StatefulSampler
from sbkit.data.splits import Splits
from sbkit.data.work_units import short_digest
from sbkit.decoding.beam import BeamDecoder
from sbkit.decoding.decoder import LANGUAGE_MODELS_FILE
from sbkit.distributed.device import Placement, device_counter_for, resolve_placement
from sbkit.distributed.ranks import rank
from sbkit.evaluate.slices import require_columns
from sbkit.models.encoder import require_rate
from sbkit.models.pretrained.encoder import fill_output_layer, warn_of_padding
from sbkit.models.pretrained.folder import load_weights
from sbkit.text.normalization import TEXT_VERSION, table_to_store
from sbkit.train.brain import Brain
from sbkit.train.initialize import (
    PRETRAINED,
    init_folders,
    initialize_from,
    pretrained_folder,
    with_encoder_config,
)
from sbkit.train.ownership import prepare_helpers
from sbkit.train.recipe import Recipe, find_recipe, load_recipe
from sbkit.train.stopping import find_ends

LABEL_RECORD_FILE = "labels.json"

logger = logging.getLogger(__name__)

# ---- the values


def declare_run(
    yaml_file: Path | str,
    overrides: Mapping[str, object],
    *,
    recipe: type[Recipe] | None = None,
    target: str | None = None,
) -> RunSpec:
    """Read the YAML of a run with its overrides, and the sizes of its pretrained encoder.

    overrides, recipe, target: as of `read_spec`.
    """
    user_overrides = nest_overrides(overrides)
    declared = read_document(yaml_file)
    keys = keys_of(declared, user_overrides, recipe)
    complete = with_encoder_config(declared, user_overrides, keys)
    spec = make_spec(declared, complete, keys=keys, recipe=recipe, target=target)
    return replace(spec, user_overrides=user_overrides)


def keys_of(
    declared: Document, overrides: Mapping[str, object], recipe: type[Recipe] | None = None
) -> Mapping[str, Key]:
    """Return what the recipe of a run declares about keys.

    recipe: replaces the one that the YAML names.
    """
    name = str(overrides.get(RECIPE) or declared.root.get(RECIPE))
    # A run folder may be a stranger's: reading its YAML must not import the stranger's modules.
    is_trusted = name.startswith(("sbkit.", "recipes.")) or name.rpartition(".")[0] in sys.modules
    if recipe is None and (is_trusted or not declared.is_in_run_folder):
        with suppress(SbkitError):  # a recipe that cannot be imported is found later
            recipe = find_recipe(name, declared)
    return KEYS if recipe is None else {**KEYS, **recipe.keys}


def user_modules_of(spec: RunSpec) -> frozenset[str]:
    """Return the user's modules that a YAML and the task of its recipe reach."""
    names = (load_recipe(spec).task.name, *spec.module_names)
    return frozenset(user_code(*names, with_unimported=True))


def require_unedited_modules(spec: RunSpec) -> None:
    """Refuse modules of the user's that were edited after they were imported."""
    search_folders(spec.document.module_folders)  # another run's may be searched first by now
    require_unedited(*spec.recipe_modules, *spec.module_names)


# ---- data and objects


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The values, data and labels of a run, before the objects of its YAML are built.

    Attributes:
        labels: what the recipe's `prepare_labels` returned; None without labels.
        label_files: the contents of the files of labels and language models, by name.
    """

    spec: RunSpec
    recipe: Recipe
    splits: Splits = field(repr=False)
    labels: Any
    label_files: Mapping[str, bytes] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class PreparedRun(RunData):
    """All that a run is made of; `make_brain` makes the Brain that trains it.

    hparams: the values and objects of the YAML.
    loaders: make the batches of all splits; their own `splits` lack the utterances that training
        leaves out.
    """

    placement: Placement
    hparams: Settings = field(repr=False)
    loaders: Loaders = field(repr=False)


def describe_run(data: RunData, helpers: Mapping[str, str] | None = None) -> RunDescription:
    """Describe a run whose data is prepared; `helpers` are those of its Brain."""
    # Language models may be made again, and the record lists the other files.
    others = (LANGUAGE_MODELS_FILE, LABEL_RECORD_FILE)
    label_files = {k: content for k, content in data.label_files.items() if k not in others}
    return describe_spec(
        data.spec,
        data=data.splits.fingerprints,
        label_files=label_files or None,
        helpers=helpers,
        dependencies=hash_dependencies(data.spec),
    )


def require_own_folder(spec: RunSpec, description: RunDescription) -> str | None:
    """Refuse to resume another run in the folder; describe changed values."""
    before = (has_checkpoint(spec.folder) and read_description(spec.folder).data) or {}
    now = description.data or before
    if splits := find_forgotten({k: v for k, v in before.items() if v != now.get(k)}):
        raise ConfigError(
            f"Clips of {' and '.join(splits)} were forgotten (`sbkit cache forget` or `prune`) "
            f"after the run in {spec.folder} began, so it cannot be resumed. For a run on the "
            "other clips, choose another `output_folder`."
        )
    return require_resumable(spec.folder, description, ends=find_ends_of(spec))


def find_ends_of(spec: RunSpec) -> dict[str, float]:
    """Return what has ended the run in the folder, by the keys that the user may raise."""
    limit = dotted(spec.source_of(EPOCH_COUNTER, EPOCH_LIMIT))
    ends = find_ends(spec.folder, spec.settings, spec.max_epochs)
    return {limit if key == LIMIT_PATH else key: value for key, value in ends.items()}


def require_files_of_run(spec: RunSpec, recipe: Recipe) -> None:
    """Refuse an object that opens or saves a file of the run elsewhere.

    The run prepares the labels and language models, resumes, tests and exports by its own files.
    """
    files = {
        ("checkpointer", "checkpoints_dir"): CHECKPOINTS,
        (recipe.task.label_key, "model_file"): recipe.task.label_file,
        (recipe.task.label_key, "file"): recipe.task.label_file,
        ("decoder", "language_models"): LANGUAGE_MODELS_FILE,
        **recipe.task.further_files,
    }
    for (key, argument), name in files.items():
        declared = dict(children(spec.tree.get(key))).get(argument)
        if name is None or not isinstance(declared, str):
            continue
        if Path(declared).resolve() != (spec.folder / name).resolve():
            raise ConfigError(
                f"A run uses its own {spec.folder / name}, but `{key}.{argument}` is {declared}. "
                f"Write `{argument}: !ref <output_folder>/{name}`.",
                keys=(key, argument),
            )


def prepare_data(spec: RunSpec) -> RunData:
    """Prepare the data and the labels of a run; nothing is written into its folder."""
    with concerning("recipe"):
        recipe = load_recipe(spec)
    require_files_of_run(spec, recipe)
    with concerning("data_folder"):
        splits = prepare_splits(spec, recipe)
    labels, files = prepare_labels(spec, recipe, splits)
    return RunData(spec=spec, recipe=recipe, splits=splits, labels=labels, label_files=files)


def build_run(data: RunData, placement: Placement) -> PreparedRun:
    """Build the objects of the YAML and the loaders; every rank does, once the labels are there."""
    from speechbrain.dataio.dataloader import LoopedLoader  # data is prepared without it

    recipe = data.recipe
    hparams = build_objects(data)
    loaders = recipe.make_loaders(hparams, data.splits, data.labels, placement)
    if recipe.task.side_fields:
        add_side_inputs(data, hparams, loaders)
    dealer = getattr(loaders.train, "batch_sampler", None)
    if length_of(loaders.train) is None:
        raise ConfigError(
            "`train` of the recipe's `make_loaders` has no length, so no epoch would end. Wrap it: "
            "speechbrain.dataio.dataloader.LoopedLoader(loader, epoch_length=STEPS)",
            keys=(RECIPE,),
        )
    if isinstance(loaders.train, LoopedLoader):
        hparams["checkpointer"].add_recoverable("train_loader", loaders.train)
    if isinstance(dealer, RankSampler):
        dealer.use(recipe.make_sampler(hparams, loaders.splits, dealer.sampler))
        if isinstance(dealer.sampler, StatefulSampler):
            hooks = {"custom_save_hook": RankSampler.save, "custom_load_hook": RankSampler.load}
            hparams["checkpointer"].add_recoverable("sampler", dealer, **hooks)
    elif type(recipe).make_sampler is not Recipe.make_sampler:
        raise ConfigError(
            "`make_sampler` of the recipe has no effect on the training loader of its own "
            "`make_loaders`. Leave one of them out."
        )
    objects = {"placement": placement, "hparams": hparams, "loaders": loaders}
    return PreparedRun(**vars(data) | objects)


def add_side_inputs(data: RunData, hparams: Settings, loaders: Loaders) -> None:
    """Have the loaders add the task's side inputs to each batch; keep an example's shapes.

    Raises ConfigError for a set without a column that they are made from.
    """
    task, rate = data.recipe.task, data.spec.settings["sample_rate"]
    for name, rows in loaders.splits.named().items():
        for column, declared in task.side_fields.items():
            if column not in rows.column_names and declared.default is None:
                raise ConfigError(
                    f"{name} has no column `{column}`, which models of {task.name} need beside "
                    "the audio.",
                    keys=("data_folder",),
                )
    if data.spec.settings["concat_prob"] > 0:
        raise ConfigError(
            "`concat_prob` joins utterances, whose side inputs may differ. Set it to 0.",
            keys=("concat_prob",),
        )
    row = UtteranceDataset(loaders.splits.train)[0]
    example = make_side_inputs(task, data.labels, row, sample_rate=rate)
    hparams["checkpointer"].meta[SIDE_SHAPES] = shapes_of(example)
    sets = [*loaders.valid.values(), *loaders.test.values()]
    for loader in (loaders.train, loaders.for_statistics, *sets):
        collate = cast(Collate, loader.collate_fn)
        loader.collate_fn = CollateWithSides(collate, task, data.labels, rate)


def choose_placement(spec: RunSpec) -> Placement:
    """Choose the device and the precision."""
    device, precision = spec.settings["device"], spec.settings["precision"]
    return resolve_placement(device, precision, count=device_counter_for(spec.target))


def prepare_splits(spec: RunSpec, recipe: Recipe) -> Splits:
    """Prepare the data that is not prepared yet."""
    splits = recipe.prepare_splits(spec.settings)
    columns = {name: user_columns(rows.column_names) for name, rows in splits.test.items()}
    require_columns(spec.settings["report_by"] or (), columns)
    return splits


def prepare_labels(
    spec: RunSpec, recipe: Recipe, splits: Splits
) -> tuple[Any, Mapping[str, bytes]]:
    """Open the labels of the task; make them if the run folder has none.

    All files that the recipe writes are the run's. A file that an earlier start has made of other
    inputs is made again, unless a checkpoint was trained with it. A file of the user's is kept.
    Language models name their inputs themselves.

    Returns them with the contents of their files, of those of the run folder or of new ones.
    """
    # Rank 0 has made what the others find.
    is_first = rank() == 0 and not has_checkpoint(spec.folder)
    made_from = digest_label_inputs(spec, recipe, splits) if is_first else None
    record = LabelRecord.read(spec.folder)
    given_names = {LANGUAGE_MODELS_FILE}
    further_files = recipe.task.further_files.values()
    known = (recipe.task.label_file, LANGUAGE_MODELS_FILE, *further_files, *record.files)
    names = dict.fromkeys(filter(None, known))
    with TemporaryDirectory(prefix="sbkit-labels") as scratch:
        for name in names:
            if not (file := spec.folder / name).is_file():
                continue
            if checksum(file) != record.files.get(name):
                given_names.add(name)
            elif made_from not in (None, record.made_from):
                continue
            if name == recipe.task.label_file:
                recipe.task.read_labels(file, file.read_bytes())  # an error names the run folder
            shutil.copyfile(file, Path(scratch, name))
        settings = spec.settings.with_values({OUTPUT_FOLDER: scratch})
        labels = recipe.prepare_labels(settings, splits)
        files = sorted(file for file in Path(scratch).iterdir() if file.is_file())
        contents = {file.name: file.read_bytes() for file in files}
        if made_from is not None and files:
            sums = {file.name: checksum(file) for file in files if file.name not in given_names}
            new_record = to_json(asdict(LabelRecord(made_from, sums)), indent=1)
            contents = {LABEL_RECORD_FILE: f"{new_record}\n".encode(), **contents}
        return labels, contents


def write_label_files(data: RunData) -> None:
    """Write the files of the labels and the language models into the run folder."""
    folder = data.spec.folder
    if data.label_files:
        folder.mkdir(parents=True, exist_ok=True)
    changed = {
        file: content
        for name, content in data.label_files.items()
        if not ((file := folder / name).is_file() and file.read_bytes() == content)
    }
    if folder / LABEL_RECORD_FILE in changed:  # a file that it does not list would be the user's
        for file in changed:
            file.unlink(missing_ok=True)
    for file, content in changed.items():
        write_bytes_atomically(file, content)
    label_file = data.recipe.task.label_file or ""
    is_users = label_file in data.label_files.keys() - LabelRecord.read(folder).files.keys()
    if is_users and not has_checkpoint(folder):
        logger.info(
            f"note: {folder / label_file} was there before this run, and is used as it is. To have "
            "it made, remove it."
        )


@dataclass(frozen=True)
class LabelRecord:
    """The files of labels that a run has made before its first checkpoint, and from what.

    made_from: what `digest_label_inputs` returned.
    files: their SHA-256 by name. Files of the user's are not among them.
    """

    made_from: str = ""
    files: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "LabelRecord":
        """Read the record of a run folder; it is empty if there is none, or if it is damaged."""
        with suppress(*READ_ERRORS):
            return from_plain(cls, json.loads(read_file(folder / LABEL_RECORD_FILE)))
        return cls()


def digest_label_inputs(spec: RunSpec, recipe: Recipe, splits: Splits) -> str:
    """Return a digest of all that may decide the labels: values, data, code and initial models."""
    described = describe_spec(spec, data=splits.fingerprints, dependencies=hash_dependencies(spec))
    ignored = {name for name, key in spec.keys.items() if key.may_change != "never"}
    values = {k: value for k, value in described.values.items() if k.split(".")[0] not in ignored}
    folders = init_folders(spec.settings)
    if spec.settings[PRETRAINED]:
        folders.append(pretrained_folder(spec.settings))
    stats = [(file, file.stat()) for folder in folders for file in sorted(folder.glob("*.*"))]
    return short_digest(
        [
            *(values, described.data, described.modules, described.files),
            [[file.name, stat.st_size, stat.st_mtime_ns] for file, stat in stats],
            *(versions(), data_versions(), TEXT_VERSION, recipe.task.label_version),
        ]
    )


def build_objects(data: RunData) -> Settings:
    """Build the objects of the YAML, with random numbers from its seed."""
    spec = data.spec
    with isolated_rng(torch.device("cpu")):  # where they are built, also for another machine
        torch.manual_seed(spec.settings["seed"])
        hparams = build_hparams(spec)
    require_rate(hparams, hparams["sample_rate"])
    meta = hparams["checkpointer"].meta
    meta[TASK] = data.recipe.task.name
    if data.recipe.task.predicts == "text":
        meta[NORMALIZER] = table_to_store(data.splits.text_table(spec.settings))
    return hparams


def build_again(run: PreparedRun) -> PreparedRun:
    """Return a run with other objects of the YAML, of the same data, labels and loaders."""
    return replace(run, hparams=build_objects(run))


def load_initial_weights(run: PreparedRun) -> list[str]:
    """Load `pretrained`, and the fitting part of `init_from`, into the objects of a run.

    Returns lines that describe the loaded weights.
    """
    settings, hparams = run.spec.settings, run.hparams
    lines: list[str] = []
    if settings[PRETRAINED]:
        with concerning(PRETRAINED):
            lines.append(load_weights(pretrained_folder(settings), hparams.values()))
        warn_of_padding(hparams.get("compute_features"), hparams.get("Transformer"))
        fill_output_layer(hparams)
    if folders := init_folders(settings):
        with concerning("init_from"):
            lines += initialize_from(folders, hparams, run.recipe.task, run.spec.tree)
    return lines


def make_brain(run: PreparedRun, **run_opts: Any) -> Brain:
    """Make the Brain of a recipe; `run_opts` take precedence over the YAML."""
    recipe, hparams = run.recipe, run.hparams.with_values({RECIPE: run.recipe})
    task = recipe.task
    if isinstance(hparams.get("decoder"), BeamDecoder):
        task.require_frames("`decoder` in the YAML")
    opt_class = hparams.get("opt_class") if "optimizers" in hparams else hparams["opt_class"]
    brain = recipe.brain_class()(
        modules={"model": hparams["model"]},
        opt_class=opt_class,
        hparams=hparams,
        run_opts={"device": run.placement.device, **run_opts},
        checkpointer=hparams["checkpointer"],
    )
    if task.has_model and not isinstance(brain.network, task.model_class()):
        raise ConfigError(
            f"`network` of the Brain must be a {task.model_class().__name__}, which bundles of "
            f"this run contain, but is a {type(brain.network).__name__}."
        )
    prepare_helpers(brain)
    brain.loaders = run.loaders
    return brain
