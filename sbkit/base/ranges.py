"""The ranges of a run's hyperparameters, checked before anything is built."""

import math
import pydoc
import re
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sbkit.base.errors import ConfigError

HOUR, DAY = 60 * 60, 24 * 60 * 60  # seconds
# Words for true and false (yaml.org/type/bool.html); YAML 1.2 reads most of them as text.
FLAG_WORDS = dict.fromkeys(("true", "yes", "y", "on"), True) | dict.fromkeys(
    ("false", "no", "n", "off"), False
)
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)


def is_finite(value: object) -> bool:
    """Return whether a value, or all that its lists and mappings hold, is neither .inf nor .nan."""
    if isinstance(value, Mapping | list | tuple):
        return all(map(is_finite, value.values() if isinstance(value, Mapping) else value))
    return not isinstance(value, float) or math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class Constraint(Container[object]):
    """The values that a key may have; ``advice`` says how to correct others."""

    advice: str

    @abstractmethod
    def advice_for(self, value: object) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Range(Constraint):
    """Finite numbers in a range, and optionally null or a word.

    >>> share = Range(low=0, high=1, advice="0 is none, 1 is all.")
    >>> 0.5 in share, "half" in share, str(share)
    (True, False, 'a number from 0 to 1')
    """

    low: float = -math.inf
    high: float = math.inf
    integer: bool = False
    or_null: bool = False
    word: str | None = None  # may replace the number

    def __contains__(self, value: object) -> bool:
        if value is None:
            return self.or_null
        if isinstance(value, str):
            return value == self.word
        if isinstance(value, bool) or not isinstance(value, int if self.integer else int | float):
            return False
        return self.low <= value <= self.high and is_finite(value)

    def __str__(self) -> str:
        alternatives = "null or " * self.or_null + (f"{self.word} or " if self.word else "")
        kind = f"{alternatives}a {'whole ' * self.integer}number"
        if self.high < math.inf:
            return f"{kind} from {self.low:g} to {self.high:g}"
        return f"{kind} of at least {self.low:g}" if self.low > -math.inf else kind

    def advice_for(self, value: object) -> str:
        """Say how to write a number that YAML reads as text, such as 0,5; else the advice."""
        text = value if isinstance(value, str) else ""
        digits = re.sub(r"[\s'\u2019]", "", text)
        start, mark, fraction = re.findall(r"(.*?)([.,]?)([^.,]*)$", digits)[0]
        is_group = mark in start or (self.integer and len(fraction) == 3)  # 1,000 or 1.000.000
        number = re.sub("[.,]", "", start) + ("" if is_group else ".") + fraction
        if not NUMBER.fullmatch(number):
            return "Write the number without its unit." if NUMBER.match(text) else self.advice
        if number == text:
            return f"Take out the quotes: {text}."
        return f"Use a point: {number}." if mark == "," and not is_group else f"Write {number}."


@dataclass(frozen=True, kw_only=True)
class NumberList(Constraint):
    """Lists of numbers in a range; of two, the lower one first, if ``is_interval``."""

    item: Range
    is_interval: bool = False

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, list | tuple) or not value:
            return False
        if not all(number in self.item for number in value):
            return False
        return not self.is_interval or (len(value) == 2 and value[0] <= value[1])

    def __str__(self) -> str:
        return f"{'[LOWEST, HIGHEST]' if self.is_interval else 'a list'}, each {self.item}"

    def advice_for(self, value: object) -> str:
        return f"Write [{value}]." if value in self.item and not self.is_interval else self.advice


SHARE = Range(low=0, high=1, advice="0 is none, 1 is all.")
DROPOUT = Range(low=0, high=0.99, advice="At 1, nothing would be left to learn from.")
NON_NEGATIVE_COUNT = Range(low=0, integer=True, advice="Pass 0 for none.")
POSITIVE_COUNT = Range(low=1, integer=True, advice="Pass 1 for the smallest.")
NON_NEGATIVE = Range(low=0, advice="Pass 0 for none.")
DECIBELS = NumberList(
    item=Range(low=-200, high=200, advice=""), is_interval=True, advice="[0, 30] is such a range."
)
SPEEDS = NumberList(item=Range(low=0.1, high=10, advice=""), advice="Write [1.0] for no change.")


