"""The configuration that a run folder belongs to: the resolved YAML, hashes of data and labels.

`run_config.json` is written before anything is trained. A resumed run is compared with it, except
for a short list of knobs that may change.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml.comments import CommentedMap, CommentedSeq

from sbkit.base.checksums import checksum
from sbkit.base.errors import ConfigError
from sbkit.base.files import reading, to_json, write_text_atomically
from sbkit.base.messages import listed, plural
from sbkit.checkpoint.folder import newest_checkpoint
from sbkit.config.document import Keys, dotted, tag_of
from sbkit.config.hparams import resolve
from sbkit.distributed.ranks import gather_over_ranks

FILE = "run_config.json"
CHECKPOINTS, RESOLVED = "checkpoints", "hyperparams.yaml"  # of a run folder
# Knobs that may change when a run is resumed: they decide neither what it learns from, nor what
# its weights mean
MAY_CHANGE = frozenset(
    {
        # device and speed
        *("output_folder", "device", "precision", "eval_precision", "num_workers", "audio_store"),
        *("grad_accumulation_factor", "eval_batch_seconds", "find_unused_parameters"),
        *("compile", "gradient_checkpointing"),
        # length
        *("number_of_epochs", "optimizer_step_limit", "early_stopping"),
        # decoding
        *("decoder", "beam_size", "word_lm_order", "token_lm_order", "lm_text"),
        *("attention_rescoring", "decoder_type"),
        # watching, logging, saving and averaging
        *("check", "log_every", "profile", "report_by", "stall_seconds", "nonfinite_patience"),
        *("ckpt_interval_minutes", "ckpt_interval_steps", "average_checkpoints"),
        *("noprogressbar", "debug", "debug_batches", "debug_epochs"),
        # step size, lowered when a run diverges; the change is logged
        *("lr", "weight_decay", "max_grad_norm"),
    }
)
OPTIMIZER_ARGUMENTS = "opt_class."  # an optimizer resumes with the moments that were saved
# Not compared if the hashes of the data are known
DATA_KNOBS = frozenset({"data_folder", "corpus", "manifest"})
MAX_LISTED_DIFFERENCES = 8
NUM_HASH_DIGITS = 12
MAX_VALUE_CHARACTERS = 60

Change = tuple[str, Any, Any]  # a name, the value before and the value now


@dataclass(frozen=True)
class RunConfig:
    """A run's YAML as it takes effect, and hashes of its data and labels.

    Attributes:
        values: the values of the YAML by dotted path, with every reference resolved.
        data: the hash of each split; None if not known yet, and then not compared.
        labels: the hash of the label file; None if not known yet, and then not compared.
        source: the YAML and its overrides.
    """

    values: Mapping[str, Any]
    data: Mapping[str, str] | None = None
    labels: str | None = None
    source: tuple[Path, Mapping[str, object]] | None = None

    @staticmethod
    def of(
        yaml_file: Path,
        overrides: Mapping[str, object],
        *,
        data: Mapping[str, str] | None = None,
        label_file: Path | None = None,
    ) -> "RunConfig":
        """Describe a run by its YAML and overrides, its data and its label file."""
        return RunConfig(
            values=_values(yaml_file, overrides),
            data={split: value[:NUM_HASH_DIGITS] for split, value in (data or {}).items()} or None,
            labels=None if label_file is None else checksum(label_file),
            source=(yaml_file, overrides),
        )

    def write(self, folder: Path) -> None:
        """Write `run_config.json`."""
        record = {"values": self.values, "data": self.data, "labels": self.labels}
        write_text_atomically(folder / FILE, to_json(record, indent=1) + "\n")

    def check_continues(self, folder: Path) -> str | None:
        """Return a message about the changed knobs of a resumed run; None if nothing has changed.

        A folder without a checkpoint is not compared.
        Raises ConfigError if the folder belongs to another run.
        """
        if newest_checkpoint(folder / CHECKPOINTS) is None:
            return None
        before = read_run_config(folder)
        differences = [*map(_changed, self.differences(before))]
        if differences:
            count = plural(len(differences), "thing differs", "things differ")
            names = listed(differences, max_names=MAX_LISTED_DIFFERENCES, separator="; ")
            raise ConfigError(
                f"The run in {folder} was begun with another configuration: {count} ({names}). "
                "Give the values that it began with, or choose another --output_folder for a new "
                "run."
            )
        loggable = MAY_CHANGE - {"output_folder"}
        changes = [c for c in _compare(before.values, self.values) if c[0] in loggable]
        lines = ["Resuming with changed values:", *map(_changed, changes)]
        if any(name == "number_of_epochs" for name, *_ in changes):
            lines.append("the learning rate follows the schedule over the new number of epochs")
        return "\n  ".join(lines) if changes else None

    def check_same_on_ranks(self) -> None:
        """Raise ConfigError, on all ranks, if one has another YAML or other data than rank 0."""
        first, *other_ranks = gather_over_ranks(self)
        for index, other in enumerate(other_ranks, start=1):
            for name, before, now in other.differences(first):
                raise ConfigError(
                    "All processes must train the same model on the same data, but "
                    f"{name}: {_short(before)} on rank 0, {_short(now)} on rank {index}. "
                    "Give every node the same files, and every process the same command."
                )

    def differences(self, before: "RunConfig") -> Iterator[Change]:
        """Yield the differences that are not allowed."""
        allowed = set(MAY_CHANGE)
        if before.data and self.data:
            allowed |= DATA_KNOBS
            for split, was, now in _compare(before.data, self.data):
                yield f"the data of `{split}`", was, now
        if None not in (before.labels, self.labels) and before.labels != self.labels:
            yield "the file of labels", before.labels, self.labels
        for change in _compare(before.values, self._restored(before, allowed)):
            name = change[0]
            if name.split(".")[0] not in allowed and OPTIMIZER_ARGUMENTS not in name:
                yield change

    def _restored(self, before: "RunConfig", allowed: set[str]) -> Mapping[str, Any]:
        """Resolve the YAML with the earlier values of the knobs that may change."""
        names = before.values.keys() & self.values.keys() & allowed - {"output_folder"}
        restored = {k: before.values[k] for k in names if before.values[k] != self.values[k]}
        if self.source is None or not restored:
            return self.values
        yaml_file, overrides = self.source
        return _values(yaml_file, {**overrides, **restored})


def read_run_config(folder: Path) -> RunConfig:
    """Read the configuration of the run in a folder; raises SbkitError if it cannot be read."""
    file = folder / FILE
    fix = "Put it back, or choose another --output_folder for a new run."
    with reading(file, "be what sbkit wrote when the run began", fix=fix):
        record = json.loads(file.read_text(encoding="utf-8"))
        return RunConfig(**{name: record[name] for name in ("values", "data", "labels")})


def _values(yaml_file: Path, overrides: Mapping[str, object]) -> dict[str, Any]:
    """Flatten a resolved YAML, the knobs first; paths below the run folder are relative to it."""
    resolved = resolve(yaml_file, overrides)
    below = {key: node for key, node in resolved.tree.items() if key not in resolved.knobs}
    values = {**resolved.knobs, **dict(_leaves(below, (), {}))}
    if folder := values.get("output_folder"):
        values = {key: _relative(value, folder) for key, value in values.items()}
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


def _relative(value: Any, folder: str) -> Any:
    if isinstance(value, str) and (value == folder or value.startswith(f"{folder}/")):
        return "<output_folder>" + value[len(folder) :]
    return value


def _leaves(node: object, keys: Keys, seen: dict[int, str]) -> Iterator[tuple[str, Any]]:
    """Yield the tags and scalars below a node by dotted path; for an alias only its target."""
    tag = tag_of(node)
    if not isinstance(node, CommentedMap | CommentedSeq | dict):
        value = getattr(node, "value", node)
        yield dotted(keys), f"{tag} {value}" if tag else value
    elif id(node) in seen:
        yield dotted(keys), f"<{seen[id(node)]}>"
    else:
        seen[id(node)] = dotted(keys)
        if tag:
            yield dotted(keys), tag
        for key, child in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _leaves(child, (*keys, key), seen)


def _compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the differences in the order of ``now``; nested mappings are compared by key."""
    for name in [*now, *(name for name in before if name not in now)]:
        was = before.get(name, "nothing")
        value = now.get(name, "nothing")
        if isinstance(was, Mapping) and isinstance(value, Mapping):
            yield from ((f"{name}.{key}", a, b) for key, a, b in _compare(was, value))
        elif was != value:
            yield name, was, value


def _changed(change: Change) -> str:
    name, before, now = change
    return f"{name}: {_short(before)} before, {_short(now)} now"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[: MAX_VALUE_CHARACTERS - 3]}..."
