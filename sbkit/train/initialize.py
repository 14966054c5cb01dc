"""Start a run from the weights of another one, or from a pretrained encoder.

`init_from`: weights that fit by name and shape are loaded, of several models their mean. Names
follow the YAML's parts, such as `CNN.conv1.weight`, so the other model may have other parts, or
list them in another order. If its labels differ, heads and embeddings are loaded label by label,
even if the sizes agree: characters are numbered by how often they occur. The sample rate,
the features, and the language and form of texts must be equal or declared. Other settings that no
shape reveals, such as the number of heads, are not compared. Nothing from the other folder is
built.

`pretrained` names the folder of an encoder, or a model of Hugging Face's hub. Its sizes become the
plain data `encoder_config` when the run begins: the resolved YAML, the run configuration and the
bundle hold every size, and the run no longer needs the folder.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn

from sbkit.base.errors import BundleError, ConfigError
from sbkit.base.files import RUN_YAML, parsing_errors, read_file
from sbkit.base.messages import listed, short_value
from sbkit.bundle.config import CONFIG_FILE, WEIGHTS_FILE, BundleFiles, Plain
from sbkit.bundle.module_spec import SpecWriter
from sbkit.bundle.task import Task
from sbkit.checkpoint.ranking import SavedCheckpoints
from sbkit.checkpoint.run_config import BUNDLE, CHECKPOINTS, has_checkpoint, read_description
from sbkit.checkpoint.weights import (
    average_checkpoints,
    average_files,
    describe_tensor,
    part_names_of_yaml,
    tensors_by_part,
    to_part_name,
)
from sbkit.config.document import Document, holds_object, plain_value
from sbkit.config.hparams import make_spec, read_spec
from sbkit.config.keys import KEYS, Key, require_values, with_defaults
from sbkit.evaluate.run_results import ends_with_start
from sbkit.models.encoder_parts import label_embedding, label_heads
from sbkit.models.pretrained.encoder import text_decoder_of
from sbkit.models.pretrained.folder import (
    MAX_LISTED_TENSORS,
    check_tensors,
    complete_config,
    read_encoder_config,
)
from sbkit.models.pretrained.hub import find_folder, find_local_folder
from sbkit.models.pretrained.lora import merge_adapters
from sbkit.text.normalization import TEXT_CHOICES, TextTable, language_table, text_table

INIT_REQUIREMENT = "be a run folder or a bundle for `init_from`"
INIT_FIX = "Name another one."
# Keys of the YAML
PRETRAINED, REVISION, ENCODER_CONFIG = "pretrained", "pretrained_revision", "encoder_config"
DIFFERS, SAMPLE_RATE_KEY, FEATURES = "init_from_differs", "sample_rate", "compute_features"
LANGUAGE_KEY, TEXT_KEY = "language", "text"


def init_folders(settings: Mapping[str, Any]) -> list[Path]:
    """List the runs and bundles that `init_from` names."""
    names = settings.get("init_from") or []
    return [*map(Path, [names] if isinstance(names, str) else names)]


def pretrained_folder(settings: Mapping[str, Any]) -> Path:
    """Return the folder of `pretrained`, in the revision whose sizes the run began with."""
    source = (settings.get(ENCODER_CONFIG) or {}).get("source") or {}
    return find_folder(settings[PRETRAINED], source.get("revision"))


def initialize_from(
    folders: Sequence[Path],
    hparams: Mapping[str, Any],
    task: Task,
    root: Mapping[str, Any],
) -> list[str]:
    """Load the weights of a run or bundle into the model of a task, as far as they fit.

    folders: if there are several, of one model, labels and text table, their mean is loaded.
    root: the resolved YAML of this run.

    Returns lines that list which tensors are loaded, which by label, which are new and why, and
    which tensors of the folder are not used.
    """
    folder, *others = folders
    place = ("the mean of " if others else "") + ", ".join(map(str, folders))
    source_labels, labels = _label_names(folder, hparams, task)
    for other in others:
        for thing, differs in (
            (task.label_key, _label_names(other, hparams, task)[0] != source_labels),
            ("text table", text_table_of(other) != text_table_of(folder)),
        ):
            if differs:
                raise ConfigError(f"`init_from`: {other} has another {thing} than {folder}.")
    weights = average_files(folders, read_named_weights)
    tensors = tensors_by_part(hparams)
    labeled_ids = _ids_by_label(hparams, task, len(labels)) if source_labels != labels else ()
    source_row = {label: row for row, label in enumerate(source_labels)}
    rows = [(source_row[label], row) for row, label in enumerate(labels) if label in source_row]
    misfits = _misfits(weights, tensors)
    names_loaded: list[str] = []
    names_by_label: list[str] = []
    new_tensors: list[str] = []
    with torch.no_grad():
        for name, tensor in tensors.items():
            has_labels = id(tensor) in labeled_ids
            misfit = misfits[name]
            if has_labels and _load_rows(weights.get(name), tensor, rows, len(source_labels)):
                names_by_label.append(name)
            elif misfit is not None or has_labels:
                new_tensors.append(f"{name} ({misfit or 'of other labels there'})")
            else:
                tensor.copy_(weights[name])
                names_loaded.append(name)
    unused_names = [name for name in weights if name not in tensors]
    if not names_loaded and not names_by_label:
        names = listed([*weights], max_names=MAX_LISTED_TENSORS)
        raise BundleError(
            f"`init_from`: none of the tensors in {place} fits by name and shape ({names})."
        )
    loaded_parts = {name.partition(".")[0] for name in (*names_loaded, *names_by_label)}
    keys = [SAMPLE_RATE_KEY, FEATURES]
    if task.predicts == "text" and not loaded_parts.isdisjoint(task.heads):
        keys += [LANGUAGE_KEY, TEXT_KEY]
    differences = [check_same_settings(folder, root, keys) for folder in folders]
    lines = [f"init_from {place}: {len(names_loaded)} tensors are loaded{_names(names_loaded)}"]
    if names_by_label:
        count = f"{len(rows)} of {len(labels)} rows"
        lines.append(f"init_from: {count} by label{_names(names_by_label)}")
    lines.append(f"init_from: {len(new_tensors)} tensors are new{_names(new_tensors)}")
    lines.append(f"init_from: {len(unused_names)} tensors there are not used{_names(unused_names)}")
    return [*dict.fromkeys(chain(lines, *differences))]


def _misfits(weights: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, str | None]:
    """Return why a weight cannot be loaded into the tensor of its name; None if it can."""
    misfits = {name: _misfit(weights, tensors, name) for name in tensors}
    buffers = [name for name, tensor in tensors.items() if not isinstance(tensor, nn.Parameter)]
    module_of = {name: name.rpartition(".")[0] for name in buffers}
    # If one buffer of a module does not fit, none is loaded: statistics of another size would not
    # be measured again if the count of their frames were loaded.
    mismatched = {module_of[name] for name in buffers if misfits[name] is not None}
    for name in buffers:
        if misfits[name] is None and module_of[name] in mismatched:
            misfits[name] = "beside buffers that do not fit"
    return misfits


def _misfit(weights: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str) -> str | None:
    there, here = describe_tensor(weights, name), describe_tensor(tensors, name)
    if there != here:
        return f"{there} there, {here} here"
    value = weights[name]
    is_parameter = isinstance(tensors[name], nn.Parameter)
    unusable = ~value.isfinite() if is_parameter else value.isnan()  # a buffer may be a mask
    return "not finite there" if unusable.any() else None


def _names(names: list[str]) -> str:
    return f": {listed(names, max_names=MAX_LISTED_TENSORS)}." if names else "."


def _label_names(
    folder: Path, hparams: Mapping[str, Any], task: Task
) -> tuple[list[str], list[str]]:
    """Return the labels of the folder's outputs, none if no file lists them, and of the task's."""
    if task.label_file is None or (labels := hparams.get(task.label_key)) is None:
        return [], []
    file = folder / task.label_file
    names = [*task.label_names(labels)]
    if not file.exists():
        return [], names
    return [*task.label_names(task.read_labels(file, read_file(file)))], names


def _ids_by_label(hparams: Mapping[str, Any], task: Task, num_labels: int) -> set[int]:
    """Return the ids of the tensors in heads and embeddings, which have a row for each label."""
    heads = label_heads(hparams, task.heads).values()
    embeddings = map(label_embedding, hparams.values())
    parts = [part for part in (*heads, *embeddings) if part is not None]
    for module in hparams["model"].modules():  # also embeddings that the task does not name
        if isinstance(module, nn.Embedding) and module.num_embeddings == num_labels:
            parts.append(module)
    return {id(t) for part in parts for t in part.state_dict(keep_vars=True).values()}


def _load_rows(weight: Any, tensor: Tensor, rows: list[tuple[int, int]], num_labels: int) -> bool:
    """Copy the rows of common labels, pairs of indices; return False if they do not fit."""
    expected_shape = (num_labels, *tensor.shape[1:])
    if not rows or not isinstance(weight, Tensor) or weight.shape != expected_shape:
        return False
    source_rows, new_rows = torch.tensor(rows).unbind(1)
    if len(tensor) <= new_rows.max() or not weight[source_rows].isfinite().all():
        return False
    tensor[new_rows] = weight[source_rows].to(tensor)
    return True


def read_named_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a bundle, or the tested weights of a run, by part and path."""
    if ends_with_start(folder):  # its checkpoints are not what was tested
        folder = folder / BUNDLE
    with parsing_errors(folder, INIT_REQUIREMENT, fix=INIT_FIX):
        if (folder / WEIGHTS_FILE).is_file():
            files = BundleFiles(folder)
            weights = load_safetensors(files.read(WEIGHTS_FILE))
            parts = [*files.config.model]
        elif (folder / CHECKPOINTS).is_dir():
            parts = part_names_of_yaml(read_spec(folder / RUN_YAML).tree)
            saved = SavedCheckpoints(folder / CHECKPOINTS)
            best = saved.find_averaged() or saved.find_whole(1)
            if not best:
                raise BundleError(f"`init_from`: {folder} has no undamaged checkpoint.")
            weights = merge_adapters(average_checkpoints(best, "model"))
        else:
            raise BundleError(
                f"`init_from`: {folder} has neither {CHECKPOINTS}/ of a run nor {WEIGHTS_FILE}."
            )
    return {to_part_name(name, parts): tensor for name, tensor in weights.items()}