def _are_texts(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) and value.strip() for value in values)


MAPPING_OF_NAMES = "a mapping with names as keys"
VALUE_FORMS: Mapping[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "true or false": lambda value: isinstance(value, bool),
    "false": lambda value: value is False,
    "true or false, not in words": lambda value: as_flag(value) is value,
    "text": lambda value: _are_texts([value]),  # an unset shell variable gives an empty one
    "one language tag": lambda value: _are_texts([value]),
    "set": bool,
    "1": lambda value: value == 1,
    "above 0": lambda value: isinstance(value, int | float) and value > 0,
    "below 1": lambda value: isinstance(value, int | float) and value < 1,
    "a list of paths": lambda value: isinstance(value, list) and _are_texts(value),
    "a mapping with `all`": lambda value: isinstance(value, Mapping) and "all" in value,
    "[]": lambda value: value == [],
    "{}": lambda value: value == {},
    "a list of texts": lambda value: isinstance(value, list) and value != [] and _are_texts(value),
    MAPPING_OF_NAMES: lambda value: (
        isinstance(value, Mapping) and value != {} and _are_texts(value) and is_finite(value)
    ),
    "a mapping of texts": lambda value: (  # or of lists of them
        isinstance(value, Mapping) and value != {} and is_finite(value)
    ),
    "a mapping to shares above 0": lambda value: (
        VALUE_FORMS[MAPPING_OF_NAMES](value)
        and all(share in SHARE and share > 0 for share in value.values())
    ),
}


def _has_form(value: object, form: str | int) -> bool:
    if form in VALUE_FORMS:
        return VALUE_FORMS[str(form)](value)
    return isinstance(value, type(form)) and value == form


@dataclass(frozen=True)
class ValueType(Constraint):
    """Fixed words or numbers, and values in one of several `VALUE_FORMS`."""

    forms: tuple[str | int, ...]
    advice: str = field(default="Write text in quotes.", kw_only=True)

    def __contains__(self, value: object) -> bool:
        return any(_has_form(value, form) for form in self.forms)

    def __str__(self) -> str:
        return " or ".join(map(str, self.forms))

    def advice_for(self, value: object) -> str:
        """Say how to correct a value: text in place of a list needs brackets."""
        return f"Write [{value}]." if "[]" in self.forms and isinstance(value, str) else self.advice


FLAG = ValueType(("true or false",), advice="Write True or False.")
# An argument without a range: "off" would count as true.
ARGUMENT = ValueType(
    ("true or false, not in words",),
    advice="Write True or False. A class that takes words declares it: `RANGES = {NAME: TEXT}`.",
)
TEXT = ValueType(("null", "text"), advice="Write null for none.")
TEXTS = ValueType(("null", "text", "a list of texts"), advice="Write null for none.")
LIST = ValueType(("null", "[]", "a list of texts"), advice="Write [] for none.")
MAPPING = ValueType(("null", "{}", MAPPING_OF_NAMES), advice="Write {} for none.")
FILE_MAPPING = ValueType(("null", "a mapping of texts"), advice="Write null for none.")
TEXT_MAPPING = ValueType(("null", "{}", "a mapping of texts"), advice="Write {} for none.")

REQUIRED = object()  # the default of a key that a YAML must have


@dataclass(frozen=True)
class Key:
    """A key of a run's YAML.

    values: the allowed values.
    default: the value if the YAML leaves it out, or REQUIRED.
    meaning: describes a key with a default, in `sbkit config --all` and on the page of keys.
    needs: other keys and the form of their values; without any of these, the key has no effect.
    """

    values: Constraint
    default: Any = REQUIRED
    meaning: str = ""
    needs: Mapping[str, str] = field(default_factory=dict)


