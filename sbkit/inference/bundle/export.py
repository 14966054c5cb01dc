"""From a run folder to a bundle.

The folder is data: nothing in its YAML is run, and its parts are built from sbkit's list.
"""

import hashlib
import inspect
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from ruamel.yaml.comments import CommentedMap
from safetensors.torch import save
from speechbrain.utils.checkpoints import Checkpoint
from torch import Tensor
from torch.nn import ModuleList

from sbkit.base.errors import SbkitError
from sbkit.base.files import to_json
from sbkit.base.provenance import versions
from sbkit.base.regular import read_regular
from sbkit.base.units import SAMPLE_RATE
from sbkit.checkpoint.checkpointer import NORMALIZER, Checkpointer
from sbkit.checkpoint.comparison import refuse_unusable
from sbkit.checkpoint.declaration import FILE as DECLARATION
from sbkit.checkpoint.declaration import RESOLVED, read_declaration, refuse_edited
from sbkit.checkpoint.integrity import checksum, write_checksums
from sbkit.checkpoint.part_names import listed_nodes
from sbkit.checkpoint.weights import average
from sbkit.config.allowed import find
from sbkit.config.document import read_document, tag_of
from sbkit.config.ranges import refuse_out_of_range
from sbkit.decoding.confidence import CONFIDENCE_FILE
from sbkit.decoding.decoder import DECODER_FILE, LANGUAGE_MODELS
from sbkit.inference.bundle.bundle import CONFIG, TOKENIZER, WEIGHTS, load_bundle
from sbkit.inference.bundle.config import FEATURES, FORMAT, MODEL_CLASSES
from sbkit.inference.bundle.model_card import LICENCE_UNKNOWN, model_card
from sbkit.inference.bundle.module_spec import names_of, refuse_unlisted, to_plain
from sbkit.inference.bundle.place import CARD, HUB, refuse_occupied, replacing
from sbkit.inference.formats.held_out import HeldOut, find_held_out
from sbkit.inference.formats.parity import Grid
from sbkit.inference.formats.traced import Source
from sbkit.inference.formats.write import Certificates, require_formats, write_formats
from sbkit.inference.runtime.torch_model import model_class
from sbkit.lm.storage import LARGEST_FILE as LARGEST_LANGUAGE_MODEL
from sbkit.text.labels import LABEL_FILE, ClassLabels
from sbkit.text.tokenizer import LARGEST_MODEL, Tokenizer
from sbkit.train.cost import SUMMARY