# ---- settings that decide what weights mean


def check_same_settings(
    folder: Path, root: Mapping[str, Any], compared: Sequence[str]
) -> list[str]:
    """Compare settings of `init_from` with a run's; return lines about declared differences.

    root: the resolved YAML of the run.
    compared: the keys of the settings.
    """
    source_settings, settings = _settings_of_folder(folder), _settings_of_yaml(root)
    differences = {
        key: f"`{key}` is {short_value(source_settings[key])} there and {short_value(value)} here"
        for key, value in settings.items()
        if key in compared and key in source_settings and _differs(key, source_settings[key], value)
    }
    names = plain_value(root.get(DIFFERS)) or []
    declared = {names} if isinstance(names, str) else {*names}
    if undeclared := [key for key in differences if key not in declared]:
        raise ConfigError(
            f"`init_from`: {folder} was trained with other settings: "
            f"{'; '.join(differences[key] for key in undeclared)}. To change them, write "
            f"`{DIFFERS}: [{', '.join(undeclared)}]`."
        )
    lines = [f"{DIFFERS}: {difference}" for difference in differences.values()]
    unused = sorted(declared.difference(differences))
    return lines + [f"{DIFFERS}: `{key}` does not differ" for key in unused]


def _settings_of_folder(folder: Path) -> dict[str, Plain]:
    if not (folder / WEIGHTS_FILE).is_file():
        return _settings_of_yaml(read_spec(folder / RUN_YAML).tree)
    config = BundleFiles(folder).config
    settings = {SAMPLE_RATE_KEY: config.sample_rate, LANGUAGE_KEY: config.language or "und"}
    features = {FEATURES: config.parts[FEATURES]} if FEATURES in config.parts else {}
    return {**settings, **features, TEXT_KEY: _text(config.text_table)}