# The keys of every run whose YAML names a recipe. A recipe declares its own keys as `ranges`, and a
# class its arguments as `RANGES`. A YAML without a recipe has SpeechBrain's own defaults.
KEYS: Mapping[str, Key] = {
    "seed": Key(Range(low=0, high=2**63 - 1, integer=True, advice="Pass any such number.")),
    **dict.fromkeys(("compile", "check", "gradient_checkpointing"), Key(FLAG)),
    "attention_rescoring": Key(FLAG, needs={"ctc_weight": "below 1"}),
    "find_unused_parameters": Key(FLAG),
    "output_folder": Key(ValueType(("text",))),
    "corpus": Key(TEXT),
    **dict.fromkeys(("data_folder", "language"), Key(TEXTS)),
    "lm_text": Key(TEXTS, needs={"word_lm_order": "above 0", "token_lm_order": "above 0"}),
    **dict.fromkeys(("manifest", "splits"), Key(FILE_MAPPING)),
    "where": Key(TEXT_MAPPING),
    "freeze": Key(
        ValueType(("null", "a list of paths", "{}", MAPPING_OF_NAMES), advice="Write [] for none.")
    ),
    "eval_precision": Key(TEXT, "fp32", "of validation and test: fp32, bf16 or fp16"),
    "columns": Key(
        replace(TEXT_MAPPING, advice="Write {text: COLUMN}."),
        {},
        "{text: wrd, path: file}, or {b.csv: {text: wrd}} for one table; {text: null}: no text",
    ),
    "encoding": Key(
        ValueType(("null", "text", "a mapping of texts"), advice="Write null for none."),
        None,
        "of your tables, or {b.csv: cp1252} of one; null: UTF-8, or UTF-16 with its mark",
    ),
    "split_shares": Key(
        ValueType(("null", MAPPING_OF_NAMES), advice="Write null for the usual."),
        None,
        "of the speakers of `all` without a column `split`; null: {dev: 0.1, test: 0.1}",
        needs={"manifest": "a mapping with `all`"},
    ),
    "keep_tags": Key(LIST, [], "[noise]: tags in brackets that become tokens; others are dropped"),
    "mix": Key(
        ValueType(
            ("null", "{}", "a mapping to shares above 0"),
            advice="For no row of a source, leave it out.",
        ),
        {},
        "{train-b: 0.5}: shares of an epoch's seconds; other sources are seen once per epoch",
    ),
    "shuffle_shards": Key(
        Range(low=1, integer=True, advice="Pass 1 to shuffle within each shard."),
        8,
        "number of shards of a corpus that are shuffled together",
    ),
    "store_cache": Key(
        TEXT, None, "a folder on a local disk, for whole shards of `--out`, fetched ahead of use"
    ),
    "report_by": Key(
        LIST, [], "columns of the data, such as [gender], whose values are scored separately"
    ),
    # Each worker is a process: without an upper limit, a typo could use up all memory.
    "num_workers": Key(
        Range(low=0, high=1024, integer=True, advice="Pass 0 to read in this process.")
    ),
    "number_of_epochs": Key(Range(low=1, integer=True, advice="Pass 1 to train for one.")),
    "max_minutes": Key(
        NON_NEGATIVE,
        0,
        "minutes of training and validation after which a run ends; 0: only after its epochs",
    ),
    "early_stopping": Key(Range(low=0, integer=True, advice="Pass 0 to train all epochs.")),
    "valid_interval_steps": Key(
        Range(low=0, integer=True, advice="Pass 0 to validate only after an epoch."),
        0,
        "optimizer steps between two validations within an epoch; 0: only after an epoch",
    ),
    "grad_accumulation_factor": Key(  # the plan of each micro-batch takes memory
        Range(low=1, high=1 << 16, integer=True, advice="Pass 1 to split no step.")
    ),
    "init_from": Key(TEXTS),
    "pretrained": Key(TEXT),
    "pretrained_revision": Key(TEXT, needs={"pretrained": "set"}),
    "init_from_differs": Key(
        TEXTS,
        None,
        "keys, of sample_rate, compute_features, language and text, that init_from need not share",
        needs={"init_from": "set"},
    ),
    "lr_scale": Key(MAPPING, {}, "factors of lr by part, such as {CNN: 0.1}"),
    "layer_decay": Key(
        MAPPING, {}, "factors of lr by list of layers, such as {Transformer.encoder: 0.9}"
    ),
    "lr": Key(NON_NEGATIVE),
    "weight_decay": Key(NON_NEGATIVE),
    "remove_vector_weight_decay": Key(FLAG, True, "vectors, such as biases, do not decay"),
    "max_grad_norm": Key(Range(advice="Pass 0 to clip nothing.")),  # or below 0
    "log_every": Key(
        Range(low=1, integer=True, advice="Pass 1 to log every step."), 10, "optimizer steps"
    ),
    "nonfinite_patience": Key(
        Range(low=0, integer=True, advice="Pass 0 to stop at the first."),
        3,
        "steps of an epoch that may be skipped because of a nonfinite loss",
    ),
    "stall_seconds": Key(
        Range(low=0, high=DAY, advice="Pass 0 for no watch."),
        900,  # a failover of Lustre may take this long and blocks everyone who reads there
        "seconds without a step, plus `store_patience`, until a run says where it hangs; 0: never",
    ),
    "store_patience": Key(
        Range(low=0, high=DAY, advice="Pass 0 to try once."),
        600,
        "seconds to retry reads and saves while a store or network disk is away",
    ),
    # Without a default: SpeechBrain refuses it beside `ckpt_interval_steps`, of optimizer steps.
    "ckpt_interval_minutes": Key(Range(advice="Pass 0 to save only after an epoch.")),  # or below 0
    "ema_decay": Key(
        Range(low=0, high=0.999999, advice="At 1, the average would stay the initial weights."),
        0.0,
        "moving average of the weights, with average_checkpoints: 1; 0: none",
        needs={"average_checkpoints": "1"},
    ),
    "average_checkpoints": Key(Range(low=1, integer=True, advice="Pass 1 to take only the best.")),
    "keep_better_start": Key(
        FLAG,
        True,
        "a run ends with the weights of the recognizer it starts from if training makes them worse",
    ),
    "export_formats": Key(
        LIST, [], "such as [onnx]: formats of `sbkit export` that the run writes into its bundle"
    ),
    "vocab_size": Key(Range(low=5, integer=True, or_null=True, advice="Pass null for characters.")),
}
RANGES = {name: key.values for name, key in KEYS.items()}