KNOBS = ("language", "token_type")  # of the YAML, said again in the bundle
IN_BUNDLE = (  # of decoder.json
    *("kind", "beam_size", "weights", "attention"),
    *("chosen_on", "CER", "WER", "utterances"),
)
LARGEST_DESCRIPTION = 1 << 16  # bytes
NOT_PARTS = ("self", "model", FEATURES, "vocabulary", "classes")  # a model's other arguments


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is written besides the bundle itself.

    Attributes:
        formats: names of `sbkit.inference.formats.write.WRITERS`.
        licence: of the model, for its card.
        grid: on which formats are compared with the trained model.
    """

    formats: Sequence[str] = ()
    licence: str = LICENCE_UNKNOWN
    grid: Grid = field(default_factory=Grid)


def export_run(
    run: Path, out: Path, wanted: Wanted | None = None, *, own: frozenset[str] = frozenset()
) -> Certificates:
    """Write the best checkpoint of a run as a bundle, whole or not at all, and its formats.

    ``own`` names modules of the user's that hold parts of the model. A format that misses its
    limits is not written; its certificate, which is returned, says why.
    Raises SbkitError when ``run`` is no run folder, has no good checkpoint, or names what is not
    on the list, and when ``out`` exists and is not a bundle.
    """
    wanted = wanted or Wanted()
    require_formats(wanted.formats)
    _require_run(run)
    refuse_occupied(out)
    contents, config = _contents(run, own)
    with replacing(out) as beside:
        for name, content in contents.items():
            (beside / name).write_bytes(content)
        write_checksums(beside)
        bundle = load_bundle(beside, own=own)  # what cannot be loaded is not exported
        if bundle.config.is_asr:
            config["samples_per_frame"] = bundle.model.samples_per_frame
            _write_into_both(beside, CONFIG, to_json(config, indent=1) + "\n")
        certificates: Certificates = {}
        if wanted.formats:
            certificates = write_formats(
                Source(bundle, own), beside, wanted.formats, _held_out(run), wanted.grid
            )
        card = model_card(run, config, certificates, licence=wanted.licence)
        _write_into_both(beside, CARD, card)
    return certificates


def _contents(run: Path, own: frozenset[str]) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Collect the files of a bundle, and its configuration."""
    root = read_document(run / RESOLVED).root
    plain = (int, float, str, NoneType)
    refuse_out_of_range({key: each for key, each in root.items() if isinstance(each, plain)})
    tokenizer = _tokenizer_of(run)
    if tokenizer is None and "tokenizer" in root:
        raise SbkitError(
            f"A run whose YAML has a `tokenizer` must hold {TOKENIZER}, but {run} does not. Put it "
            "back: what the model writes can be read with no other."
        )
    labels = _labels_of(run)
    _refuse_others(run, labels)
    described = plain_parts(root, {"tokenizer": tokenizer, "labels": labels})
    for part in described["parts"].values():
        refuse_unlisted(part, own=own)
    best = best_checkpoints(run / "checkpoints", tokenizer)
    decoder = _described(run / DECODER_FILE)  # that the test was run with
    config = _config(run, root, tokenizer, labels, best) | described
    config |= {
        "imports": _imports(described, own),
        "decoder": decoder and {name: decoder[name] for name in IN_BUNDLE if name in decoder},
        "confidence": _described(run / CONFIDENCE_FILE),
    }
    contents = {CONFIG: (to_json(config, indent=1) + "\n").encode()}
    if tokenizer is not None:
        contents[TOKENIZER] = tokenizer.content
        _tell_untuned(run, config, has_decoder="decoder" in root)
    if decoder is not None:
        models, largest = run / LANGUAGE_MODELS, LARGEST_LANGUAGE_MODEL
        contents[LANGUAGE_MODELS] = read_regular(models, largest=largest, what="The run's decoder")
    contents[WEIGHTS] = save(_weights_of(best, run))
    return contents, config


def _tell_untuned(run: Path, config: Mapping[str, Any], *, has_decoder: bool) -> None:
    """Say what a recognizer lacks that is chosen when its training ends.

    Raises SbkitError for a tested run that would decode otherwise than it was tested.
    """
    if has_decoder and config["decoder"] is None and (run / LANGUAGE_MODELS).exists():
        if (run / SUMMARY).exists():
            raise SbkitError(
                f"A run that was tested with language models must hold {DECODER_FILE}, but {run} "
                f"does not, and would decode greedily. Write it again: sbkit tune {run}"
            )
        lacking = "the weights of this run's decoder are not chosen yet, so that it decodes "
        lacking += "greedily. Finish the run, or choose them"
    elif config["confidence"] is None:
        lacking = f"this run has no {CONFIDENCE_FILE}, so that its words get no confidences. "
        lacking += "Finish the run, or fit them"
    else:
        return
    print(f"note: {lacking}: sbkit tune {run}", file=sys.stderr)


def _held_out(run: Path) -> HeldOut | str:
    """Find the run's test sets, or say why they are not there."""
    try:
        return find_held_out(run)
    except SbkitError as error:
        return str(error)