def _settings_of_yaml(root: Mapping[str, Any]) -> dict[str, Plain]:
    keys = (SAMPLE_RATE_KEY, FEATURES, LANGUAGE_KEY)
    settings = {key: SpecWriter(key, {}).write(root[key]) for key in keys if key in root}
    if LANGUAGE_KEY in root:
        settings[TEXT_KEY] = _text(
            text_table(str(root[LANGUAGE_KEY]), plain_value(root.get(TEXT_KEY)))
        )
    return settings


def _text(table: TextTable) -> dict[str, Plain]:
    case = TEXT_CHOICES["case"][table.keep_case]
    numbers = TEXT_CHOICES["numbers"][bool(table.numbers)]
    return {"case": case, "punctuation": [*table.punctuation], "numbers": numbers}


def _differs(key: str, source_value: Plain, value: Plain) -> bool:
    if key == LANGUAGE_KEY:  # languages may share a text table
        return language_table(str(source_value)) != language_table(str(value))
    return bool(source_value != value)


# ---- pretrained encoders


def encoder_config_of(folder: Path) -> dict[str, Any] | None:
    """Read the sizes of the pretrained encoder of a bundle or a run; None if it has none."""
    config: dict[str, Any] | None = None
    with parsing_errors(folder, INIT_REQUIREMENT, fix=INIT_FIX, is_json=True):
        if (folder / WEIGHTS_FILE).is_file():
            parts = BundleFiles(folder).config.parts
            config = parts.get("Transformer", {}).get("arguments", {}).get("config")
        elif (folder / RUN_YAML).is_file():
            config = read_description(folder).values.get("encoder_config")
    return config


