"""Characters of the transcripts: unseen in training, rare there, or of another script."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache

from sbkit.check.data.utterances import TEXT, TRAIN, about, notice, tables, transcripts_of
from sbkit.check.finding import Finding, plural
from sbkit.check.planned_run import PlannedRun
from sbkit.data.splits import Excluded

CHECK = "labels"
RARE = 2  # times in train, up to which a character is rare
ENOUGH_TEXT = 5000  # characters of train, below which most letters are rare
EAST_ASIAN = ("CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "IDEOGRAPHIC", "BOPOMOFO")
SHOWN = 12  # characters in a sentence


def check_unseen(planned: PlannedRun) -> Iterator[Finding]:
    """Find characters of the other splits that training never sees."""
    transcripts = transcripts_of(planned)
    counts: Counter[str] = Counter()
    found: list[Excluded] = []
    for name in transcripts:
        unseen = transcripts[name].alphabet - transcripts[TRAIN].alphabet
        found += _holding(planned, name, unseen, "unseen character", counts)
    yield from about(
        planned,
        CHECK,
        "data_folder",
        found=found,
        declared="every character of a transcript must occur in train",
        effect=f"hold characters that do not ({_list(counts)})",
        fix="Correct the transcripts, or add speech with these characters to train.",
        stops=False,
    )


def check_rare(planned: PlannedRun) -> Iterator[Finding]:
    """Find characters that train shows once or twice, too seldom to be learned."""
    counts: Counter[str] = Counter()
    _ = transcripts_of(planned)
    for table in tables(planned, TRAIN, TEXT):
        counts.update("".join(table[TEXT].to_pylist()))
    rare = {each for each, count in counts.items() if count <= RARE and script(each) != "CJK"}
    if not rare or counts.total() < ENOUGH_TEXT:
        return
    few: Counter[str] = Counter()
    found = list(_holding(planned, TRAIN, frozenset(rare), "rare character", few))
    yield from notice(
        planned,
        found=found,
        declared=f"a character must occur more than {plural(RARE, 'time')} in train to be learned",
        effect=f"hold {plural(len(rare), 'character')} that {'does' if len(rare) == 1 else 'do'} "
        f"not ({_list(few)})",
        fix="Correct the transcripts, or normalize these characters.",
    )


def check_scripts(planned: PlannedRun) -> Iterator[Finding]:
    """Find utterances with letters of another script than most letters of train have."""
    transcripts = transcripts_of(planned)
    counts: Counter[str] = Counter()
    for table in tables(planned, TRAIN, TEXT):
        for character, count in Counter("".join(table[TEXT].to_pylist())).items():
            counts[script(character)] += count
    del counts[""]
    if not counts:
        return
    main, most = counts.most_common(1)[0]
    characters: Counter[str] = Counter()
    found = [
        item
        for name, each in transcripts.items()
        for item in _holding(
            planned,
            name,
            frozenset(one for one in each.alphabet if script(one) not in ("", main)),
            "foreign script",
            characters,
        )
    ]
    yield from notice(
        planned,
        found=found,
        declared=f"letters must be of the script of train, {main} ({most / counts.total():.0%} of "
        "its letters)",
        effect=f"hold letters of another ({_list(characters)})",
        fix="Take these rows out, or correct `language` and `data_folder`.",
    )


@cache
def script(character: str) -> str:
    """Return the script of a letter as Unicode's names begin ("LATIN"); "" for no letter."""
    if not unicodedata.category(character).startswith("L"):
        return ""
    name = unicodedata.name(character, "").split(" ")[0]
    if name in ("MODIFIER", "FULLWIDTH", "HALFWIDTH", "FEMININE", "MASCULINE", "MICRO"):
        return ""
    return "CJK" if name in EAST_ASIAN else name


def _holding(
    planned: PlannedRun,
    split: str,
    characters: Iterable[str],
    reason: str,
    counts: Counter[str],
) -> Iterator[Excluded]:
    """Yield the utterances that hold some of the characters, and count these."""
    if not characters:
        return
    wanted = frozenset(characters)
    for table in tables(planned, split, "id", TEXT):
        pairs = zip(table["id"].to_pylist(), table[TEXT].to_pylist(), strict=True)
        for utterance, text in pairs:
            held = [each for each in text if each in wanted]
            counts.update(held)
            if held:
                yield Excluded(split, utterance, reason, "".join(held))


def _list(counts: Counter[str]) -> str:
    shown = ", ".join(f"{each!r} x {count:,}" for each, count in counts.most_common(SHOWN))
    return f"{shown} and {len(counts) - SHOWN} more" if len(counts) > SHOWN else shown
