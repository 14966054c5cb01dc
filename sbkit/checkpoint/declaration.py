"""What a run was declared to be when it began: a run folder belongs to one declaration.

`declaration.json` is written once, before anything is trained, and names the YAML's values, the
data by their fingerprints, the tokenizer by its checksum and the model by the sizes of its tensors.
Each checkpoint keeps the checksum of that file. A run that goes on is compared with how it began,
never with how it was last called.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from torch import nn

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_regular, to_json, write_text_atomically
from sbkit.base.text import listed, plural
from sbkit.checkpoint.integrity import checksum, reading
from sbkit.checkpoint.listing import newest_described
from sbkit.checkpoint.part_names import tensors_by_part
from sbkit.config.build import clean_ruamel, plain_values
from sbkit.config.document import dotted, read_yaml_text, tag_of
from sbkit.config.hparams import resolved_text
from sbkit.distributed.ranks import gather_over_ranks, rank

FILE = "declaration.json"
CHECKPOINTS, RESOLVED = "checkpoints", "hyperparams.yaml"  # of a run folder
# What a run may go on with in another way and still be the run that it says it is. Nothing here
# decides what was learned from, or what the weights mean:
MAY_CHANGE = frozenset(
    {
        # where and how fast it is computed
        *("output_folder", "device", "precision", "eval_precision", "num_workers", "audio_store"),
        *("grad_accumulation_factor", "eval_batch_seconds", "find_unused_parameters"),
        *("compile", "compile_module_keys"),
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
OPTIMIZER = "opt_class."  # compared by `load_optimizer`, which knows what the moments allow
PLACES = frozenset({"data_folder", "corpus", "manifest"})  # compared by the fingerprints instead
SHOWN = 8  # differences in one sentence
DIGITS = 12  # of a fingerprint
LARGEST = 1 << 26  # bytes
WIDEST = 60  # characters of a value
SEEN_WITHIN, LOOK_AGAIN = 60.0, 0.5  # seconds; NFS remembers for a while that a file is not there
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

    values: the YAML's, by their dotted path, every reference resolved; data: a fingerprint by
    split; tokenizer: the checksum of its file; model: sizes by tensor, such as
    `CNN.conv1.bias: 32`. What is not known yet is None and is not compared.
    """

    values: Mapping[str, Any]
    data: Mapping[str, str] | None = None
    tokenizer: str | None = None
    model: Mapping[str, str] | None = None
    source: tuple[Path, Mapping[str, object]] | None = field(default=None, compare=False)

    @staticmethod
    def of(
        yaml_file: Path,
        overrides: Mapping[str, object],
        *,
        data: Mapping[str, str] | None = None,
        tokenizer_file: Path | None = None,
        hparams: Mapping[str, Any] | None = None,
    ) -> "Declaration":
        """Describe a run from its YAML and command line, as far as its parts are there."""
        return Declaration(
            values=_values(resolved_text(yaml_file, overrides)),
            data=dict(data) if data else None,
            tokenizer=None if tokenizer_file is None else checksum(tokenizer_file),
            model=None if hparams is None else _describe_model(hparams),
            source=(yaml_file, overrides),
        )

    def begin(self, folder: Path) -> str:
        """Write `declaration.json` unless the run has begun; return its checksum for checkpoints.

        Every rank calls it, rank 0 first, after `refuse_other`.
        Raises SbkitError on a rank that does not see what rank 0 has written.
        """
        file = folder / FILE
        if rank() > 0:
            _require_seen(file)
        elif not file.is_file() or newest_described(folder / CHECKPOINTS) is None:
            folder.mkdir(parents=True, exist_ok=True)
            record = {name: value for name, value in asdict(self).items() if name != "source"}
            write_text_atomically(file, to_json(record, indent=1) + "\n")
        return checksum(file)

    def refuse_other(self, folder: Path) -> str | None:
        """Refuse to go on with a run that began as another one; return what is to be said.

        A folder without a checkpoint holds nothing to go on from, and is not compared. Nothing is
        written. Raises SbkitError.
        """
        if newest_described(folder / CHECKPOINTS) is None:
            return None
        before = read_declaration(folder)
        if before is None:
            return (
                f"The run in {folder} began under an sbkit that wrote no {FILE}; it goes on, and "
                "what it was trained on cannot be compared."
            )
        differences = list(self.differences(before))
        if differences:
            raise SbkitError(
                f"The run in {folder} must go on as it was declared when it began, but "
                f"{in_words(differences)}. Give the values that it began with, or choose another "
                "--output_folder for a new run."
            )
        changes = list(self.changes(before))
        if not changes:
            return None
        said = f"The run goes on with other values: {'; '.join(map(str, changes))}."
        if any(each.name == "number_of_epochs" for each in changes):
            said += " The learning rate follows the schedule over the new number of epochs."
        return said

    def refuse_other_ranks(self) -> None:
        """Refuse a process whose data, tokenizer, YAML or model is not that of the first.

        Every rank calls it. Each plans its own share of every batch, which would be of something
        else: a copy of the corpus on another node, say, in which some clips are missing.
        Raises SbkitError on all ranks.
        """
        first, *others = gather_over_ranks(self)
        for number, other in enumerate(others, start=1):
            differences = list(other.differences(first))
            if differences:
                shown = (
                    f"{each.name}: {_short(each.before)} on rank 0, {_short(each.now)} on rank "
                    f"{number}"
                    for each in differences
                )
                raise SbkitError(
                    "All processes must train the same model on the same data, but "
                    f"{listed(shown, most=SHOWN, by='; ')}. Give every node the same files, and "
                    "every process the same command."
                )

    def differences(self, before: "Declaration") -> Iterator[Difference]:
        """Compare all that may not change; tensors only where nothing else explains them."""
        found = [*self._other_data(before), *self._other_values(before)]
        if None not in (before.tokenizer, self.tokenizer) and before.tokenizer != self.tokenizer:
            was, now = (str(each)[:DIGITS] for each in (before.tokenizer, self.tokenizer))
            found.append(Difference("the tokenizer", was, now))
        yield from found
        if not found and before.model is not None and self.model is not None:
            yield from _compare(before.model, self.model)

    def changes(self, before: "Declaration") -> Iterator[Difference]:
        """Yield the values that differ and may."""
        quiet = {"output_folder", *PLACES}
        for each in _compare(before.values, self.values):
            if each.name in MAY_CHANGE - quiet:
                yield each

    def _other_data(self, before: "Declaration") -> Iterator[Difference]:
        if before.data is not None and self.data is not None:
            for each in _compare(before.data, self.data):
                was, now = (str(value)[:DIGITS] for value in (each.before, each.now))
                yield Difference(f"the data of `{each.name}`", was, now)

    def _other_values(self, before: "Declaration") -> Iterator[Difference]:
        """Compare the values once those that may change are as they were."""
        allowed = set(MAY_CHANGE)
        if before.data is not None and self.data is not None:
            allowed |= PLACES
        values = self._with(before, allowed) if self.source else self.values
        seen: list[tuple[Any, Any]] = []
        if not self.source or self.source[0].name == RESOLVED:  # it has values for references
            seen = [(each.before, each.now) for each in self.changes(before)]
        for each in _compare(before.values, values):
            if _root(each.name) in allowed or each.name.startswith(OPTIMIZER):
                continue
            if "." in each.name and (each.before, each.now) in seen:
                continue  # what a knob of the same values explains
            seen.append((each.before, each.now))
            yield each

    def _with(self, before: "Declaration", allowed: set[str]) -> Mapping[str, Any]:
        """Resolve the YAML with the knobs of ``allowed`` as the run began with them."""
        assert self.source is not None
        yaml_file, overrides = self.source
        restored = {
            each.name: each.before
            for each in _compare(before.values, self.values)
            if each.name in allowed - {"output_folder"} and each.name in self.values
        }
        return _values(resolved_text(yaml_file, {**overrides, **restored}))


