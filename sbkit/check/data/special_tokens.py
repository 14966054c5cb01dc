"""Special labels as a YAML declares them: one value each, and none that a loss takes for another.

SpeechBrain's recipes write them as knobs, `blank_index` and the like, and hand them to losses and
searchers; where there is a tokenizer, it must agree.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sbkit.check.finding import Finding
from sbkit.check.planned_run import PlannedRun
from sbkit.config.document import Keys, walk
from sbkit.config.references import Scope
from sbkit.text.vocabulary import Vocabulary

CHECK = "labels"
SPECIAL = re.compile(r"(blank|bos|eos|pad|unk)_(?:index|id)")


@dataclass(frozen=True)
class Special:
    """A special label as the YAML declares it, and under which key."""

    keys: Keys
    value: int


# What may not share an id: what comes of it, and whether that spoils the training.
COLLISIONS = {
    ("blank", "unk"): ("an unknown character of a transcript is CTC's blank", True),
    ("pad", "bos"): ("the decoder masks the start of every transcript as padding", True),
    ("eos", "unk"): ("an unknown character of a transcript ends it", True),
    ("pad", "unk"): ("the decoder masks an unknown character as padding", False),
    ("bos", "eos"): ("the decoder cannot tell the start of a transcript from its end", False),
}


def check_special(planned: PlannedRun) -> Iterator[Finding]:
    """Compare all places that declare a special label, with each other and the tokenizer."""
    special: dict[str, Special] = {}
    for role, found in _declared(planned):
        first = special.setdefault(role, found)
        if first.value != found.value:
            yield planned.finding(
                CHECK,
                *found.keys,
                declared=f"{role} must be one label ({first.value} at "
                f"{planned.place(*first.keys)})",
                effect=f"here it is {found.value}",
                fix=f"Write `!ref <{first.keys[-1]}>`.",
            )
    collisions = list(_check_collisions(planned, special))
    yield from collisions
    reported = {finding.where for finding in collisions}
    for role, each in special.items():
        if planned.place(*each.keys) not in reported:
            yield from _check_agreement(planned, role, each)


def _declared(planned: PlannedRun) -> Iterator[tuple[str, Special]]:
    """Yield what is called `blank_index`, `eos_id` and so on, as it takes effect."""
    document = planned.overridden
    for keys, node in walk(document.root):
        match = SPECIAL.fullmatch(str(keys[-1])) if keys else None
        value = Scope(document).evaluate(node) if match else None
        if match and isinstance(value, int):
            yield match[1], Special(keys, int(value))


def _check_collisions(planned: PlannedRun, special: dict[str, Special]) -> Iterator[Finding]:
    for (one, other), (effect, stops) in COLLISIONS.items():
        if one in special and other in special and special[one].value == special[other].value:
            yield planned.finding(
                CHECK,
                *special[other].keys,
                declared=f"{one} and {other} must be two labels",
                effect=f"both are {special[one].value}: {effect}",
                fix=f"Give {other} a label of its own.",
                stops=stops,
            )


def _check_agreement(planned: PlannedRun, role: str, declared: Special) -> Iterator[Finding]:
    """Compare with the tokenizer, whose blank also pads."""
    tokenizer: Any = planned.hparams.get("tokenizer")
    vocabulary = getattr(tokenizer, "vocabulary", None)
    if not isinstance(vocabulary, Vocabulary):
        return
    value, theirs = declared.value, getattr(vocabulary, "blank" if role == "pad" else role)
    if value != theirs:
        inside = 0 <= value < vocabulary.size
        yield planned.finding(
            CHECK,
            *declared.keys,
            declared=f"{role} must be the tokenizer's ({theirs})",
            effect=f"is {value}, which is "
            + (f"{tokenizer.pieces()[value]!r} there" if inside else "no label there"),
            fix=f"Write {theirs}.",
        )