def with_encoder_config(
    declared: Document, overrides: Mapping[str, object], keys: Mapping[str, Key] = KEYS
) -> dict[str, object]:
    """Return the overrides with the sizes of the encoder, if the YAML has `encoder_config`.

    A resumed run keeps the sizes that it began with. A new one takes them from `pretrained`; if
    that is null, from `encoder_config` itself, for random weights, or from `init_from`.

    The YAML of a run folder may be a stranger's: nothing that it names is downloaded here.
    """
    config: Any = overrides.get(ENCODER_CONFIG) or {}
    if "source" in config:
        return dict(overrides)  # they are complete
    config = config or plain_value(declared.root.get(ENCODER_CONFIG))
    if isinstance(config, dict) and not holds_object(config):  # the YAML refers to sizes in it
        sizes = complete_config(config, source_file=f"`{ENCODER_CONFIG}`")
        overrides = {**overrides, ENCODER_CONFIG: sizes}
    settings = make_spec(declared, overrides, keys=keys).settings
    if ENCODER_CONFIG not in settings:
        return dict(overrides)
    run = Path(settings["output_folder"])
    if has_checkpoint(run):
        return {**overrides, ENCODER_CONFIG: read_description(run).values[ENCODER_CONFIG]}
    downloads = PRETRAINED in overrides or not declared.is_in_run_folder
    config = _config_of_new_run(settings, downloads=downloads)
    if config["sample_rate"] != settings["sample_rate"]:
        raise ConfigError(
            f"`sample_rate` must be the {config['sample_rate']} Hz of the encoder, but is "
            f"{settings['sample_rate']}."
        )
    if "decoder_task" in settings:  # before references to sizes of a decoder lead nowhere
        text_decoder_of(config)
    return {**overrides, ENCODER_CONFIG: config}


def _config_of_new_run(settings: Mapping[str, Any], *, downloads: bool) -> Mapping[str, Any]:
    names = {key: settings[key] for key in (PRETRAINED, REVISION)}
    require_values(names)
    name, revision = names.values()
    declared = settings[ENCODER_CONFIG]
    if name is None:
        if declared is None and (folders := init_folders(settings)):
            declared = encoder_config_of(folders[0])
        if isinstance(declared, Mapping):
            return complete_config(declared, source_file=f"`{ENCODER_CONFIG}`")
        raise ConfigError(
            f"`{PRETRAINED}` must be FOLDER or OWNER/NAME of an encoder, but is null. For random "
            f"weights, set its sizes as `{ENCODER_CONFIG}`."
        )
    # In the YAML of a run folder.
    source = (declared.get("source") if isinstance(declared, Mapping) else None) or {}
    commit = source.get("revision") if source.get("name") == name else None
    find = find_folder if downloads else find_local_folder
    folder = find(name, revision or commit)
    if folder is None:
        if isinstance(declared, Mapping):  # training downloads this commit of the model
            return declared
        raise ConfigError(
            f"`{PRETRAINED}` of the run is {name}, which is not on this machine. For safety it is "
            f"downloaded only if you name it yourself, as an override of `{PRETRAINED}`."
        )
    config = read_encoder_config(folder)
    if declared is None:
        check_tensors(folder, config, layers=settings.get("layers"))
    elif declared != config:
        raise ConfigError(f"`{ENCODER_CONFIG}` must be null or agree with `{PRETRAINED}` ({name}).")
    return config


def text_table_of(model: Path) -> TextTable:
    """Return the text table of a bundle or a run, the general one for any other folder."""
    if (model / CONFIG_FILE).is_file():
        return BundleFiles(model).config.text_table
    settings = read_spec(model / RUN_YAML).settings if (model / RUN_YAML).is_file() else {}
    settings = with_defaults(settings)
    return text_table(str(settings["language"]), settings["text"])
