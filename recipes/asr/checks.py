"""Checks of a recognizer's run: its transcripts, their labels and frames, and its decoder.

Legend: B utterances, L tokens, V vocabulary.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor

from sbkit.base.messages import plural
from sbkit.base.units import samples_to_seconds
from sbkit.check.checked_run import CheckedRun, Finding, finding_of_rows
from sbkit.check.data import MAX_RARE_SHARE, MAX_SHOWN_TEXT, TRAIN
from sbkit.check.dry_run import evaluation, small_batch
from sbkit.checkpoint.rng import preserve_rng
from sbkit.config.document import dotted
from sbkit.data.batch import TextBatch
from sbkit.data.sampler import fastest_percent
from sbkit.data.splits import TextCounts, TextTokenizer, count_tokens, read_texts
from sbkit.models.encoder import find_subsampling
from sbkit.text.normalization import separates_words
from sbkit.train.brain import Brain
from sbkit.train.schedule import highest_factor

MAX_UNALIGNED_SHARE = 0.05  # utterances; with more, training does not start
MAX_LOGIT_CHANGE = 1e-4  # relative to the largest logit: sums may be taken in another order
# The lowest, usual and highest peak rates of a kind of Adam. In hparams/ they are 0.0008 to 0.0025;
# at 1.0, ctc.yaml writes only blanks.
SCRATCH_RATES = (5e-5, 1e-3, 0.02)
TUNING_RATES = (1e-6, 1e-4, 0.02)  # for weights that were trained before
# Mean uses of a token in the training transcripts, for a vocabulary that is not of characters.
# A character of ctc.yaml has 480; each of 5,000 tokens would have at most 2.7.
MIN_TOKEN_USES, MIN_LARGE_VOCABULARY = 5.0, 200


def _read_transcripts(run: CheckedRun) -> dict[str, TextCounts]:
    """Return the transcripts of all splits; {} for a run whose labels are not of text."""
    labels = run.data.labels
    if not isinstance(labels, TextTokenizer):
        return {}
    splits = run.data.splits.named()
    return {name: count_tokens(split, labels) for name, split in splits.items()}


def check_texts(run: CheckedRun) -> Iterator[Finding]:
    """Find labels that no loss may see, unknown characters, and empty or equal transcripts."""
    transcripts = _read_transcripts(run)
    if not transcripts:
        return
    vocabulary = run.data.labels.vocabulary
    yield from finding_of_rows(
        run,
        {name: np.flatnonzero(split.has_refused_id) for name, split in transcripts.items()},
        key="tokenizer",
        problem=f"Transcripts have labels outside 0 to {vocabulary.size - 1}, or the blank "
        f"({vocabulary.blank}) among them",
        fix="Use the tokenizer that was trained on this text.",
        stops=True,
    )
    valid = [transcripts[name] for name in run.data.splits.valid]
    masks = [split.has_unknown for split in transcripts.values()]
    is_rare = all(mask.sum() <= MAX_RARE_SHARE * len(mask) for mask in masks)
    yield from finding_of_rows(
        run,
        {name: np.flatnonzero(split.has_unknown) for name, split in transcripts.items()},
        problem="Transcripts have characters that the tokenizer does not know",
        fix="Nothing needs to be done about so few: they count as errors."
        if is_rare
        else "Correct these transcripts, or train a new tokenizer in another `output_folder`.",
    )
    yield from finding_of_rows(
        run,
        {name: np.flatnonzero(split.characters == 0) for name, split in transcripts.items()},
        problem="Utterances are without a transcript",
        fix="Write down what was said, or remove the rows.",
        stops=bool(valid) and not any(split.characters.any() for split in valid),
    )
    train = run.data.splits.train
    text = next(chain.from_iterable(read_texts(train)), "")
    if len(train) > 1 and text and all({*texts} == {text} for texts in read_texts(train)):
        yield run.note(
            "data_folder",
            problem=f"All {len(train):,} transcripts of train are {text[:MAX_SHOWN_TEXT]!r}",
            fix="Check the column of the transcripts, `columns: {text: COLUMN}`.",
        )


def check_text_table(run: CheckedRun) -> Iterator[Finding]:
    """Compare the capitals and marks that `text` keeps, and spaces, with those of train."""
    if not isinstance(run.data.labels, TextTokenizer):
        return
    train, table = run.data.splits.train, run.data.splits.text_table(run.spec.settings)
    language = str(run.spec.settings["language"])
    if table.spaces != separates_words(language):
        yield run.note(
            "language",
            problem=f"The transcripts of train have {'' if table.spaces else 'no '}spaces between "
            f"words, unlike most text of `language: {language}`",
            fix=f"Nothing needs to be done: results have a CER and {'a' if table.spaces else 'no'} "
            "WER.",
        )
    if table.is_plain:
        return
    marks = Counter[str]()
    num_cased = num_capitalized = num_capitals = num_marked = 0
    for text in chain.from_iterable(read_texts(train)):
        text_marks = {*text} & {*table.punctuation}
        marks.update(text_marks)
        num_marked += bool(text_marks)
        num_cased += text.lower() != text.upper()
        num_capitalized += text != text.lower()
        num_capitals += text.isupper() and " " in text  # a single word may be an abbreviation
    max_rare = MAX_RARE_SHARE * len(train)
    if table.keep_case and num_cased:
        count = f"of {plural(len(train), 'transcript')} of train"
        problem = f"{num_capitals:,} {count} have nothing but capitals"
        if num_capitalized <= max_rare:
            problem = f"{num_capitalized:,} {count} have any capital"
        if num_capitalized <= max_rare or num_capitals > max_rare:
            yield run.note(
                "text",
                problem=f"`text.case: keep` is declared, but {problem}",
                fix="Write transcripts as the model should write, or leave `case` out.",
            )
    missing = [mark for mark in table.punctuation if num_marked <= max_rare or not marks[mark]]
    if missing:
        yield run.note(
            "text",
            problem=f"`text.punctuation` declares marks that {'few or ' if marks else ''}no "
            f"transcripts of train have: {' '.join(missing)}",
            fix="Write transcripts as the model should write, or leave these marks out.",
        )


def check_alignment(run: CheckedRun) -> Iterator[Finding]:
    """Find utterances with fewer frames than CTC needs, to which the loss gives no weight."""
    if run.dry_run.error is not None:
        return
    transcripts = _read_transcripts(run)
    subsampling = find_subsampling(run.copy.hparams) if transcripts else None
    if subsampling is None:
        return
    fastest = fastest_percent(run.spec.settings["speeds"])
    too_short = {
        name: split.too_short(subsampling, fastest if name == TRAIN else 100)
        for name, split in transcripts.items()
    }
    num_too_short = sum(map(len, too_short.values()))
    num_utterances = sum(len(split.tokens) for split in transcripts.values())
    fits_unchanged = not any(len(split.too_short(subsampling)) for split in transcripts.values())
    milliseconds = 1000 * samples_to_seconds(subsampling.stride, run.spec.settings["sample_rate"])
    yield from finding_of_rows(
        run,
        too_short,
        key="speeds" if fits_unchanged else "data_folder",
        problem=f"CTC cannot align utterances with fewer {milliseconds:g} ms frames than labels",
        fix="Lower the fastest of `speeds`."
        if fits_unchanged
        else "Check that each transcript belongs to its clip. If most do, use longer tokens "
        "(`token_type: bpe`, a larger `vocab_size`), or let the encoder keep more frames.",
        stops=num_too_short > MAX_UNALIGNED_SHARE * num_utterances,
    )


def check_causality(run: CheckedRun) -> Iterator[Finding]:
    """Find a decoder whose logits of a token depend on later tokens: it learns to copy them."""
    if run.dry_run.error is not None:
        return
    brain = run.brain
    batch = small_batch(run.copy)
    if not isinstance(batch, TextBatch) or not batch.decoder_tokens.numel():
        return
    tokens = batch.decoder_tokens.clone()
    row = int(batch.decoder_token_lengths.argmax())
    tokens[row, -1] = tokens[row, 0]
    before, after = _logits(brain, batch), _logits(brain, replace(batch, decoder_tokens=tokens))
    if before is None or after is None:
        return
    num_earlier = tokens.shape[1]  # (B, L + 1, V): the last logits follow the last token
    change = (before - after)[:, :num_earlier].abs().max() / before.abs().max()
    if change > MAX_LOGIT_CHANGE:
        yield run.finding(
            "Transformer" if "Transformer" in run.copy.hparams else "encoder",
            problem="The decoder sees the tokens that it is to predict",
            fix="Give its self-attention a causal mask.",
        )


def _logits(brain: Brain, batch: TextBatch) -> Tensor | None:
    with preserve_rng(brain.device), evaluation(brain, batch) as outputs:
        logits = getattr(outputs, "logits", None)
    return logits if isinstance(logits, Tensor) and logits.ndim == 3 else None


def check_causes(run: CheckedRun) -> Iterator[Finding]:
    """Note a learning rate or a vocabulary that keeps a recognizer from learning to write."""
    settings = dict(run.copy.hparams.items())  # marks no key as read
    yield from _check_vocabulary(run, settings)
    yield from _check_rate(run)


def _check_vocabulary(run: CheckedRun, settings: Mapping[str, Any]) -> Iterator[Finding]:
    tokenizer = settings["tokenizer"]
    train = count_tokens(run.copy.loaders.splits.train, tokenizer)
    uses = train.tokens.sum() / tokenizer.vocab_size
    is_large = tokenizer.token_type != "char" and tokenizer.vocab_size >= MIN_LARGE_VOCABULARY
    if uses < MIN_TOKEN_USES and is_large:
        hours = samples_to_seconds(int(train.samples.sum()), settings["sample_rate"]) / 3600
        yield run.note(
            "token_type",
            problem=f"The vocabulary of {tokenizer.vocab_size:,} tokens is large for {hours:.1f} "
            f"hours: a token is seen {uses:.1f} times on average",
            fix="Try `token_type: char` with `vocab_size: null`, in another `output_folder`.",
        )


def _check_rate(run: CheckedRun) -> Iterator[Finding]:
    name, optimizer = next(iter((run.brain.optimizers_dict or {}).items()), ("", None))
    if optimizer is None or "adam" not in type(optimizer).__name__.lower():
        return
    settings = run.spec.settings
    is_tuned = bool(settings["init_from"] or settings["pretrained"])
    lowest, usual, highest = TUNING_RATES if is_tuned else SCRATCH_RATES
    factor = highest_factor(run.brain.schedule)
    peak = optimizer.defaults["lr"] * factor
    if not lowest <= peak <= highest:
        ratio = max(peak / usual, usual / max(peak, 1e-9))
        path = run.rate_path(name)
        yield run.note(
            *path,
            problem=f"The peak learning rate of {peak:g} is about {ratio:,.0f} times too "
            f"{'high' if peak > usual else 'low'}",
            fix=f"Try `{dotted(path)}: {usual / factor:g}`.",
        )


CHECKS = (check_texts, check_text_table, check_alignment, check_causality, check_causes)
