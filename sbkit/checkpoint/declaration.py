"""Which run a folder belongs to: the YAML as it takes effect, and the hashes of data and labels.

`declaration.json` is written before anything is trained. A run that goes on is compared with it,
but for a short list of knobs that may change.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from sbkit.base.errors import SbkitError
from sbkit.base.files import to_json, write_text_atomically
from sbkit.base.text import listed, plural
from sbkit.checkpoint.integrity import checksum, reading
from sbkit.checkpoint.listing import newest_described
from sbkit.config.build import clean_ruamel, plain_values
from sbkit.config.document import dotted, tag_of
from sbkit.config.hparams import resolved_text
from sbkit.distributed.ranks import gather_over_ranks

FILE = "declaration.json"
CHECKPOINTS, RESOLVED = "checkpoints", "hyperparams.yaml"  # of a run folder
# What may change when a run is resumed: nothing that decides what it learns from, or what its
# weights mean.
MAY_CHANGE = frozenset(
    {
        # where and how fast it is computed
        *("output_folder", "device", "precision", "eval_precision", "num_workers", "audio_store"),
        *("grad_accumulation_factor", "eval_batch_seconds", "find_unused_parameters"),
        *("compile", "gradient_checkpointing"),
        # how long it goes on
        *("number_of_epochs", "optimizer_step_limit", "early_stopping"),
        # how what was learned is decoded
        *("decoder", "beam_size", "word_lm_order", "token_lm_order", "lm_text"),
        *("attention_decoding", "decoder_type"),
        # what is watched, logged, saved and averaged
        *("check", "log_every", "profile", "report_by", "stall_seconds", "nonfinite_patience"),
        *("ckpt_interval_minutes", "ckpt_interval_steps", "average_checkpoints"),
        *("noprogressbar", "debug", "debug_batches", "debug_epochs"),
        # the size of the steps to come: what one lowers when a run diverges; the change is said
        *("lr", "weight_decay", "max_grad_norm"),
    }
)
ARGUMENTS = "opt_class."  # of an optimizer, which resumes with the moments that were saved
PLACES = frozenset({"data_folder", "corpus", "manifest"})  # the hashes of the data tell
SHOWN = 8  # differences in one sentence
DIGITS = 12  # of a hash
WIDEST = 60  # characters of a value
ABSENT = "nothing"  # in the place of a value that is not declared


@dataclass(frozen=True)
class Difference:
    """One thing that a run began with in another way than it is declared now."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        """Write it as `lr: 0.1 when it began, 0.2 now`."""
        return f"{self.name}: {_short(self.before)} when it began, {_short(self.now)} now"


@dataclass(frozen=True)
class Declaration:
    """A run's YAML as it takes effect, and what it is given.

    values: the YAML's, by their dotted path, every reference resolved; data: a hash by split;
    labels: the hash of their file. What is not known yet is None and is not compared.
    """

    values: Mapping[str, Any]
    data: Mapping[str, str] | None = None
    labels: str | None = None
    source: tuple[Path, Mapping[str, object]] | None = field(default=None, compare=False)

    @staticmethod
    def of(
        yaml_file: Path,
        overrides: Mapping[str, object],
        *,
        data: Mapping[str, str] | None = None,
        label_file: Path | None = None,
    ) -> "Declaration":
        """Describe a run from its YAML and command line, as far as its parts are there."""
        return Declaration(
            values=_values(resolved_text(yaml_file, overrides)),
            data=dict(data) if data else None,
            labels=None if label_file is None else checksum(label_file),
            source=(yaml_file, overrides),
        )

    def write(self, folder: Path) -> None:
        """Write `declaration.json`; what may change is then compared with these values."""
        record = {"values": self.values, "data": self.data, "labels": self.labels}
        write_text_atomically(folder / FILE, to_json(record, indent=1) + "\n")

    def check_continues(self, folder: Path) -> str | None:
        """Return what has changed of what may, where a run goes on; nothing is written.

        A folder without a checkpoint holds nothing to go on from, and is not compared.
        Raises SbkitError for another run.
        """
        if newest_described(folder / CHECKPOINTS) is None:
            return None
        before = read_declaration(folder)
        differences = list(self.differences(before))
        if differences:
            count = plural(len(differences), "thing differs", "things differ")
            raise SbkitError(
                f"The run in {folder} must go on as it was declared when it began, but {count} "
                f"({listed(differences, most=SHOWN, by='; ')}). Give the values "
                "that it began with, or choose another --output_folder for a new run."
            )
        changes = [
            each
            for each in _compare(before.values, self.values)
            if each.name in MAY_CHANGE - {"output_folder"}
        ]
        said = f"The run goes on with other values: {'; '.join(map(str, changes))}."
        if any(each.name == "number_of_epochs" for each in changes):
            said += " The learning rate follows the schedule over the new number of epochs."
        return said if changes else None

    def check_same_on_ranks(self) -> None:
        """Raise SbkitError, on all ranks, where one has another YAML or other data than rank 0."""
        first, *others = gather_over_ranks(self)
        for number, other in enumerate(others, start=1):
            if differences := list(other.differences(first)):
                each = differences[0]
                raise SbkitError(
                    "All processes must train the same model on the same data, but "
                    f"{each.name}: {_short(each.before)} on rank 0, {_short(each.now)} on rank "
                    f"{number}. Give every node the same files, and every process the same command."
                )

    def differences(self, before: "Declaration") -> Iterator[Difference]:
        """Yield all that differs and may not."""
        allowed = set(MAY_CHANGE)
        if before.data is not None and self.data is not None:
            allowed |= PLACES
            for each in _compare(before.data, self.data):
                was, now = (str(value)[:DIGITS] for value in (each.before, each.now))
                yield Difference(f"the data of `{each.name}`", was, now)
        if None not in (before.labels, self.labels) and before.labels != self.labels:
            was, now = (str(each)[:DIGITS] for each in (before.labels, self.labels))
            yield Difference("the file of labels", was, now)
        for each in _compare(before.values, self._with(before, allowed)):
            if each.name.split(".")[0] not in allowed and ARGUMENTS not in each.name:
                yield each

    def _with(self, before: "Declaration", allowed: set[str]) -> Mapping[str, Any]:
        """Resolve the YAML with the knobs that may change as the run began with them."""
        if self.source is None:
            return self.values
        yaml_file, overrides = self.source
        restored = {
            each.name: each.before
            for each in _compare(before.values, self.values)
            if each.name
            in (allowed & before.values.keys() & self.values.keys()) - {"output_folder"}
        }
        if not restored:
            return self.values
        return _values(resolved_text(yaml_file, {**overrides, **restored}))


def read_declaration(folder: Path) -> Declaration:
    """Read how the run in a folder began; raises SbkitError where that is not to be read."""
    file = folder / FILE
    fix = "Put it back, or choose another --output_folder for a new run."
    with reading(file, must="be what sbkit wrote when the run began", fix=fix):
        record = json.loads(file.read_text(encoding="utf-8"))
        return Declaration(**{name: record[name] for name in ("values", "data", "labels")})


def _values(text: str) -> dict[str, Any]:
    """Flatten a resolved YAML, the knobs first; paths below the run folder are relative to it."""
    with clean_ruamel():
        knobs, root = plain_values(text), YAML().load(text)
    below = {key: node for key, node in root.items() if key not in knobs}
    folder, values = knobs.get("output_folder"), {**knobs, **dict(_leaves(below, (), {}))}
    if isinstance(folder, str) and folder:
        values = {key: _relative(value, folder) for key, value in values.items()}
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


def _relative(value: Any, folder: str) -> Any:
    if isinstance(value, str) and (value == folder or value.startswith(f"{folder}/")):
        return "<output_folder>" + value[len(folder) :]
    return value


def _leaves(
    node: object, keys: tuple[str | int, ...], seen: dict[int, str]
) -> Iterator[tuple[str, Any]]:
    """Yield the tags and the scalars below a node by their dotted path; an alias is only named."""
    tag = tag_of(node)
    if not isinstance(node, CommentedMap | CommentedSeq | dict):
        value = getattr(node, "value", node)
        plain = value if value is None or isinstance(value, str | int | float) else str(value)
        yield dotted(keys), f"{tag} {plain}" if tag else plain
        return
    if id(node) in seen:
        yield dotted(keys), f"<{seen[id(node)]}>"
        return
    seen[id(node)] = dotted(keys)
    if tag:
        yield dotted(keys), tag
    for key, child in node.items() if isinstance(node, Mapping) else enumerate(node):
        yield from _leaves(child, (*keys, key), seen)


def _compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield what differs, in the order in which it is declared now."""
    for name in [*now, *(each for each in before if each not in now)]:
        old, new = before.get(name, ABSENT), now.get(name, ABSENT)
        if old != new:
            yield Difference(name, old, new)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."