def out_of_range(
    values: Mapping[str, object], ranges: Mapping[str, Constraint] = RANGES
) -> Iterator[tuple[str, str]]:
    """Yield each key whose value is out of range, and the error."""
    values = dict(values.items())  # of `Settings`, this marks no key as read
    for key, range_ in ranges.items():
        if key in values and values[key] not in range_:
            yield key, range_error(key, values[key], range_)


def as_flag(value: object) -> object:
    """Return true or false for a word that means it, and any other value as it is."""
    return FLAG_WORDS.get(value.lower(), value) if isinstance(value, str) else value


def range_error(key: str, value: object, range_: Constraint) -> str:
    """Write why a value is refused, and what to do."""
    must_be = range_ if is_finite(value) else "finite"
    return f"`{key}` must be {must_be}, but is {value!r}. {range_.advice_for(value)}"


def require_in_range(
    values: Mapping[str, object], ranges: Mapping[str, Constraint] = RANGES
) -> None:
    """Raise ConfigError for the first value that is out of its range."""
    for key, error in out_of_range(values, ranges):
        raise ConfigError(error, keys=(key,))


def ranges_of(name: str) -> Mapping[str | int, Constraint]:
    """Return the ranges that a class declares for its arguments, or a recipe for its keys."""
    try:
        builder: Any = pydoc.locate(name)
    except pydoc.ErrorDuringImport:
        return {}  # building the YAML will refuse it
    declared = getattr(builder, "RANGES", None) or getattr(builder, "ranges", {})
    return {**_ranges_of_library(name), **declared}


def _ranges_of_library(name: str) -> Mapping[str | int, Constraint]:
    """Return ranges of arguments of classes that declare none: optimizers and the epoch counter."""
    if name == "speechbrain.utils.epoch_loop.EpochCounter":
        return {"limit": RANGES["number_of_epochs"]}
    if name.startswith("torch.optim."):
        return {key: RANGES[key] for key in ("lr", "weight_decay")}
    return {}
