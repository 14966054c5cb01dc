"""Whether tokenizer, heads, losses and transcripts agree on what a label is."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
from torch import nn

from sbkit.check.finding import Finding
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.check.special_tokens import check_special
from sbkit.check.utterances import about, named, transcripts_of
from sbkit.data.splits import Excluded
from sbkit.data.transcripts import read_columns
from sbkit.models.asr import head_size

CHECK = "labels"
HEADS = ("ctc_lin", "seq_lin")


def check_labels(planned: PlannedRun) -> Iterator[Finding]:
    """Compare sizes, special labels, the labels of every transcript, and its characters."""
    for check in (_check_sizes, check_special, _check_transcripts, _check_alphabet):
        with suppress(MissingPartError):
            yield from check(planned)


def _check_sizes(planned: PlannedRun) -> Iterator[Finding]:
    sizes = dict(_sizes(planned.hparams))
    whose, wanted = next(iter(sizes.items()), ("", 0))
    for name, size in sizes.items():
        if size != wanted:
            yield planned.finding(
                CHECK,
                name,
                declared=f"`{name}` has the labels of {whose} ({wanted})",
                effect=f"it has {size}: "
                + (f"no label from {size} on can be written" if size < wanted else "some are none"),
                fix="Write `!ref <tokenizer.vocab_size>` for its size.",
            )


def _sizes(hparams: dict[str, object]) -> Iterator[tuple[str, int]]:
    """Give all that has a size of the labels' number, what all others must agree with first."""
    vocab_size = getattr(hparams.get("tokenizer"), "vocab_size", None)
    if isinstance(vocab_size, int):
        yield "the tokenizer", vocab_size
    for name in HEADS:
        head = hparams.get(name)
        if isinstance(head, nn.Module):
            yield name, head_size(head)
    transformer = hparams.get("Transformer")
    if isinstance(transformer, nn.Module):
        for part in transformer.modules():
            if isinstance(part, nn.Embedding):
                yield "Transformer", part.num_embeddings


def _check_transcripts(planned: PlannedRun) -> Iterator[Finding]:
    """Find labels that no loss may see, and unknown ones where the tokenizer was trained."""
    vocabulary = planned.tokenizer.vocabulary
    transcripts = transcripts_of(planned)
    refused = [item for name in transcripts for item in _refused(planned, name)]
    yield from about(
        planned,
        CHECK,
        "tokenizer",
        found=refused,
        declared=f"every label is from 0 to {vocabulary.size - 1} and not the blank "
        f"({vocabulary.blank})",
        effect="hold another",
        fix="Use the tokenizer that was trained on this text.",
    )
    rows = np.flatnonzero(transcripts["train"].unknown)
    yield from about(
        planned,
        CHECK,
        "output_folder",
        found=list(named(planned, "train", rows, "unknown character", [""] * len(rows))),
        declared="the tokenizer knows all characters of the training text",
        effect="hold one that it does not know",
        fix="Choose another output_folder, whose tokenizer is trained anew.",
        stops=False,
    )


def _refused(planned: PlannedRun, split: str) -> Iterator[Excluded]:
    labels, encode = planned.tokenizer.vocabulary, planned.tokenizer.encode
    rows = np.flatnonzero(transcripts_of(planned)[split].refused)
    texts = planned.splits.named()[split].select(rows)["text"]
    wrong = ({id for id in encode(text) if labels.refuses(id)} for text in texts)
    details = (", ".join(map(str, sorted(ids))) for ids in wrong)
    return named(planned, split, rows, "label out of range", details)


def _check_alphabet(planned: PlannedRun) -> Iterator[Finding]:
    """Find characters of dev and test that training never saw."""
    transcripts = transcripts_of(planned)
    seen = transcripts["train"].alphabet
    counts: Counter[str] = Counter()
    found: list[Excluded] = []
    for name in planned.splits.evaluated():
        unseen = transcripts[name].alphabet - seen
        if unseen:
            found += _with_characters(planned, name, unseen, counts)
    characters = ", ".join(f"{each!r} x {count}" for each, count in counts.most_common())
    yield from about(
        planned,
        CHECK,
        "data_folder",
        found=found,
        declared="training shows every character",
        effect=f"hold characters that it never shows ({characters})",
        fix="Correct the transcripts, or add speech with these characters to train.",
        stops=False,
    )


def _with_characters(
    planned: PlannedRun, split: str, characters: frozenset[str], counts: Counter[str]
) -> Iterator[Excluded]:
    columns = read_columns(planned.splits.named()[split], "id", "text", title="Reading text")
    for table in columns:
        pairs = zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True)
        for utterance, text in pairs:
            unseen = [each for each in text if each in characters]
            counts.update(unseen)
            if unseen:
                yield Excluded(split, utterance, "unseen character", "".join(unseen))
