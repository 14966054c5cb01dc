"""Characters of the transcripts: unseen in training, or of another script."""

import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from functools import cache

import numpy as np

from sbkit.base.text import listed
from sbkit.check.data.utterances import TEXT, TRAIN, notice, transcripts_of
from sbkit.check.finding import Finding
from sbkit.check.planned_run import PlannedRun
from sbkit.data.corpora.columns import count_characters, read_texts

EAST_ASIAN = ("CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "IDEOGRAPHIC", "BOPOMOFO")
NO_SCRIPT = ("MODIFIER", "FULLWIDTH", "HALFWIDTH", "FEMININE", "MASCULINE", "MICRO")
SHOWN = 12  # characters in a sentence


def check_unseen(planned: PlannedRun) -> Iterator[Finding]:
    """Find characters of the other splits that training never sees."""
    alphabets = {name: each.alphabet for name, each in transcripts_of(planned).items()}
    yield from _holding(
        planned,
        {name: each - alphabets[TRAIN] for name, each in alphabets.items()},
        "unseen character",
        check="labels",
        declared="every character of a transcript must occur in train",
        effect="hold characters that do not",
        fix="Correct the transcripts, or add speech with these characters to train.",
    )


def check_characters(planned: PlannedRun) -> Iterator[Finding]:
    """Find letters of another script than most of train."""
    alphabets = {name: each.alphabet for name, each in transcripts_of(planned).items()}
    counts = count_characters(read_texts(planned.splits.train))
    scripts: Counter[str] = Counter()
    for character, count in counts.items():
        scripts[script(character)] += count
    del scripts[""]
    if scripts:
        main, most = scripts.most_common(1)[0]
        own = ("", main)
        yield from _holding(
            planned,
            {n: {c for c in each if script(c) not in own} for n, each in alphabets.items()},
            "foreign script",
            declared=f"letters must be of the script of train, {main} "
            f"({most / scripts.total():.0%} of its letters)",
            effect="hold letters of another",
            fix="Take these rows out, or correct `language` and `data_folder`.",
        )


@cache
def script(character: str) -> str:
    """Return the script of a letter as Unicode's names begin ("LATIN"); "" for no letter."""
    if not unicodedata.category(character).startswith("L"):
        return ""
    name = unicodedata.name(character, "").split(" ")[0]
    return "" if name in NO_SCRIPT else "CJK" if name in EAST_ASIAN else name


def _holding(
    planned: PlannedRun,
    characters: Mapping[str, Set[str]],
    reason: str,
    *,
    effect: str,
    **words: str,
) -> Iterator[Finding]:
    """Make a note of the utterances that hold certain characters of their split."""
    counts: Counter[str] = Counter()
    held: dict[str, dict[int, str]] = {split: {} for split in characters}
    for split, wanted in characters.items():
        texts = read_texts(planned.splits.named()[split], TEXT) if wanted else ()
        for row, text in enumerate(text for part in texts for text in part):
            if found := "".join(each for each in text if each in wanted):
                counts.update(found)
                held[split][row] = found
    counted = listed((f"{each!r} x {n:,}" for each, n in counts.most_common()), most=SHOWN)
    yield from notice(
        planned,
        found={split: np.array([*rows], dtype=np.int64) for split, rows in held.items()},
        reason=reason,
        detail=lambda split, row: held[split][row],
        effect=f"{effect} ({counted})",
        **words,
    )
