"""Start a run from the weights of another one, or from a pretrained encoder.

`init_from`: weights that fit by name and shape are loaded. Their names follow the YAML's parts,
such as `CNN.conv1.weight`, so the other model may have other parts, or list them in another order.
If its vocabulary is another one, heads and embeddings are loaded token by token, also if the sizes
agree: characters are numbered by how often they occur. Only numbers are read, from safetensors or a
state_dict, and a YAML or JSON as text; nothing from the other folder is built.

`pretrained` names the folder of an encoder, or a model of Hugging Face's hub. Its sizes become the
plain data `encoder_config` when the run begins: the resolved YAML, the run configuration and the
bundle hold every size, and the run no longer needs the folder.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn

from sbkit.base.errors import BundleError, ConfigError
from sbkit.base.files import parsing_errors, read_regular
from sbkit.base.messages import listed
from sbkit.base.ranges import require_in_range
from sbkit.bundle.config import CONFIG_FILE, MAX_FILE_BYTES, WEIGHTS_FILE, BundleFiles
from sbkit.bundle.task import Task
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.folder import newest_checkpoint
from sbkit.checkpoint.run_config import (
    CHECKPOINTS,
    RUN_YAML,
    read_run_config,
    read_run_knobs,
    read_run_tree,
)
from sbkit.checkpoint.weights import (
    average,
    describe_tensor,
    part_names_of_yaml,
    tensors_by_part,
    to_part_name,
)
from sbkit.config.document import holds_object, plain_value, read_document
from sbkit.config.hparams import read_knobs
from sbkit.models.parts import token_embedding
from sbkit.models.pretrained.folder import check_weights, complete_config, read_encoder_config
from sbkit.models.pretrained.hub import find_folder
from sbkit.models.pretrained.lora import merge_adapters
from sbkit.text.normalization import Orthography, text_table
from sbkit.train.weight_settings import check_same_meaning, settings_of_yaml

SOURCE = "be a run folder or a bundle for `init_from`"
FIX = "Name another, or null to start without."
MAX_LISTED_NAMES = 4
# Keys of the YAML
PRETRAINED, REVISION, ENCODER_CONFIG = "pretrained", "pretrained_revision", "encoder_config"


def initialize_from(
    source: Path, hparams: Mapping[str, Any], task: Task, root: Mapping[str, Any]
) -> list[str]:
    """Load the weights of a run or a bundle into the model of a task, as far as they fit.

    root: the resolved YAML of this run.

    Returns lines that list which tensors are loaded, which by token, which are new and why, and
    which of the source's are not used. Call it only for a run without a checkpoint of its own.
    Raises BundleError if the folder is neither, or if nothing in it fits, and ConfigError if a
    setting that no tensor shape reveals differs, and `init_from_differs` does not list it.
    """
    theirs = read_named_weights(source)
    ours = tensors_by_part(hparams)
    their_tokens, our_tokens = _tokens(source, hparams, task)
    by_label = _ids_by_label(hparams, task, len(our_tokens)) if their_tokens != our_tokens else ()
    their_row = {token: row for row, token in enumerate(their_tokens)}
    rows = [(their_row[t], row) for row, t in enumerate(our_tokens) if t in their_row]
    misfits = _misfits(theirs, ours)
    loaded: list[str] = []
    by_token: list[str] = []
    new: list[str] = []
    with torch.no_grad():
        for name, tensor in ours.items():
            has_labels = id(tensor) in by_label
            misfit = misfits[name]
            if has_labels and _load_rows(theirs.get(name), tensor, rows, len(their_tokens)):
                by_token.append(name)
            elif misfit is not None or has_labels:
                new.append(f"{name} ({misfit or 'of other labels there'})")
            else:
                tensor.copy_(theirs[name])
                loaded.append(name)
    unused = [name for name in theirs if name not in ours]
    if not loaded and not by_token:
        raise BundleError(
            f"`init_from`: none of the {len(theirs)} tensors in {source} fits this model by name "
            f"and shape ({', '.join([*theirs][:MAX_LISTED_NAMES])}). Give the parts the names that "
            "they have there."
        )
    declared = check_same_meaning(
        source, settings_of_yaml(root), task, tensors=[*ours], loaded=[*loaded, *by_token]
    )
    lines = [f"init_from {source}: {len(loaded)} tensors are loaded{_names(loaded)}"]
    if by_token:
        count = f"{len(rows)} of {len(our_tokens)} rows"
        lines.append(f"init_from: {count} by token{_names(by_token)}")
    lines.append(f"init_from: {len(new)} tensors are new{_names(new)}")
    lines.append(f"init_from: {len(unused)} tensors there are not used{_names(unused)}")
    return lines + declared


def _misfits(theirs: Mapping[str, Any], ours: Mapping[str, Tensor]) -> dict[str, str | None]:
    """Return why each of our tensors cannot be loaded; None if it can."""
    misfits = {name: _misfit(theirs, ours, name) for name in ours}
    buffers = [name for name, tensor in ours.items() if not isinstance(tensor, nn.Parameter)]
    module_of = {name: name.rpartition(".")[0] for name in buffers}
    # If one buffer of a module does not fit, none is loaded: statistics of another size would not
    # be measured again if the count of their frames were loaded.
    mismatched = {module_of[name] for name in buffers if misfits[name] is not None}
    for name in buffers:
        if misfits[name] is None and module_of[name] in mismatched:
            misfits[name] = "beside buffers that do not fit"
    return misfits


def _misfit(theirs: Mapping[str, Any], ours: Mapping[str, Tensor], name: str) -> str | None:
    there, here = describe_tensor(theirs, name), describe_tensor(ours, name)
    if there != here:
        return f"{there} there, {here} here"
    value = theirs[name]
    is_parameter = isinstance(ours[name], nn.Parameter)
    unusable = ~value.isfinite() if is_parameter else value.isnan()  # a buffer may be a mask
    return "not finite there" if unusable.any() else None


def _names(names: list[str]) -> str:
    return f": {listed(names, max_names=MAX_LISTED_NAMES)}." if names else "."


def _tokens(source: Path, hparams: Mapping[str, Any], task: Task) -> tuple[list[str], list[str]]:
    """Return the tokens of the source's outputs, none if no file lists them, and of ours."""
    if task.label_file is None or (labels := hparams.get(task.label_key)) is None:
        return [], []
    file = source / task.label_file
    our_tokens = [*task.label_names(labels)]
    if not file.exists():
        return [], our_tokens
    content = read_regular(file, max_bytes=MAX_FILE_BYTES, subject=f"The labels in {source}")
    return [*task.label_names(task.read_labels(file, content))], our_tokens


