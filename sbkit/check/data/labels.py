"""Whether tokenizer, heads and transcripts agree on what a label is."""

from collections.abc import Iterator
from contextlib import suppress

import numpy as np
from torch import nn

from sbkit.check.data.utterances import about, transcripts_of
from sbkit.check.finding import Finding
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.models.asr import head_size
from sbkit.models.parts import TransformerPart, WaveformPart, token_embedding

CHECK = "labels"
RARE = 0.02  # share of a split's transcripts with foreign characters, as healthy corpora have them


def check_labels(planned: PlannedRun) -> Iterator[Finding]:
    """Compare the sizes, and the labels of every transcript."""
    for check in (_check_sizes, _check_transcripts):
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
                effect=f"has {size}",
                fix="Write `!ref <tokenizer.vocab_size>` for its size.",
            )


def _sizes(planned: PlannedRun) -> Iterator[tuple[str, int]]:
    """Yield all that has one row or output per token; the others must agree with the first."""
    hparams = planned.hparams
    vocab_size = getattr(hparams.get("tokenizer"), "vocab_size", None)
    if isinstance(vocab_size, int):
        yield "the tokenizer", vocab_size
    for name in planned.recipe.task.heads:
        head = hparams.get(name)
        if isinstance(head, nn.Module):
            yield name, head_size(head)
    for part in (TransformerPart, WaveformPart):
        embedding = token_embedding(hparams.get(part.NAME))
        if embedding is not None:
            yield part.NAME, embedding.num_embeddings


def _check_transcripts(planned: PlannedRun) -> Iterator[Finding]:
    """Find labels that no loss may see, characters that the tokenizer lacks, and no text."""
    transcripts, vocabulary = transcripts_of(planned), planned.labels.vocabulary
    yield from about(
        planned,
        CHECK,
        "tokenizer",
        {name: np.flatnonzero(each.refused) for name, each in transcripts.items()},
        declared=f"every transcript must have labels from 0 to {vocabulary.size - 1} without the "
        f"blank ({vocabulary.blank})",
        fix="Use the tokenizer that was trained on this text.",
    )
    unknown = {name: np.flatnonzero(each.unknown) for name, each in transcripts.items()}
    is_rare = all(
        len(rows) <= RARE * len(transcripts[name].unknown) for name, rows in unknown.items()
    )
    yield from about(
        planned,
        CHECK,
        "data_folder",
        unknown,
        declared="every transcript must consist of characters that the tokenizer knows",
        fix="So few foreign characters count as errors, and need nothing done."
        if is_rare
        else "Correct these transcripts. Where they are many and of train, choose another "
        "--output_folder, for which a tokenizer is trained anew.",
        stops=False,
    )
    yield from about(
        planned,
        CHECK,
        "data_folder",
        {name: np.flatnonzero(each.characters == 0) for name, each in transcripts.items()},
        declared="every utterance must have a transcript",
        fix="Write down what was said, or take the rows out.",
        stops=False,
    )
