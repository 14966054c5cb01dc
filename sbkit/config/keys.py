"""The keys of a run: their values, defaults and meanings, and what a change of one means.

`KEYS` has the keys that the code of sbkit reads in any run; the YAML's words are read by their
types. A recipe adds its own to them (`Recipe.keys`), and an argument of a class is declared by its
annotation.
"""

import math
import pydoc
from collections.abc import Callable, Iterator, Mapping, Set
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property, partial
from inspect import signature
from typing import Annotated, Any, Literal, get_type_hints

from sbkit.base.errors import ConfigError
from sbkit.base.ranges import (
    DAY,
    NULL,
    UNCHECKED,
    Constraint,
    Either,
    ListOf,
    MappingOf,
    NonNegative,
    Range,
    Share,
    Speeds,
    Text,
    Texts,
    constraint_of,
    range_error,
)

# What of a run another value of a key changes first; what is made from that changes, too.
Effect = Literal["rows", "labels", "weights", "results"]
# Whether a run goes on with another value: never; when it is resumed; also after its last step,
# until it has results; and also in only some of its processes. A key of rows that may differ
# between processes is compared by the content of the data.
Change = Literal["never", "when resumed", "after training", "per process"]
REQUIRED = object()  # the default of a key that a YAML must have


# ---- conditions


@dataclass(frozen=True)
class Condition:
    """What the value of another key must be; it is pickled with a run."""

    text: str
    holds: Callable[[Any], bool]


def above(limit: float) -> Condition:
    """Return the condition that a number is above a limit."""
    return Condition(f"above {limit:g}", partial(_is_ordered, low=limit))


def below(limit: float) -> Condition:
    """Return the condition that a number is below a limit."""
    return Condition(f"below {limit:g}", partial(_is_ordered, high=limit))


def one_of(*values: object) -> Condition:
    """Return the condition that a value is one of these."""
    return Condition(" or ".join(map(str, values)), values.__contains__)


def _is_ordered(value: object, low: float = -math.inf, high: float = math.inf) -> bool:
    return isinstance(value, int | float) and low < value < high


def _has_all(value: object) -> bool:
    return isinstance(value, Mapping) and "all" in value


IS_SET = Condition("set", bool)
HAS_ALL = Condition("a mapping with `all`", _has_all)
SOME_NAMES = MappingOf(item=UNCHECKED, may_be_empty=False)


# ---- keys


@dataclass(frozen=True)
class Key:
    """A key of a run's YAML.

    type: the type of its values, as the annotation of an argument says it (`constraint_of`).
    default: the value if the YAML leaves it out, or REQUIRED.
    meaning: describes it in `sbkit config --all` and on the page of keys.
    affects: what of a run another value changes first; nothing for a key of the machine.
    may_change: whether a run goes on with another value.
    needs: conditions of other keys; without any of these, the key has no effect.
    """

    type: Any = UNCHECKED
    default: Any = REQUIRED
    meaning: str = ""
    _: KW_ONLY
    affects: Set[Effect] = frozenset({"weights"})
    may_change: Change = "never"
    needs: Mapping[str, Condition] = field(default_factory=dict)

    @cached_property
    def values(self) -> Constraint:
        """The allowed values."""
        return constraint_of(self.type)


# ---- the keys of every run

NOTHING: Set[Effect] = frozenset()
ROWS: Set[Effect] = frozenset({"rows"})
LABELS: Set[Effect] = frozenset({"labels"})
RESULTS: Set[Effect] = frozenset({"results"})

data_key = partial(Key, affects=ROWS)
label_key = partial(Key, affects=LABELS)
source_key = partial(Key, affects=ROWS, may_change="per process")  # where the data lies
process_key = partial(Key, affects=NOTHING, may_change="per process")
machine_key = partial(Key, affects=NOTHING, may_change="when resumed")
resumed_key = partial(Key, may_change="when resumed")  # of how, or how long, a run trains
end_key = partial(Key, affects=RESULTS, may_change="after training")

SomeTexts = Annotated[list[str], ListOf(item=Text(), may_be_empty=False)]
Names = Mapping[str, Any]
TextMapping = Annotated[object, MappingOf(item=Texts())]
FileMapping = Annotated[object, MappingOf(item=Texts(), may_be_empty=False)]
Precision = Literal["fp32", "bf16", "fp16"]
AudioStore = Literal["pcm", "flac", "lazy"]
LANGUAGE_MODELS = {"word_lm_order": above(0), "token_lm_order": above(0)}
MAX_BATCH_SECONDS = 1_000_000  # a count of samples must fit into 64 bits