def _ids_by_label(hparams: Mapping[str, Any], task: Task, num_labels: int) -> set[int]:
    """Return the ids of the tensors in heads and embeddings, which have a row for each label."""
    heads = [hparams.get(name) for name in task.heads]
    parts = [part for part in (*heads, *map(token_embedding, hparams.values())) if part is not None]
    for module in hparams["model"].modules():  # also embeddings that the task does not name
        if isinstance(module, nn.Embedding) and module.num_embeddings == num_labels:
            parts.append(module)
    return {id(t) for part in parts for t in part.state_dict(keep_vars=True).values()}


def _load_rows(theirs: Any, ours: Tensor, rows: list[tuple[int, int]], num_tokens: int) -> bool:
    """Copy the ``rows`` (theirs, ours) of common tokens; return False if they do not fit."""
    expected_shape = (num_tokens, *ours.shape[1:])
    if not rows or not isinstance(theirs, Tensor) or theirs.shape != expected_shape:
        return False
    there, here = torch.tensor(rows).unbind(1)
    if len(ours) <= here.max() or not theirs[there].isfinite().all():
        return False
    ours[here] = theirs[there].to(ours)
    return True


def read_named_weights(source: Path) -> dict[str, Tensor]:
    """Read the weights of a bundle, or the tested weights of a run, by part and path.

    Raises SbkitError if they cannot be read.
    """
    with parsing_errors(source, SOURCE, fix=FIX):
        if (source / WEIGHTS_FILE).is_file():
            files = BundleFiles(source)
            weights = load_safetensors(files.read(WEIGHTS_FILE))
            parts = [*files.config.model]
        elif (source / CHECKPOINTS).is_dir():
            parts = part_names_of_yaml(read_run_tree(source))
            checkpointer = Checkpointer(source / CHECKPOINTS)
            best = checkpointer.find_averaged() or checkpointer.find_whole(1)
            if not best:
                raise BundleError(
                    f"`init_from` must name a run with an undamaged checkpoint, but {source} has "
                    "none. Train it first, or name another."
                )
            weights = merge_adapters(average(best, "model"))
        else:
            raise BundleError(
                f"`init_from` must name a run folder with {CHECKPOINTS}/ or a bundle with "
                f"{WEIGHTS_FILE}, but {source} is neither. {FIX}"
            )
    return {to_part_name(name, parts): tensor for name, tensor in weights.items()}