def _require_seen(file: Path) -> None:
    """Wait for a file of rank 0's, which another node may see late; raise SbkitError if never."""
    end = time.monotonic() + SEEN_WITHIN
    while not file.is_file():
        if time.monotonic() > end:
            raise SbkitError(
                f"`output_folder` must be one folder for all processes, but rank {rank()} does not "
                f"see {file}, which rank 0 has written. Choose a folder on a disk that all nodes "
                "share."
            )
        time.sleep(LOOK_AGAIN)


def read_declaration(folder: Path) -> Declaration | None:
    """Read how the run in a folder began; None for a run of an sbkit that wrote none.

    Raises SbkitError for a file that is not the one that the newest checkpoint belongs to.
    """
    file, newest = folder / FILE, newest_described(folder / CHECKPOINTS)
    expected = None if newest is None else newest.meta.get("declaration")
    if not file.is_file() and expected is None:
        return None
    content = None
    if file.is_file():
        content = read_regular(file.resolve(), largest=LARGEST, what="The declaration of a run")
    if content is None or expected not in (None, hashlib.sha256(content).hexdigest()):
        what = "not there" if content is None else "another one"
        raise SbkitError(
            f"{file} must be the one that {newest.path if newest else folder} was saved with, but "
            f"is {what}. Put it back, or choose another --output_folder for a new run."
        )
    fix = "Put it back, or choose another --output_folder for a new run."
    with reading(file, must="be what sbkit wrote when the run began", fix=fix):
        record = json.loads(content)
        return Declaration(**{name: _mapping_or_text(name, record) for name in record})


