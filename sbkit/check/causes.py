"""A learning rate or a vocabulary that keeps a recognizer from learning to write."""

from collections.abc import Iterator, Mapping
from typing import Any

from sbkit.base.units import samples_to_seconds
from sbkit.check.checked_run import CheckedRun, Finding
from sbkit.data.splits import count_tokens
from sbkit.text.tokenizer import TOKENIZER_FILE
from sbkit.train.schedule import highest_factor, parse_schedule

# The lowest, usual and highest peak rates of a kind of Adam. In hparams/ they are 0.0008 to 0.0025;
# at 1.0, ctc.yaml writes only blanks.
SCRATCH_RATES = (5e-5, 1e-3, 0.02)
TUNING_RATES = (1e-6, 1e-4, 0.02)  # for weights that were trained before
# Mean uses of a token in the training transcripts, for a vocabulary that is not of characters.
# A character of ctc.yaml has 480; each of 5,000 tokens would have at most 2.7.
MIN_TOKEN_USES, MIN_LARGE_VOCABULARY = 5.0, 200


def check_causes(run: CheckedRun) -> Iterator[Finding]:
    """Note a learning rate or a vocabulary that keeps a recognizer from learning to write."""
    if run.data.recipe.label_file != TOKENIZER_FILE:
        return
    settings = dict(run.built.hparams.items())  # marks no key as read
    yield from _check_vocabulary(run, settings)
    yield from _check_rate(run, settings)


def _check_vocabulary(run: CheckedRun, settings: Mapping[str, Any]) -> Iterator[Finding]:
    tokenizer = settings["tokenizer"]
    train = count_tokens(run.built.loaders.splits.train, tokenizer)
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


def _check_rate(run: CheckedRun, settings: Mapping[str, Any]) -> Iterator[Finding]:
    rate = settings.get("lr")
    names = [type(optimizer).__name__.lower() for optimizer in run.optimizers]
    if not isinstance(rate, int | float) or not names or "adam" not in names[0]:
        return
    is_tuned = bool(settings.get("init_from") or settings.get("pretrained"))
    lowest, usual, highest = TUNING_RATES if is_tuned else SCRATCH_RATES
    factor = highest_factor(parse_schedule(settings))
    peak = rate * factor
    if not lowest <= peak <= highest:
        ratio = max(peak / usual, usual / max(peak, 1e-9))
        yield run.note(
            "lr",
            problem=f"The peak learning rate of {peak:g} is about {ratio:,.0f} times too "
            f"{'high' if peak > usual else 'low'}",
            fix=f"Try `lr: {usual / factor:g}`.",
        )