def change_config(bundle: Path, **values: object) -> None:
    """Write a bundle, and its copy for a hub, again with other values in config.json.

    It is written whole or not at all.
    """
    config = json.loads((bundle / CONFIG).read_text(encoding="utf-8"))
    with replacing(bundle) as beside:
        shutil.copytree(bundle, beside, dirs_exist_ok=True)
        _write_into_both(beside, CONFIG, to_json(config | values, indent=1) + "\n")
        load_bundle(beside)


def _write_into_both(bundle: Path, name: str, text: str) -> None:
    """Write a file of a bundle, and of its copy for a hub where there is one."""
    for folder in (bundle, bundle / HUB):
        if (folder / CONFIG).exists():
            (folder / name).write_text(text, encoding="utf-8")
            write_checksums(folder)


def best_checkpoints(folder: Path, tokenizer: Tokenizer | None) -> list[Checkpoint]:
    """Find the undamaged checkpoints that the test was run with, or the best one on dev.

    Raises SbkitError when there is none, or one was trained with another tokenizer.
    """
    best: list[Checkpoint] = []
    if folder.is_dir():
        checkpointer = Checkpointer(folder, tokenizer=tokenizer)
        try:
            best = checkpointer.find_averaged()
        except (TypeError, ValueError, AttributeError) as error:
            raise SbkitError(
                f"Checkpoints must be ranked by numbers, but in {folder} one has something else "
                f"({str(error)[:200]}). Move that one away."
            ) from error
    if not best:
        raise SbkitError(
            f"A run must have a whole checkpoint to be exported, but {folder} has none. "
            "Train it first: torchrun train.py hparams/ctc.yaml"
        )
    return best


def _weights_of(best: Sequence[Checkpoint], run: Path) -> dict[str, Tensor]:
    weights = average(best, "model")
    strange = [name for name, value in weights.items() if not isinstance(value, Tensor)]
    if strange:
        raise SbkitError(
            f"A model's checkpoint must hold tensors, but in {run / 'checkpoints'} `{strange[0]}` "
            "is none. Restore an earlier one."
        )
    refuse_unusable(weights, of=str(run / "checkpoints"))
    return {name: value.clone() for name, value in weights.items()}


def plain_parts(root: CommentedMap, objects: Mapping[str, object]) -> dict[str, Any]:
    """Describe the parts as plain data, the order in which the ModuleList owns them, and the model.

    ``objects`` are those of the YAML whose attributes its parts may refer to, by their keys.

    Raises SbkitError when a part is missing, or is made of something else than a description.
    """
    if not isinstance(root.get("model"), CommentedMap | list) or FEATURES not in root:
        raise SbkitError(
            f"The run's {RESOLVED} must define {FEATURES} and `model`, a torch.nn.ModuleList of "
            "its parts, but does not. Export works for runs of train.py."
        )
    by_node = {id(root.get(key)): made for key, made in objects.items() if made is not None}
    owned, name_of_model = _owned(root)
    parts = {name: to_plain(root[name], key=name, objects=by_node) for name in [*owned, FEATURES]}
    return {"model_class": name_of_model, "model": owned, "parts": parts}


def _owned(root: CommentedMap) -> tuple[list[str], str]:
    """Name the parts that the ModuleList owns, and the first model that takes them all."""
    node = root["model"]
    if find(tag_of(node).removeprefix("!new:")) is not ModuleList:
        raise SbkitError(
            f"`model` must be a torch.nn.ModuleList, but is {tag_of(node) or 'a list'}. Write "
            "`model: !new:torch.nn.ModuleList`."
        )
    by_node = {id(value): name for name, value in root.items() if tag_of(value)}
    owned = [by_node.get(id(each), "another part") for each in listed_nodes(node)]
    for name in MODEL_CLASSES:
        try:
            wanted = inspect.signature(model_class(name).__init__).parameters
        except SbkitError:
            continue  # this version has no such model
        parts = [key for key in wanted if key not in NOT_PARTS]
        required = {key for key in parts if wanted[key].default is inspect.Parameter.empty}
        if required <= {*owned} <= {*parts}:
            return owned, name
    raise SbkitError(
        "`model` must list the parts of a recognizer or classifier, with `ctc_lin` or `label_lin`, "
        f"each under a key of its own, but has {', '.join(owned) or 'none'}. Take out what is not "
        "used, or put it into one of them; checkpoints of another task are for your own program."
    )


