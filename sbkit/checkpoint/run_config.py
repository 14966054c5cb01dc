"""The configuration that a run folder belongs to: the resolved YAML, and hashes of what it uses.

`run_config.json` is written before anything is trained, and a resumed run is compared with it.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml.comments import CommentedMap, CommentedSeq

from sbkit.base.errors import ConfigError
from sbkit.base.files import (
    RUN_CONFIG_FILE,
    RUN_YAML,
    from_plain,
    is_run,
    parsing_errors,
    read_file,
    to_json,
    write_text_atomically,
)
from sbkit.base.messages import listed, plural, short_value
from sbkit.checkpoint.folder import newest_checkpoint
from sbkit.config.document import Keys, dotted, tag_of
from sbkit.config.hparams import OUTPUT_FOLDER, RECIPE, Settings, read_settings, resolve
from sbkit.config.reached import NUM_HASH_DIGITS
from sbkit.distributed.ranks import gather_over_ranks
from sbkit.distributed.same_on_ranks import describe_rank
from sbkit.evaluate.run_results import SUMMARY

CHECKPOINTS = "checkpoints"  # the folder in a run folder
BUNDLE = "bundle"  # the folder of the exported model in a run
# Read after the last step: they may change until the run has results.
END_KEYS = frozenset(
    {
        *("decoder", "beam_size", "attention_rescoring"),
        *("word_lm_order", "token_lm_order", "lm_text"),
        *("average_checkpoints", "eval_precision", "eval_batch_seconds"),
        *("export_formats", "report_by"),
    }
)
# The machine, watching and saving: a finished run may be opened with others, but keeps its own.
MACHINE_KEYS = frozenset(
    {
        *("output_folder", "device", "num_workers", "audio_store", "store_cache"),
        "grad_accumulation_factor",  # changes with the number of processes, not the steps
        *("check", "log_every", "noprogressbar", "stall_seconds", "store_patience"),
        *("ckpt_interval_minutes", "ckpt_interval_steps"),
        *("debug", "debug_batches", "debug_epochs"),
    }
)
# Keys that may change when a run is resumed. They decide neither what the model learns from, nor
# what its weights mean.
MAY_CHANGE = frozenset(
    {
        *MACHINE_KEYS,
        *END_KEYS,
        # precision and speed
        *("precision", "compile", "gradient_checkpointing", "find_unused_parameters"),
        # length
        *("number_of_epochs", "max_minutes", "optimizer_step_limit", "early_stopping"),
        "valid_interval_steps",
        # against divergence
        *("nonfinite_patience", "lr", "weight_decay", "max_grad_norm"),
    }
)
# The arguments of an optimizer may change, too, such as `opt_class.betas`. The new ones take effect
# (`sbkit.checkpoint.weights.restore_declared`), with the moments that were saved.
OPTIMIZER_KEY = "opt_class"
# Not compared if both runs know the hashes of their data
DATA_SETTINGS = frozenset({"data_folder", "corpus", "manifest"})
# The only keys that may differ between the processes of a run
PER_MACHINE = DATA_SETTINGS | {"output_folder", "num_workers", "noprogressbar", "store_cache"}
MAX_LISTED_DIFFERENCES = 8
MISSING = object()  # the value of a key that one of two configurations lacks


class Difference(NamedTuple):
    """A value that differs between two run configurations."""

    name: str
    before: Any
    now: Any

    @property
    def key(self) -> str:
        """The key of the YAML that the value belongs to."""
        return self.name.split(".")[0]

    @property
    def is_of_optimizer(self) -> bool:
        return OPTIMIZER_KEY in self.name.split(".")[:-1]

    def __str__(self) -> str:
        return f"{self.name}: {_short(self.before)} before, {_short(self.now)} now"


@dataclass(frozen=True)
class RunConfig:
    """A run's YAML as it takes effect, and hashes of its data, labels, code and files.

    Attributes:
        values: the values of the YAML by dotted path, with every reference resolved.
        data: the hash of each split; None if not known yet, and then not compared.
        labels: the hash of the label file; None if not known yet, and then not compared.
        helpers: hashes of the frozen modules beside the model, by name; None if not known yet.
        is_repeatable: whether another run has the same figures; not if the clock ends it.
        modules, files: hashes of what the YAML reaches, as `list_reached` returns them. One that
            either run lacks is not compared.
        source: the YAML and its overrides.
    """

    values: Mapping[str, Any]
    data: Mapping[str, str] | None = None
    labels: str | None = None
    helpers: Mapping[str, str] | None = None
    is_repeatable: bool = True
    modules: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    source: tuple[Path, Mapping[str, object]] | None = None

    @staticmethod
    def from_yaml(
        yaml_file: Path | str,
        overrides: Mapping[str, object],
        *,
        data: Mapping[str, str] | None = None,
        label_file: bytes | None = None,
    ) -> "RunConfig":
        """Make the configuration of a run from its YAML and overrides.

        data: the fingerprints of its splits; label_file: the content of its label file.
        """
        yaml_file = Path(yaml_file)
        values = _values(yaml_file, overrides)
        return RunConfig(
            values=values,
            data={split: value[:NUM_HASH_DIGITS] for split, value in (data or {}).items()} or None,
            labels=None if label_file is None else hashlib.sha256(label_file).hexdigest(),
            is_repeatable=not values.get("max_minutes"),
            source=(yaml_file, overrides),
        )

    def write(self, folder: Path | str) -> None:
        record = {name: value for name, value in vars(self).items() if name != "source"}
        write_text_atomically(Path(folder, RUN_CONFIG_FILE), to_json(record, indent=1) + "\n")

    def check_resumable(self, folder: Path | str, *, has_ended: bool = False) -> str | None:
        """Refuse to resume another run in ``folder``; describe changed values, if there are any.

        A folder without a checkpoint may hold any run.

        has_ended: no step is trained. What only a step could bring about is refused, too.
        """
        newest = newest_checkpoint(Path(folder, CHECKPOINTS))
        if newest is None:
            return None
        before = read_run_config(folder)
        if refused := [*self.differences(before)]:
            count = plural(len(refused), "thing differs", "things differ")
            names = listed(refused, max_names=MAX_LISTED_DIFFERENCES, separator="; ")
            raise ConfigError(
                f"The run in {folder} was begun with another configuration: {count} ({names}). "
                "For a new run, choose another `output_folder`."
            )
        changes = self.changes(before)
        if has_ended:
            changes = [change for change in changes if change.key not in MACHINE_KEYS]
            effective = set() if Path(folder, SUMMARY).exists() else {*END_KEYS}
            if self.values.get("number_of_epochs") == newest.meta.get("epoch"):
                effective.add("number_of_epochs")
            given = {d.name for d in _compare(before.values, self.values)}  # not edited files
            if lost := [c for c in changes if c.key not in effective or c.name not in given]:
                raise ConfigError(
                    f"The run in {folder} trains no further step, so a change has no effect "
                    f"({listed(lost, max_names=MAX_LISTED_DIFFERENCES, separator='; ')}). To train "
                    "on, raise `number_of_epochs` or `max_minutes`; for another decoder, report or "
                    f"format, sbkit tune, score or export {folder} with --out NEW; for a new run, "
                    "choose another `output_folder`."
                )
        if not changes:
            return None
        lines = ["Resuming with changed values:"]
        lines += map(str, changes)
        if any(change.name == "number_of_epochs" for change in changes):
            lines.append("the learning rate follows the schedule over the new number of epochs")
        return "\n  ".join(lines)

    def check_same_on_ranks(self) -> None:
        """Refuse, on all ranks, a rank with another YAML or other data than rank 0."""
        (first, first_rank), *other_ranks = gather_over_ranks((self, describe_rank()))
        for other, other_rank in other_ranks:
            values = other._with_values(other.changed_keys(first, PER_MACHINE))
            differences = [d for d in _compare(first.values, values) if d.key not in PER_MACHINE]
            if self.data is not None:
                differences += other.differences(first)
            if differences:
                difference = differences[0]
                raise ConfigError(
                    "All processes must train the same model on the same data, but "
                    f"{difference.name}: {_short(difference.before)} for {first_rank}, "
                    f"{_short(difference.now)} for {other_rank}."
                )

    def differences(self, before: "RunConfig") -> Iterator[Difference]:
        """Yield the differences from an earlier configuration that are not allowed."""
        before = self._by_content(before)
        values = [*before.values.values(), *self.values.values()]
        # An object within another is a part of the model, such as the `decoder` of a codec.
        allowed = {key for key in MAY_CHANGE if f"<{key}>" not in values}
        if "lazy" in {config.values.get("audio_store") for config in (before, self)}:
            allowed -= {"audio_store"}  # its lengths of clips are those of the tables
        if before.data and self.data:
            allowed |= DATA_SETTINGS
            for split, old_hash, new_hash in _compare(before.data, self.data):
                yield Difference(f"the data of `{split}`", old_hash, new_hash)
        if None not in (before.labels, self.labels) and before.labels != self.labels:
            yield Difference("the file of labels", before.labels, self.labels)
        if before.helpers is not None and self.helpers is not None:
            for name, old_hash, new_hash in _compare(before.helpers, self.helpers):
                yield Difference(f"the helper `{name}`", old_hash, new_hash)
        for name in sorted(before.modules.keys() & self.modules.keys()):
            if before.modules[name] != self.modules[name]:
                yield Difference(f"the module {name}", before.modules[name], self.modules[name])
        kept = self._with_values(self.changed_keys(before, allowed))
        for difference in _compare(before.values, kept):
            if difference.key not in allowed and not difference.is_of_optimizer:
                yield difference

    def changes(self, before: "RunConfig") -> list[Difference]:
        """List the allowed differences, except those that follow from another through `!ref`."""
        before = self._by_content(before)
        changed = self.changed_keys(before, MAY_CHANGE)
        independent = {d.name for d in _compare(before.values, self._with_values(changed))}
        return [
            difference
            for difference in _compare(before.values, self.values)
            if (difference.key in MAY_CHANGE or difference.is_of_optimizer)
            and (difference.key in changed or difference.name in independent)
        ]

    def _by_content(self, before: "RunConfig") -> "RunConfig":
        """Return an earlier configuration that names files as this one names the same contents."""
        names = {digest: name for name, digest in self.files.items()}
        renamed = {
            name: names.get(digest, f"other content of {name}")
            for name, digest in before.files.items()
            if digest != self.files.get(name) and (name in self.files or digest in names)
        }
        return replace(before, values=_replace_texts(before.values, renamed))

    def changed_keys(self, before: "RunConfig", allowed: Set[str]) -> dict[str, Any]:
        """Return the earlier values of the allowed keys that have another value in this run."""
        return {
            key: before.values[key]
            for key in allowed & before.values.keys() & self.values.keys()
            if before.values[key] != self.values[key]
        }

    def _with_values(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return this run's values as they would be if its YAML were given ``values``, too."""
        if self.source is None or not values:
            return self.values
        yaml_file, overrides = self.source
        return _values(yaml_file, {**overrides, **values})