def encoder_config_of(source: Path) -> dict[str, Any] | None:
    """Read the sizes of the pretrained encoder of a bundle or a run; None if it has none.

    Raises SbkitError if they cannot be read.
    """
    config: dict[str, Any] | None = None
    with parsing_errors(source, SOURCE, fix=FIX, is_json=True):
        if (source / WEIGHTS_FILE).is_file():
            parts = BundleFiles(source).config.parts
            config = parts.get("Transformer", {}).get("arguments", {}).get("config")
        elif (source / RUN_YAML).is_file():
            config = read_run_config(source).values.get("encoder_config")
    return config


def with_encoder_config(yaml_file: Path, overrides: Mapping[str, object]) -> dict[str, object]:
    """Return the overrides with the sizes of the encoder, if the YAML has `encoder_config`.

    A resumed run keeps the sizes that it began with. A new one takes them from `pretrained`; if
    that is null, from `encoder_config` itself, for random weights, or from `init_from`.
    Raises SbkitError for a folder that cannot be loaded, or does not fit into memory.
    """
    config: Any = overrides.get(ENCODER_CONFIG) or {}
    if "source" in config:
        return dict(overrides)  # they are complete
    config = config or plain_value(read_document(yaml_file).root.get(ENCODER_CONFIG))
    if isinstance(config, dict) and not holds_object(config):  # the YAML refers to sizes in it
        overrides = {
            **overrides,
            ENCODER_CONFIG: complete_config(config, source_file=f"`{ENCODER_CONFIG}`"),
        }
    knobs = read_knobs(yaml_file, overrides)
    if ENCODER_CONFIG not in knobs:
        return dict(overrides)
    run = Path(knobs["output_folder"])
    if newest_checkpoint(run / CHECKPOINTS) is not None:
        return {**overrides, ENCODER_CONFIG: read_run_config(run).values[ENCODER_CONFIG]}
    config = _config_of_new_run(knobs)
    if config["sample_rate"] != knobs["sample_rate"]:
        raise ConfigError(
            f"`sample_rate` must be the {config['sample_rate']} Hz that the encoder was trained on "
            f"(its preprocessor_config.json), but is {knobs['sample_rate']}. Take an encoder of "
            f"that rate, or set `sample_rate: {config['sample_rate']}`."
        )
    return {**overrides, ENCODER_CONFIG: config}


def _config_of_new_run(knobs: Mapping[str, Any]) -> Mapping[str, Any]:
    names = {key: knobs.get(key) for key in (PRETRAINED, REVISION)}
    require_in_range(names)
    name, revision = names.values()
    declared = knobs[ENCODER_CONFIG]
    if name is None:
        if declared is None and (source := knobs.get("init_from")):
            declared = encoder_config_of(Path(source))
        if isinstance(declared, Mapping):
            return complete_config(declared, source_file=f"`{ENCODER_CONFIG}`")
        raise ConfigError(
            f"`{PRETRAINED}` must name the folder of a pretrained encoder, but is null. Set "
            f"`{PRETRAINED}` to FOLDER or OWNER/NAME, or for random weights a mapping as "
            f"`{ENCODER_CONFIG}`."
        )
    # In the YAML of a run folder.
    source = (declared.get("source") if isinstance(declared, Mapping) else None) or {}
    commit = source.get("revision") if source.get("name") == name else None
    folder = find_folder(name, revision or commit)
    config = read_encoder_config(folder)
    if declared is None:
        check_weights(folder, config, layers=knobs.get("layers"))
    elif declared != config:
        raise ConfigError(
            f"`{ENCODER_CONFIG}` must be null or agree with `{PRETRAINED}`, but {name} has other "
            "sizes or weights. Remove one of the two."
        )
    return config


def text_table_of(model: Path) -> Orthography:
    """Return the text table of a bundle or a run, the general one for any other folder."""
    if (model / CONFIG_FILE).is_file():
        return BundleFiles(model).config.text_table
    knobs = read_run_knobs(model) if (model / RUN_YAML).is_file() else {}
    return text_table(str(knobs.get("language", "und")), knobs.get("text"))