def _config(
    run: Path,
    root: CommentedMap,
    tokenizer: Tokenizer | None,
    labels: ClassLabels | None,
    best: Sequence[Checkpoint],
) -> dict[str, Any]:
    """Collect what a bundle says of itself besides its parts."""
    digest = None if tokenizer is None else hashlib.sha256(tokenizer.content).hexdigest()
    names = ("epoch", "CER", "WER", "accuracy")
    metas = [each.meta if isinstance(each.meta, dict) else {} for each in best]
    return {
        "format": FORMAT,
        "sample_rate": _sample_rate(root, run),
        "tokenizer": digest,
        "vocabulary": None if tokenizer is None else tokenizer.pieces(),
        "labels": None if labels is None else labels.names,
        "checkpoints": [{name: meta[name] for name in names if name in meta} for meta in metas],
        NORMALIZER: metas[0].get(NORMALIZER),
        "versions": versions(),
        **{name: str(root[name]) for name in KNOBS if name in root},
    }


def _sample_rate(root: CommentedMap, run: Path) -> int:
    rate = root.get("sample_rate", SAMPLE_RATE)
    if isinstance(rate, bool) or not isinstance(rate, int):
        raise SbkitError(
            f"`sample_rate` must be a whole number, but {run / RESOLVED} has {rate}. Correct it."
        )
    return int(rate)


def _imports(described: dict[str, Any], own: frozenset[str]) -> list[str]:
    """Name the modules of the user's that the parts come from."""
    homes = {
        name.rpartition(".")[0]
        for part in described["parts"].values()
        for _, name in names_of(part)
    }
    return sorted(own & homes)


def _tokenizer_of(run: Path) -> Tokenizer | None:
    file = run / TOKENIZER
    if not os.path.lexists(file):
        return None
    content = read_regular(file, largest=LARGEST_MODEL, what="The run's tokenizer")
    return Tokenizer(model_file=file, content=content)


def _described(file: Path) -> dict[str, Any] | None:
    """Read a mapping that training wrote beside its checkpoints; None where it wrote none."""
    if not os.path.lexists(file):
        return None
    content = read_regular(file, largest=LARGEST_DESCRIPTION, what=f"The run's {file.name}")
    try:
        described = dict(json.loads(content).items())
        to_json(described).encode()  # half a surrogate pair cannot be written again
        return described
    except (ValueError, AttributeError, RecursionError) as error:
        raise SbkitError(
            f"{file} must be what training wrote, but cannot be read. Write it again: "
            f"sbkit tune {file.parent}"
        ) from error


def _labels_of(run: Path) -> ClassLabels | None:
    file = run / LABEL_FILE
    return ClassLabels(file=file) if os.path.lexists(file) else None


def _refuse_others(run: Path, labels: ClassLabels | None) -> None:
    """Refuse checkpoints, classes, or a YAML that are not of the run that the folder says it is."""
    declared = read_declaration(run) if (run / DECLARATION).is_file() else None
    if declared is not None:
        refuse_edited(run, declared)
    expected = None if declared is None else declared.tokenizer
    if labels is not None and expected not in (None, checksum(labels.file)):
        raise SbkitError(
            f"{labels.file} must list the classes that the run was trained on, in their order, but "
            "is another list: what the model tells would go by other names. Put it back."
        )


def _require_run(run: Path) -> None:
    if not (run / RESOLVED).is_file():
        raise SbkitError(
            f"A run must be a folder with {RESOLVED}, but {run} is none. "
            "Name the folder that training printed, such as results/ctc/en/3407."
        )