def folder_override(yaml_file: Path) -> dict[str, object]:
    """Return the override that makes the YAML of a moved or copied run be of its folder now."""
    folder = yaml_file.parent
    return {OUTPUT_FOLDER: str(folder)} if yaml_file.name == RUN_YAML and is_run(folder) else {}


def require_trusted(
    settings: Mapping[str, Any], given: Collection[str], user_modules: Collection[str]
) -> None:
    """Refuse a run that is read as data, if it names somebody's modules, or data that is no file.

    given: the keys that the user has set; user_modules: the modules that the user trusts.
    """
    names = {"corpus": settings.get("corpus"), RECIPE: str(settings.get(RECIPE)).rpartition(".")[0]}
    for key in names.keys() - given:
        module = str(names[key] or "sbkit.")
        if not module.startswith(("sbkit.", "recipes.")) and module not in user_modules:
            raise ConfigError(
                f"The run in {settings[OUTPUT_FOLDER]} is read as data, but names the module "
                f"{module}. If you trust it, pass --import {module}, or in Python `user_modules`."
            )
    for key in {*DATA_SETTINGS, "lm_text"} - {*given}:
        for text in to_json(settings.get(key)).split('"'):
            path = Path(text)
            if "://" in text or (path.exists() and not (path.is_file() or path.is_dir())):
                raise ConfigError(
                    f"`{key}` of the run is {text}, which is opened only if you name it yourself: "
                    "sbkit score RUN TABLE, sbkit tune RUN/bundle --data TABLE --out NEW, or in "
                    f"Python Run.open(RUN, {{'{key}': ...}})."
                )


