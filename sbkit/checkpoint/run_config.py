"""The description of a run's training as JSON, and the differences between two runs.

`run_config.json` is written before anything is trained, and a resumed run is compared with it.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ruamel.yaml.comments import CommentedMap, CommentedSeq

from sbkit.base.errors import ConfigError
from sbkit.base.files import (
    RUN_CONFIG_FILE,
    from_plain,
    parsing_errors,
    read_file,
    to_json,
    write_text_atomically,
)
from sbkit.base.imports import dotted_path
from sbkit.base.messages import listed, plural, short_value
from sbkit.checkpoint.folder import newest_checkpoint
from sbkit.config.dependencies import NUM_HASH_DIGITS
from sbkit.config.document import Keys, dotted, referenced_paths, tag_of, text_of, walk
from sbkit.config.hparams import EPOCH_COUNTER, EPOCH_LIMIT, OUTPUT_FOLDER, RECIPE, RunSpec
from sbkit.config.keys import DATA_SOURCES, KEYS, Key
from sbkit.distributed.ranks import gather_over_ranks
from sbkit.distributed.same_on_ranks import describe_rank
from sbkit.evaluate.run_results import SUMMARY

CHECKPOINTS = "checkpoints"  # the folder in a run folder
BUNDLE = "bundle"  # the folder of the exported model in a run
# The arguments of an optimizer may change, too, such as `opt_class.betas`. The new values take
# effect (`sbkit.checkpoint.weights.restore_declared`) and the saved moments are kept. So may the
# last epoch, and a key of the user's that decides nothing else.
OPTIMIZER_KEY, SCHEDULE_KEY = "opt_class", "lr_schedule"
LIMIT_PATH = f"{EPOCH_COUNTER}.{EPOCH_LIMIT}"
REFERENCED_KEY = re.compile(r"<([^].[>]+)")
MAX_LISTED_DIFFERENCES = 8
MISSING = object()  # stands for the value of a key that one of two runs lacks


class Difference(NamedTuple):
    """A value that differs between two runs.

    is_allowed: whether a resumed run may change it.
    """

    name: str
    before: Any
    now: Any
    is_allowed: bool = False

    @property
    def key(self) -> str:
        """The YAML key that the value belongs to."""
        return self.name.split(".")[0]

    def __str__(self) -> str:
        return f"{self.name}: {_short(self.before)} before, {_short(self.now)} now"


@dataclass(frozen=True)
class RunDescription:
    """The inputs of a run's training: its YAML as it takes effect, and hashes of all it reads.

    A hash that is unknown for one of two runs is not compared.

    Attributes:
        values: the values of the YAML by dotted path, with every reference resolved.
        references: the text of each reference in the YAML, by dotted path.
        data: the hash of each split; None if not known yet.
        labels: the hash of each file of labels; None if not known yet.
        helpers: hashes of the frozen modules beside the model, by name; None if not known yet.
        is_repeatable: whether another run has the same figures; not if the clock ends it.
        modules, files: the hashes that `hash_dependencies` returns. One that either run lacks is
            not compared.
        keys: what is declared about the keys of its YAML; not stored.
    """

    values: Mapping[str, Any]
    references: Mapping[str, str]
    data: Mapping[str, str] | None = None
    labels: Mapping[str, str] | None = None
    helpers: Mapping[str, str] | None = None
    is_repeatable: bool = True
    modules: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, Key] = field(default_factory=lambda: KEYS, repr=False, compare=False)

    def paths_referring_to(self, key: str) -> list[str]:
        """List the paths of the references to a key of the root; a path in an object has none."""
        return [p for p, text in self.references.items() if key in REFERENCED_KEY.findall(text)]


def describe_spec(
    spec: RunSpec,
    *,
    data: Mapping[str, str] | None = None,
    label_files: Mapping[str, bytes] | None = None,
    helpers: Mapping[str, str] | None = None,
    dependencies: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {}),
) -> RunDescription:
    """Describe a run as far as it is known.

    The run folder is written as <output_folder> in paths, because it may be moved.

    data: the fingerprints of its splits.
    label_files: the contents of its files of labels, by name.
    helpers: hashes of the frozen modules beside the model.
    dependencies: the result of `hash_dependencies`.
    """
    values = dict(spec.settings.items())  # this marks no key as read
    parts = {key: node for key, node in spec.tree.items() if key not in values}
    values |= _leaves(parts, (), {})
    if spec.recipe is not None:
        values[RECIPE] = dotted_path(spec.recipe)
    folder = values.get(OUTPUT_FOLDER) or ""
    for key, value in values.items():
        if folder and isinstance(value, str) and f"{value}/".startswith(f"{folder}/"):
            values[key] = "<output_folder>" + value[len(folder) :]
    references = [(keys, node) for keys, node in walk(spec.document.root) if referenced_paths(node)]
    modules, files = dependencies
    return RunDescription(
        values=json.loads(json.dumps(values, default=str)),
        references={dotted(keys): f"{tag_of(node)} {text_of(node)}" for keys, node in references},
        data={split: value[:NUM_HASH_DIGITS] for split, value in (data or {}).items()} or None,
        labels=None
        if label_files is None
        else {name: hashlib.sha256(content).hexdigest() for name, content in label_files.items()},
        helpers=helpers,
        is_repeatable=not values.get("max_minutes"),
        modules=modules,
        files=files,
        keys=spec.keys,
    )


def differences(before: RunDescription, now: RunDescription) -> list[Difference]:
    """List the differences of two runs, except for values that a reference copies from others.

    A file or folder that a value names is compared by its content.
    """
    before = _rename_files(before, now)
    differing = [
        *_hash_differences("the data of `{}`", before.data, now.data),
        *_hash_differences("the labels in {}", before.labels, now.labels),
        *_hash_differences("the helper `{}`", before.helpers, now.helpers),
    ]
    for name in sorted(before.modules.keys() & now.modules.keys()):
        old, new = before.modules[name], now.modules[name]
        if old != new:
            differing.append(Difference(f"the module {name}", old, new))
    # An object within another is a part of the model, such as the `decoder` of a codec.
    texts = [*before.values.values(), *now.values.values()]
    allowed = {name for name, key in now.keys.items() if key.may_change != "never"}
    allowed = {name for name in allowed - DATA_SOURCES if f"<{name}>" not in texts}
    if "lazy" in {described.values.get("audio_store") for described in (before, now)}:
        allowed -= {"audio_store"}  # lazy runs take the lengths of clips from the tables
    if before.data and now.data:
        allowed |= DATA_SOURCES
    same = {path for path, text in now.references.items() if before.references.get(path) == text}
    for difference in _compare(before.values, now.values):
        if any(f"{difference.name}.".startswith(f"{path}.") for path in same):
            continue  # it follows the value that the reference names
        is_item = isinstance(now.values.get(difference.key), list)  # of a list that has a name
        name = difference.key if is_item else difference.name
        is_allowed = difference.key in allowed or _adjusts_training(name, now)
        differing.append(difference._replace(is_allowed=is_allowed))
    return differing


def _adjusts_training(name: str, described: RunDescription) -> bool:
    """Return whether a value decides nothing but optimizers, their schedule and the last epoch."""
    if OPTIMIZER_KEY in name.split(".")[:-1] or name == LIMIT_PATH:
        return True
    paths = described.paths_referring_to(name)
    in_optimizers = [path for path in paths if _adjusts_training(path, described)]
    in_schedule = [path for path in paths if path.startswith(f"{SCHEDULE_KEY}.")]
    is_all = len(in_optimizers) + len(in_schedule) == len(paths)
    return is_all and in_optimizers != [] and name not in described.keys


def require_resumable(
    folder: Path,
    now: RunDescription,
    *,
    trains: bool = True,
    ends: Mapping[str, float] = MappingProxyType({}),
) -> str | None:
    """Refuse to resume another run in a folder; return a message about changed values, if any.

    A folder without a checkpoint may hold any run.

    trains: whether the caller trains it. If not, or if the run has ended, changes without an effect
        are refused, too: those of training, and once results exist those of the test.
    ends: what has ended the run: keys, and the values that they must exceed to train on.
    """
    newest = newest_checkpoint(folder / CHECKPOINTS)
    if newest is None:
        return None
    before = read_description(folder)
    differing = differences(before, now)
    if refused := [difference for difference in differing if not difference.is_allowed]:
        count = plural(len(refused), "thing differs", "things differ")
        raise ConfigError(
            f"The run in {folder} was started with another configuration: {count} "
            f"({_list(refused)}). For a new run, choose another `output_folder`."
        )
    changes = [difference for difference in differing if difference.key not in DATA_SOURCES]
    if ends or not trains:
        changes = [change for change in changes if change.key not in machine_keys(now.keys)]
        effective = {name for name, key in now.keys.items() if key.may_change == "after training"}
        effective = set() if (folder / SUMMARY).exists() else effective
        # The content of a file that keeps its name is not among the changed values.
        values = {d.name for d in _compare(before.values, now.values)}
        unused = [c for c in changes if c.key not in effective or c.name not in values]
        if now.values.get(LIMIT_PATH) == newest.meta.get("epoch"):  # a run ends earlier
            unused = [c for c in unused if not _decides_last_epoch(c.name, now)]
        if unused:
            values_to_exceed = [f"`{key}` above {value:g}" for key, value in ends.items()]
            fix = "To use these values, call `train`, which resumes the run"
            if ends:
                fix = f"To train on, raise {' and '.join(values_to_exceed)}"
            raise ConfigError(
                f"The run in {folder} is not trained further here, so a change has no effect "
                f"({_list(unused)}). {fix}. For another decoder, report or format, run "
                f"sbkit tune, score or export {folder} with --out NEW. For a new run, choose "
                "another `output_folder`."
            )
    if not changes:
        return None
    lines = ["Resuming with changed values:"]
    lines += map(str, changes)
    if any(_decides_last_epoch(change.name, now) for change in changes):
        lines.append("the learning rate follows the schedule over the new number of epochs")
    return "\n  ".join(lines)


def _decides_last_epoch(name: str, described: RunDescription) -> bool:
    paths = described.paths_referring_to(name)
    return name == LIMIT_PATH or any(_decides_last_epoch(path, described) for path in paths)


def require_same_on_ranks(described: RunDescription) -> None:
    """Refuse, on all ranks, a rank with another YAML or other data than rank 0."""
    keys = described.keys
    described = replace(described, keys={})  # what it declares cannot be sent
    (first, first_rank), *other_ranks = gather_over_ranks((described, describe_rank()))
    for other, other_rank in other_ranks:
        differing = [
            difference
            for difference in differences(first, other)
            if keys.get(difference.key, Key()).may_change != "per process"
        ]
        if differing:
            raise ConfigError(
                "All processes must train the same model on the same data, but "
                f"{differing[0].name}: {_short(differing[0].before)} for {first_rank}, "
                f"{_short(differing[0].now)} for {other_rank}."
            )


def _list(differing: Sequence[Difference]) -> str:
    return listed(differing, max_names=MAX_LISTED_DIFFERENCES, separator="; ")


def _hash_differences(
    name: str, before: Mapping[str, str] | None, now: Mapping[str, str] | None
) -> Iterator[Difference]:
    """Yield the hashes that differ, if they are known for both runs.

    name: may contain {} for the key of a hash.
    """
    if before is not None and now is not None:
        for difference in _compare(before, now):
            yield difference._replace(name=name.format(difference.name))


def _rename_files(before: RunDescription, now: RunDescription) -> RunDescription:
    """Give files of the earlier run the names that files of equal content have in the later run."""
    names = {digest: name for name, digest in now.files.items()}
    renamed = {
        name: names.get(digest, f"other content of {name}")
        for name, digest in before.files.items()
        if digest != now.files.get(name) and (name in now.files or digest in names)
    }
    return replace(before, values=_replace_texts(before.values, renamed))


def require_trusted(
    settings: Mapping[str, Any], user_keys: Collection[str], user_modules: Collection[str]
) -> None:
    """Refuse a run that is read as data, if it names untrusted modules, URLs or special files.

    user_keys: the keys that the user has set.
    user_modules: the modules that the user trusts.
    """
    names = {"corpus": settings["corpus"], RECIPE: str(settings.get(RECIPE)).rpartition(".")[0]}
    for key in names.keys() - user_keys:
        module = str(names[key] or "sbkit.")
        if not module.startswith(("sbkit.", "recipes.")) and module not in user_modules:
            raise ConfigError(
                f"The run in {settings[OUTPUT_FOLDER]} needs code of the module {module}, which is "
                f"not part of sbkit. If you trust it, pass --import {module}, or in Python "
                "`user_modules`."
            )
    for key in {*DATA_SOURCES, "lm_text"} - {*user_keys}:
        for text in to_json(settings[key]).split('"'):
            path = Path(text)
            if "://" in text or (path.exists() and not (path.is_file() or path.is_dir())):
                raise ConfigError(
                    f"`{key}` of the run is {text}. For safety it is opened only if you name it "
                    "yourself: sbkit score RUN TABLE, sbkit tune RUN/bundle --data TABLE --out "
                    f"NEW, or in Python Run.open(RUN, {{'{key}': ...}})."
                )


def machine_keys(keys: Mapping[str, Key]) -> set[str]:
    """Return the keys of the machine, of logging and of saving.

    A finished run may be opened with other values, but its folder keeps the values it was trained
    with.
    """
    return {name for name, key in keys.items() if not key.affects}


def has_checkpoint(run: Path) -> bool:
    """Return whether a run has saved anything yet."""
    return newest_checkpoint(run / CHECKPOINTS) is not None


def read_description(folder: Path) -> RunDescription:
    """Read the description of the run in a folder."""
    file = folder / RUN_CONFIG_FILE
    fix = "For a new run, choose another `output_folder`."
    with parsing_errors(file, "hold the description of a run", fix=fix, is_json=True):
        return from_plain(RunDescription, json.loads(read_file(file)))


def write_description(folder: Path, described: RunDescription) -> None:
    """Write the description of a run into its folder."""
    content = {name: value for name, value in vars(described).items() if name != "keys"}
    write_text_atomically(folder / RUN_CONFIG_FILE, to_json(content, indent=1) + "\n")


def _leaves(node: object, keys: Keys, seen: dict[int, str]) -> Iterator[tuple[str, Any]]:
    """Yield the tags and scalars below a node by dotted path; for an alias, the path it names."""
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
    """Replace texts at any depth of a plain value."""
    if isinstance(value, Mapping):
        return {key: _replace_texts(item, texts) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace_texts(item, texts) for item in value]
    return texts.get(value, value) if isinstance(value, str) else value


def _compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the differences in the order of ``now``; nested values by key, or by index."""
    removed = [name for name in before if name not in now]
    for name in [*now, *removed]:
        old = before.get(name, MISSING)
        new = now.get(name, MISSING)
        if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            old, new = dict(enumerate(old)), dict(enumerate(new))
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            for difference in _compare(old, new):
                yield difference._replace(name=f"{name}.{difference.name}")
        elif old != new:
            yield Difference(name, old, new)


def _short(value: Any) -> str:
    return "nothing" if value is MISSING else short_value(value)
