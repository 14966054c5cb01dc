"""Whether tokenizer, heads and transcripts agree on what a label is."""

from collections.abc import Iterator
from contextlib import suppress

import numpy as np
from torch import nn

from sbkit.check.data.characters import check_unseen
from sbkit.check.data.utterances import TEXT, TRAIN, about, transcripts_of
from sbkit.check.finding import Finding
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.models.asr import head_size
from sbkit.models.parts import TransformerPart, WaveformPart, token_embedding
from sbkit.tasks.speech_recognition import SPEECH_RECOGNITION

CHECK = "labels"


def check_labels(planned: PlannedRun) -> Iterator[Finding]:
    """Compare sizes, the labels of every transcript, and its characters."""
    for check in (_check_sizes, _check_transcripts, check_unseen):
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