def _count(low: int, advice: str, high: float = math.inf) -> Range:
    return Range(low=low, high=high, integer=True, advice=advice)


KEYS: Mapping[str, Key] = {
    # ---- run
    "recipe": Key(),
    "seed": Key(_count(0, "Pass any such number.", 2**63 - 1)),
    "output_folder": process_key(str),
    "device": machine_key(
        str | None, None, "cpu, cuda, cuda:N, mps, xpu:N; null: the first GPU, else the CPU"
    ),
    "precision": resumed_key(Precision, "fp32", "fp32, bf16 or fp16"),
    "compile": resumed_key(
        bool, False, "compile the model's blocks, for a GPU; the first steps take a minute"
    ),
    "check": machine_key(bool, True, "check the run before its first step"),
    "noprogressbar": process_key(bool, False, "show no progress bar"),
    "log_every": machine_key(_count(1, "Pass 1 to log every step."), 10, "optimizer steps"),
    "stall_seconds": machine_key(
        Range(low=0, high=DAY, advice="Pass 0 for no watch."),
        900,  # a failover of Lustre may take this long and blocks everyone who reads there
        "seconds without a step, plus `store_patience`, until a run says where it hangs; 0: never",
    ),
    "store_patience": machine_key(
        Range(low=0, high=DAY, advice="Pass 0 to try once."),
        600,
        "seconds to retry reads and saves while a store or network disk is away",
    ),
    # ---- data
    "sample_rate": data_key(_count(1000, "16000 is usual.", 384_000)),
    "corpus": source_key(
        str | None, None, "a module that reads your corpus; null: chosen by data_folder or manifest"
    ),
    "data_folder": source_key(
        str | SomeTexts | None,
        None,
        "a corpus, such as a Common Voice release, or [several]; null: fetch the default",
    ),
    "manifest": source_key(
        FileMapping | None,
        None,
        "your own tables: {train: a.csv, dev: b.csv, test: c.jsonl} or {all: a.csv}",
    ),
    "language": data_key(str | SomeTexts, "und", "selects the text table and the default corpus"),
    "splits": data_key(
        FileMapping | None,
        None,
        "{train: .., valid: .., test: ..}: names of the corpus's splits; null: its default",
    ),
    "where": data_key(
        TextMapping | None,
        {},
        "{variant: pt-BR, gender: [a, b]}: only rows with these values; {}: all rows",
    ),
    "columns": data_key(
        Annotated[TextMapping | None, "Write {text: COLUMN}."],
        {},
        "{text: wrd, path: file}, or {b.csv: {text: wrd}} for one table; {text: null}: no text",
    ),
    "encoding": data_key(
        str | FileMapping | None,
        None,
        "of your tables, or {b.csv: cp1252} of one; null: UTF-8, or UTF-16 with its mark",
    ),
    "tier": data_key(
        str | SomeTexts | None,
        None,
        "of .eaf and .TextGrid: the name, type or participant of tiers; null: the only one",
    ),
    "split_shares": data_key(
        Annotated[Annotated[object, SOME_NAMES] | None, "Write null for the usual."],
        None,
        "of the speakers of `all` without a column `split`; null: {dev: 0.1, test: 0.1}",
        needs={"manifest": HAS_ALL},
    ),
    "audio_store": machine_key(
        Annotated[
            AudioStore,
            "pcm is fast; flac takes 60 % of its space; lazy none, but needs durations.",
        ],
        "pcm",
        "decoded audio: pcm, flac (0.6 of the size) or lazy (no copy; needs durations)",
    ),
    "text": label_key(
        Annotated[Names | None, "Write {case: lower}."],
        {},
        'case: keep; [".", ","]; numbers: spell',
    ),
    "keep_tags": label_key(
        list[str] | None, [], "[noise]: tags in brackets that become tokens; others are dropped"
    ),
    "vocab_size": label_key(
        Annotated[Annotated[int, _count(5, "")] | None, "Pass null for characters."]
    ),
    # ---- batches
    "mix": Key(
        Annotated[
            Mapping[str, Annotated[float, Range(low=1e-6, high=1)]] | None,
            "For no row of a source, leave it out.",
        ],
        {},
        "{train-b: 0.5}: shares of an epoch's seconds; other sources are seen once per epoch",
    ),
    "speeds": Key(Speeds, [1.0], "one is drawn for every utterance"),
    "concat_prob": Key(Share, 0.0, "the chance that an utterance is joined to the previous one"),
    "batch_seconds": Key(Range(low=0, high=MAX_BATCH_SECONDS, advice="32 is usual.")),
    # It changes with the number of processes, not the steps. A micro-batch's plan takes memory.
    "grad_accumulation_factor": machine_key(
        _count(1, "Pass 1 to split no step.", 1 << 16), 1, "micro-batches per step, to save memory"
    ),
    "eval_batch_seconds": end_key(
        Range(low=1, high=MAX_BATCH_SECONDS, advice="120 is usual."),
        120.0,
        "of padded audio; recognizers evaluate longer recordings in segments",
    ),
    # Each worker is a process: without an upper limit, a typo could use up all memory.
    "num_workers": process_key(
        _count(0, "Pass 0 to read in this process.", 1024),
        0,
        "processes that read ahead, per training process",
    ),
    "shuffle_shards": Key(
        _count(1, "Pass 1 to shuffle within each shard."),
        8,
        "number of shards of a corpus that are shuffled together",
    ),
    "store_cache": process_key(
        str | None,
        None,
        "a folder on a local disk, for whole shards of `--out`, fetched ahead of use",
    ),
    # ---- initial weights
    "init_from": Key(
        str | SomeTexts | None,
        None,
        "a run or bundle, or [several] for their mean: weights of the same name and shape",
    ),
    "init_from_differs": Key(
        str | SomeTexts | None,
        None,
        "keys, of sample_rate, compute_features, language and text, that init_from need not share",
        needs={"init_from": IS_SET},
    ),
    "pretrained": Key(
        str | None,
        None,
        "an encoder's folder, or its name on the hub, such as facebook/wav2vec2-base",
    ),
    "pretrained_revision": Key(
        str | None,
        None,
        "on the hub: a branch, a tag or a commit; null: main",
        needs={"pretrained": IS_SET},
    ),
    "freeze": Key(
        list[Annotated[str, Text(name="path")]] | Names | None,
        [],
        "frozen parts, or {PART: 1000} for 1,000 steps",
    ),
    # ---- training
    "number_of_epochs": resumed_key(_count(1, "Pass 1 to train for one.")),
    "max_minutes": resumed_key(
        NonNegative,
        0,
        "minutes of training and validation after which a run ends; 0: only after its epochs",
    ),
    "optimizer_step_limit": resumed_key(int | None, None, "steps after which a run ends"),
    "early_stopping": resumed_key(
        _count(0, "Pass 0 to train all epochs."),
        0,
        "end after so many validations without a better score; 0: never",
    ),
    "valid_interval_steps": Key(
        _count(0, "Pass 0 to validate only after an epoch."),
        0,
        "optimizer steps between two validations within an epoch; 0: only after an epoch",
        affects=RESULTS,
        may_change="when resumed",
    ),
    "lr": resumed_key(NonNegative),
    "weight_decay": resumed_key(NonNegative),
    "max_grad_norm": resumed_key(Range(advice="Pass 0 to clip nothing.")),  # or below 0
    "nonfinite_patience": resumed_key(
        _count(0, "Pass 0 to stop at the first."),
        3,
        "steps of an epoch that may be skipped because of a nonfinite loss",
    ),
    "remove_vector_weight_decay": Key(bool, True, "vectors, such as biases, do not decay"),
    "lr_scale": Key(Names | None, {}, "factors of lr by part, such as {CNN: 0.1}"),
    "layer_decay": Key(
        Names | None, {}, "factors of lr by list of layers, such as {Transformer.encoder: 0.9}"
    ),
    "ema_decay": Key(
        Range(low=0, high=0.999999, advice="At 1, the average would stay the initial weights."),
        0.0,
        "moving average of the weights, with average_checkpoints: 1; 0: none",
        needs={"average_checkpoints": one_of(1)},
    ),
    "gradient_checkpointing": machine_key(bool),
    "find_unused_parameters": machine_key(
        bool, False, "False: each step uses all parameters, on all processes"
    ),
    "debug": resumed_key(bool),
    "debug_batches": resumed_key(int),
    "debug_epochs": resumed_key(int),
    # Without a default: SpeechBrain refuses it beside `ckpt_interval_steps`, of optimizer steps.
    "ckpt_interval_minutes": machine_key(Range(advice="Pass 0 to save only after an epoch.")),
    "ckpt_interval_steps": machine_key(int),
    # ---- test sets, and exported models
    "eval_precision": end_key(Precision, "fp32", "of validation and test: fp32, bf16 or fp16"),
    "average_checkpoints": end_key(
        _count(1, "Pass 1 to take only the best."),
        1,
        "how many of the best by validation are averaged for test and export",
    ),
    "keep_better_start": end_key(
        bool,
        True,
        "a run ends with the weights of the recognizer it starts from if training makes them worse",
        needs={"init_from": IS_SET, "pretrained": IS_SET},
    ),
    "decoder": end_key(),
    "attention_rescoring": end_key(bool, needs={"ctc_weight": below(1)}),
    "lm_text": end_key(
        str | SomeTexts | None,
        None,
        "a text or [several] for both models, or an ARPA file; null: training transcripts",
        needs=LANGUAGE_MODELS,
    ),
    "report_by": end_key(
        list[str] | None,
        [],
        "columns of the data, such as [gender], whose values are scored separately",
    ),
    "export_formats": end_key(
        list[str] | None,
        [],
        "such as [onnx]: formats of `sbkit export` that the run writes into its bundle",
    ),
}
# What the data is read from; runs are compared by the data instead, if it is known.
DATA_SOURCES = frozenset(
    name for name, key in KEYS.items() if key.affects == ROWS and key.may_change == "per process"
)