def refuse_edited(folder: Path, before: Declaration) -> None:
    """Refuse a run's `hyperparams.yaml` that declares another run; nothing in it is resolved.

    Weights of the same sizes would be read with another kernel, other heads or another rate.
    Raises SbkitError.
    """
    file = folder / RESOLVED
    with reading(file, must="be what training wrote", fix="Put it back."):
        now = Declaration(values=_values(read_yaml_text(file)), data=before.data)
    differences = list(now.differences(before))
    if differences:
        raise SbkitError(
            f"{file} must declare the run as it began, but {in_words(differences)}. Put it back."
        )


def _mapping_or_text(name: str, record: Mapping[str, Any]) -> Any:
    value = record[name]
    if value is not None and not isinstance(value, str if name == "tokenizer" else dict):
        raise TypeError(f"`{name}` is a {type(value).__name__}")
    return value


def _values(text: str) -> dict[str, Any]:
    """Flatten a resolved YAML, the knobs first; paths below the run folder are relative to it."""
    with clean_ruamel():
        knobs, root = plain_values(text), YAML().load(text)
    below = {key: node for key, node in root.items() if key not in knobs}
    folder = knobs.get("output_folder")
    values = {**knobs, **dict(_leaves(below, (), {}))}
    if isinstance(folder, str) and folder:
        values = {key: _relative(value, folder) for key, value in values.items()}
    plain: dict[str, Any] = json.loads(to_json(_plain(values)))
    return plain


def _plain(value: Any) -> Any:
    """Write out what JSON has not, and YAML has: dates, sets and bytes."""
    if isinstance(value, Mapping):
        scalar = str | int | float
        return {
            key if isinstance(key, scalar) else str(key): _plain(each)
            for key, each in value.items()
        }
    if isinstance(value, Set):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    return value if value is None or isinstance(value, str | int | float) else str(value)


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
        yield dotted(keys), f"{tag} {value}" if tag else value
        return
    if id(node) in seen:
        yield dotted(keys), f"<{seen[id(node)]}>"
        return
    seen[id(node)] = dotted(keys)
    if tag:
        yield dotted(keys), tag
    for key, child in node.items() if isinstance(node, Mapping) else enumerate(node):
        yield from _leaves(child, (*keys, key), seen)


def _describe_model(hparams: Mapping[str, Any]) -> dict[str, str]:
    described, freeze = {}, hparams.get("freeze") or ()
    for name, tensor in tensors_by_part(hparams).items():
        size = "x".join(map(str, tensor.shape)) or "1"
        at_freeze = any(name == path or name.startswith(f"{path}.") for path in freeze)
        is_frozen = isinstance(tensor, nn.Parameter) and (at_freeze or not tensor.requires_grad)
        described[name] = f"{size}, frozen" if is_frozen else size
    return described


def _compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield what differs, in the order in which it is declared now."""
    for name in [*now, *(each for each in before if each not in now)]:
        old, new = before.get(name, ABSENT), now.get(name, ABSENT)
        if old != new:
            yield Difference(name, old, new)


def _root(name: str) -> str:
    return name.split(".")[0]


def in_words(differences: list[Difference]) -> str:
    """Count the differences and name the first ones with both values."""
    count = plural(len(differences), "thing differs", "things differ")
    return f"{count} ({listed(differences, most=SHOWN, by='; ')})"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."
