"""Start a run from the weights of another one: what fits by name and by shape is loaded.

Names are those of the YAML's parts, such as `CNN.conv1.weight`, so the other model may list its
parts in another order, have others, or another vocabulary, also one of the same size: characters
are numbered by how often they occur. Heads and embeddings are then loaded token by token. Only
numbers are read: safetensors or a state_dict, and a YAML or JSON as text; nothing of the other
folder is built.

The pretrained encoder of a run: its sizes become plain data of the YAML when the run begins.

`pretrained` names a folder, and `encoder_config` becomes what it says. So the resolved YAML, the
declaration and the bundle hold every size, and a run that has begun needs the folder no more.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_regular, reading
from sbkit.base.messages import listed
from sbkit.bundle.config import MAX_FILE_BYTES, WEIGHTS_FILE, BundleFiles
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.folder import newest_checkpoint
from sbkit.checkpoint.run_config import CHECKPOINTS, RESOLVED, read_run_config
from sbkit.checkpoint.weights import average, part_names_in, size_in, tensors_by_part, to_part_name
from sbkit.config.document import holds_object, plain_value, read_document
from sbkit.config.hparams import read_knobs
from sbkit.models.parts import token_embedding
from sbkit.models.pretrained.folder import (
    check_weights,
    complete_config,
    find_folder,
    read_encoder_config,
)
from sbkit.models.pretrained.lora import merge_adapters
from sbkit.tasks.task import Task

SOURCE = "be a run folder or a bundle for `init_from`"
FIX = "Name another, or null to start from nothing."
SHOWN = 4  # names in a line


def initialize_from(source: Path, hparams: Mapping[str, Any], task: Task) -> list[str]:
    """Load into the model of a task what fits of a run's or a bundle's weights.

    Returns lines: which tensors are loaded, which by token, where the vocabulary is another one,
    which are new, with the reason, and which of those there are not ours.
    Call it only where the run has no checkpoint of its own.
    Raises SbkitError when the folder is neither, or when nothing in it fits.
    """
    theirs, ours = read_named_weights(source), tensors_by_part(hparams)
    tokens, own = _tokens(source, hparams, task)
    others = set[int]() if tokens == own else _by_label(hparams, task, len(own))
    places = {token: row for row, token in enumerate(tokens)}
    pairs = [(places[token], row) for row, token in enumerate(own) if token in places]
    loaded, by_token, new = list[str](), list[str](), list[str]()
    faults = {name: _fault(theirs, ours, name) for name in ours}
    module_of = {name: name.rpartition(".")[0] for name in ours}
    buffers = {name for name, each in ours.items() if not isinstance(each, nn.Parameter)}
    # A statistic of another size is measured anew, unless its count says that it was.
    apart = {module_of[name] for name in buffers if faults[name] is not None}
    with torch.no_grad():
        for name, tensor in ours.items():
            fault = faults[name]
            if id(tensor) in others and _load_rows(theirs.get(name), tensor, pairs, len(tokens)):
                by_token.append(name)
                continue
            if fault is None and id(tensor) in others:
                fault = "of other labels there"
            if fault is None and name in buffers and module_of[name] in apart:
                fault = "beside buffers that do not fit"
            if fault is None:
                tensor.copy_(theirs[name])
                loaded.append(name)
            else:
                new.append(f"{name} ({fault})")
    left = [name for name in theirs if name not in ours]
    if not loaded and not by_token:
        raise SbkitError(
            f"`init_from` must name a run or a bundle with parts of this model, but of the "
            f"{len(theirs)} tensors in {source} none fits by name and shape "
            f"({', '.join([*theirs][:SHOWN])}). Give the parts the names that they "
            "have there."
        )
    return [
        f"init_from {source}: {len(loaded)} tensors are loaded{_of(loaded)}",
        *([f"init_from: {len(pairs)} of {len(own)} rows by token{_of(by_token)}"] * bool(by_token)),
        f"init_from: {len(new)} tensors are new{_of(new)}",
        f"init_from: {len(left)} tensors there are not used{_of(left)}",
    ]


def _tokens(source: Path, hparams: Mapping[str, Any], task: Task) -> tuple[list[str], list[str]]:
    """Return what the outputs stand for: there, none where no file says, and here."""
    if task.labels is None or (labels := hparams.get(task.labels.key)) is None:
        return [], []
    file, here = source / task.labels.name, [*task.labels.names(labels)]
    if not file.exists():
        return [], here
    content = read_regular(file, max_bytes=MAX_FILE_BYTES, subject=f"The labels in {source}")
    return [*task.labels.names(task.labels.read(file, content))], here


def _by_label(hparams: Mapping[str, Any], task: Task, count: int) -> set[int]:
    """Return the ids of the tensors with a row for each label: of heads and of embeddings."""
    heads = [hparams.get(name) for name in task.heads]
    parts = [part for part in (*heads, *map(token_embedding, hparams.values())) if part is not None]
    for module in hparams["model"].modules():  # also embeddings of which the task knows nothing
        if isinstance(module, nn.Embedding) and module.num_embeddings == count:
            parts.append(module)
    return {id(each) for part in parts for each in part.state_dict(keep_vars=True).values()}


def _load_rows(theirs: Any, ours: Tensor, pairs: list[tuple[int, int]], count: int) -> bool:
    """Copy the rows of tokens that both have; return False where there are none that fit."""
    wanted = (count, *ours.shape[1:])
    if not pairs or not isinstance(theirs, Tensor) or theirs.shape != wanted:
        return False
    there, here = torch.tensor(pairs).unbind(1)
    if len(ours) <= here.max() or not theirs[there].isfinite().all():
        return False
    ours[here] = theirs[there].to(ours)
    return True


def read_named_weights(source: Path) -> dict[str, Tensor]:
    """Read the weights of a bundle, or those that a run was tested with, by part and path.

    Raises SbkitError.
    """
    with reading(source, must=SOURCE, fix=FIX):
        if (source / WEIGHTS_FILE).is_file():
            weights, parts = _read_bundle(source)
        elif (source / CHECKPOINTS).is_dir():
            weights, parts = _read_run(source)
        else:
            raise SbkitError(
                f"`init_from` must name a run folder with {CHECKPOINTS}/ or a bundle with "
                f"{WEIGHTS_FILE}, but {source} is neither. {FIX}"
            )
    return {to_part_name(name, parts): each for name, each in weights.items()}


def encoder_config_of(source: Path) -> dict[str, Any] | None:
    """Read the sizes of the pretrained encoder that a bundle or a run has, None where it has none.

    Raises SbkitError.
    """
    found: dict[str, Any] | None = None
    with reading(source, must=SOURCE, fix=FIX):
        if (source / WEIGHTS_FILE).is_file():
            parts = BundleFiles(source).config.parts
            found = parts.get("Transformer", {}).get("arguments", {}).get("config")
        elif (source / RESOLVED).is_file():
            found = read_run_config(source).values.get("encoder_config")
    return found


def _read_bundle(source: Path) -> tuple[dict[str, Tensor], list[str]]:
    files = BundleFiles(source)
    return load_safetensors(files.read(WEIGHTS_FILE)), [*files.config.model]


def _read_run(source: Path) -> tuple[dict[str, Tensor], list[str]]:
    parts = part_names_in(read_document(source / RESOLVED).root)
    checkpointer = Checkpointer(source / CHECKPOINTS)
    best = checkpointer.find_averaged() or checkpointer.find_whole(1)
    if not best:
        raise SbkitError(
            f"`init_from` must name a run with a whole checkpoint, but {source} has none. Train it "
            "first, or name another."
        )
    return merge_adapters(average(best, "model")), parts


def _fault(theirs: Mapping[str, Any], ours: Mapping[str, Tensor], name: str) -> str | None:
    there, here = size_in(theirs, name), size_in(ours, name)
    if there != here:
        return f"{there} there, {here} here"
    value, is_learned = theirs[name], isinstance(ours[name], nn.Parameter)
    unfit = ~value.isfinite() if is_learned else value.isnan()  # a buffer may be a mask
    return "not finite there" if unfit.any() else None


def _of(names: list[str]) -> str:
    return f": {listed(names, max_names=SHOWN)}." if names else "."


KNOB, CONFIG = "pretrained", "encoder_config"


def with_encoder_config(yaml_file: Path, overrides: Mapping[str, object]) -> dict[str, object]:
    """Return the overrides with the sizes of the encoder, in a YAML that has `encoder_config`.

    They are those that the run began with; else those of the folder; without one, those that are
    given, of an encoder that begins with random weights, or those of `init_from`.
    Raises SbkitError for what cannot be loaded, and for a model that does not fit into the memory.
    """
    given: Any = overrides.get(CONFIG) or {}
    if "source" in given:
        return dict(overrides)  # done
    given = given or plain_value(read_document(yaml_file).root.get(CONFIG))
    if isinstance(given, dict) and not holds_object(given):  # the YAML refers to sizes in it
        overrides = {**overrides, CONFIG: complete_config(given, source_file=f"`{CONFIG}`")}
    knobs = read_knobs(yaml_file, overrides)
    if CONFIG not in knobs:
        return dict(overrides)
    run = Path(knobs["output_folder"])
    if newest_checkpoint(run / CHECKPOINTS) is not None:
        return {**overrides, CONFIG: read_run_config(run).values[CONFIG]}
    config = _config_of(knobs)
    if config["sample_rate"] != knobs["sample_rate"]:
        raise SbkitError(
            f"`sample_rate` must be the {config['sample_rate']} Hz that the encoder was trained on "
            f"(its preprocessor_config.json), but is {knobs['sample_rate']}. Take an encoder of "
            f"that rate, or pass --sample_rate={config['sample_rate']}."
        )
    return {**overrides, CONFIG: config}


def _config_of(knobs: Mapping[str, Any]) -> dict[str, Any]:
    named, given = knobs.get(KNOB), knobs[CONFIG]
    if named is None:
        if given is None and (source := knobs.get("init_from")):
            given = encoder_config_of(Path(source))
        if isinstance(given, Mapping):
            return complete_config(given, source_file=f"`{CONFIG}`")
        raise SbkitError(
            f"`{KNOB}` must name the folder of a pretrained encoder, but is null. Pass "
            f"--{KNOB}=FOLDER, or as `{CONFIG}` a mapping: an encoder of random weights."
        )
    config = read_encoder_config(named)
    if given is None:
        check_weights(find_folder(named), config)
    elif given != config:
        raise SbkitError(
            f"`{CONFIG}` must be null, or what `{KNOB}` says, but {named} says something else. "
            "Take one of the two out."
        )
    return config