def read_run_settings(run: Path) -> Settings:
    """Read the plain values of the YAML in a run folder, wherever the folder lies."""
    file = run / RUN_YAML
    return read_settings(file, folder_override(file))


def read_run_tree(run: Path) -> CommentedMap:
    """Read the YAML in a run folder with its references resolved; nothing is built."""
    file = run / RUN_YAML
    return resolve(file, folder_override(file)).tree


def read_run_config(folder: Path | str) -> RunConfig:
    """Read the configuration of the run in a folder."""
    file = Path(folder, RUN_CONFIG_FILE)
    fix = "For a new run, choose another `output_folder`."
    with parsing_errors(file, "be what sbkit wrote when the run began", fix=fix, is_json=True):
        return from_plain(RunConfig, json.loads(read_file(file)))


def _values(yaml_file: Path, overrides: Mapping[str, object]) -> dict[str, Any]:
    """Resolve a YAML, and return its values by dotted path, the settings first.

    The paths of files in the run folder start with <output_folder>: a run folder may be moved.
    """
    resolved = resolve(yaml_file, overrides)
    others = {key: node for key, node in resolved.tree.items() if key not in resolved.settings}
    values = {**resolved.settings, **dict(_leaves(others, (), {}))}
    folder = values.get("output_folder") or ""
    for key, value in values.items():
        if folder and isinstance(value, str) and f"{value}/".startswith(f"{folder}/"):
            values[key] = "<output_folder>" + value[len(folder) :]
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


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
        children = node.items() if isinstance(node, Mapping) else enumerate(node)
        for key, child in children:
            yield from _leaves(child, (*keys, key), seen)


def _replace_texts(value: Any, texts: Mapping[str, str]) -> Any:
    """Return a plain value with other texts in it."""
    if isinstance(value, Mapping):
        return {key: _replace_texts(item, texts) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace_texts(item, texts) for item in value]
    return texts.get(value, value) if isinstance(value, str) else value


def _compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the differences in the order of ``now``; nested mappings are compared by key."""
    removed = [name for name in before if name not in now]
    for name in [*now, *removed]:
        old = before.get(name, MISSING)
        new = now.get(name, MISSING)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            for difference in _compare(old, new):
                yield difference._replace(name=f"{name}.{difference.name}")
        elif old != new:
            yield Difference(name, old, new)


def _short(value: Any) -> str:
    return "nothing" if value is MISSING else short_value(value)
