"""Whether tokenizer, heads, losses and transcripts agree on what a label is.

SpeechBrain's recipes write special labels as knobs, `blank_index` and the like, and hand them to
losses and searchers: each must have one value, none that a loss takes for another, and agree with
the tokenizer where there is one.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from sbkit.check.data.characters import check_unseen
from sbkit.check.data.utterances import TEXT, TRAIN, about, transcripts_of
from sbkit.check.finding import Finding
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.config.document import Keys, walk
from sbkit.config.references import Scope
from sbkit.models.asr import head_size
from sbkit.models.parts import TransformerPart, WaveformPart, token_embedding
from sbkit.tasks.speech_recognition import SPEECH_RECOGNITION
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


def check_labels(planned: PlannedRun) -> Iterator[Finding]:
    """Compare sizes, special labels, the labels of every transcript, and its characters."""
    for check in (_check_sizes, check_special, _check_transcripts, check_unseen):
        with suppress(MissingPartError):
            yield from check(planned)


def _check_sizes(planned: PlannedRun) -> Iterator[Finding]:
    sizes = dict(_sizes(planned))
    whose, wanted = next(iter(sizes.items()), ("", 0))
    for name, size in sizes.items():
        if size != wanted:
            yield planned.finding(
                CHECK,
                name,
                declared=f"`{name}` must have as many outputs or rows as {whose} has tokens "
                f"({wanted})",
                effect=f"has {size}: "
                + (
                    f"no token from {size} on could be written"
                    if size < wanted
                    else "the last ones stand for no token"
                ),
                fix="Write `!ref <tokenizer.vocab_size>` for its size.",
            )


def _sizes(planned: PlannedRun) -> Iterator[tuple[str, int]]:
    """Yield all that has one row or output per token; the others must agree with the first."""
    hparams = planned.hparams
    task = planned.recipe.task if planned.has_recipe else SPEECH_RECOGNITION
    vocab_size = getattr(hparams.get("tokenizer"), "vocab_size", None)
    if isinstance(vocab_size, int):
        yield "the tokenizer", vocab_size
    for name in task.heads:
        head = hparams.get(name)
        if isinstance(head, nn.Module):
            yield name, head_size(head)
    for part in (TransformerPart, WaveformPart):
        embedding = token_embedding(hparams.get(part.NAME))
        if embedding is not None:
            yield part.NAME, embedding.num_embeddings


def _check_transcripts(planned: PlannedRun) -> Iterator[Finding]:
    """Find labels that no loss may see, and characters of train that the tokenizer lacks."""
    transcripts = transcripts_of(planned)
    vocabulary = planned.labels.vocabulary
    refused = {name: np.flatnonzero(each.refused) for name, each in transcripts.items()}
    unknown = {TRAIN: np.flatnonzero(transcripts[TRAIN].unknown)}

    def wrong(split: str, row: int) -> str:
        ids = planned.labels.encode(planned.splits.named()[split][TEXT][row])
        return ", ".join(map(str, sorted({each for each in ids if vocabulary.refuses(each)})))

    yield from about(
        planned,
        "tokenizer",
        check=CHECK,
        found=refused,
        reason="label out of range",
        detail=wrong,
        declared=f"every label must be from 0 to {vocabulary.size - 1} and not the blank "
        f"({vocabulary.blank})",
        effect="hold another",
        fix="Use the tokenizer that was trained on this text.",
    )
    yield from about(
        planned,
        "output_folder",
        check=CHECK,
        found=unknown,
        reason="unknown character",
        declared="the tokenizer must know every character of train",
        effect="hold one that it does not know",
        fix="Choose another --output_folder, for which a tokenizer is trained anew.",
        stops=False,
    )


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