# ---- arguments


def arguments_of(name: str) -> Mapping[str, Constraint]:
    """Return the values of the arguments of a class or a function, by its dotted name.

    They are declared by annotations, or as `ARGUMENTS` of a class whose arguments another library
    names. An argument without either is `UNCHECKED`.
    """
    try:
        builder: Any = pydoc.locate(name)
    except pydoc.ErrorDuringImport:
        return {}  # building the YAML will refuse it
    if name.startswith("torch.optim."):  # its annotations allow any number
        return {key: KEYS[key].values for key in ("lr", "weight_decay")}
    if name == "speechbrain.utils.epoch_loop.EpochCounter":
        return {"limit": KEYS["number_of_epochs"].values}
    constraints: dict[str, Constraint] = {}
    for owner in reversed(getattr(builder, "__mro__", (builder,))):
        make = vars(owner).get("__init__") if isinstance(owner, type) else owner
        constraints |= _annotated(make) if callable(make) else {}
        declared = getattr(owner, "__dict__", {}).get("ARGUMENTS", {})
        constraints |= {argument: constraint_of(kind) for argument, kind in declared.items()}
    return constraints


def _annotated(function: Callable[..., Any]) -> Iterator[tuple[str, Constraint]]:
    try:
        hints = get_type_hints(function, include_extras=True)
        parameters = signature(function).parameters
    except (NameError, TypeError, ValueError, AttributeError):  # names only a type checker sees
        return
    for name, kind in hints.items():
        if name in parameters:
            constraint = constraint_of(kind)
            is_optional = parameters[name].default is None and None not in constraint
            yield name, Either(parts=(NULL, constraint)) if is_optional else constraint


# ---- values


def with_defaults(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return values with the defaults of the keys that they lack; those of a YAML lack none."""
    lacking = KEYS.keys() - {*values}  # this marks no key of `Settings` as read
    declared = {name: KEYS[name].default for name in lacking}
    defaults = {name: deepcopy(d) for name, d in declared.items() if d is not REQUIRED}
    return {**defaults, **values} if defaults else values


def out_of_range(
    values: Mapping[str, object], keys: Mapping[str, Key] = KEYS
) -> Iterator[tuple[str, str]]:
    """Yield each key whose value is out of range, and the error."""
    values = dict(values.items())  # of `Settings`, this marks no key as read
    for name, key in keys.items():
        if name in values and values[name] not in key.values:
            yield name, range_error(name, values[name], key.values)


def require_values(values: Mapping[str, object], keys: Mapping[str, Key] = KEYS) -> None:
    """Raise ConfigError for the first value that is out of its range."""
    for name, error in out_of_range(values, keys):
        raise ConfigError(error, keys=(name,))
