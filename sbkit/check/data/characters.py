"""Characters of the transcripts: unseen in training, rare there, or of another script."""

import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from functools import cache

from sbkit.base.text import listed, plural
from sbkit.check.data.utterances import TEXT, TRAIN, about, notice, tables, transcripts_of
from sbkit.check.finding import Finding
from sbkit.check.planned_run import PlannedRun
from sbkit.data.corpora.columns import count_characters, read_texts
from sbkit.data.corpora.splits import Excluded

CHECK = "labels"
RARE = 2  # times in train, up to which a character is rare
ENOUGH_TEXT = 5000  # characters of train, below which most letters are rare
EAST_ASIAN = ("CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "IDEOGRAPHIC", "BOPOMOFO")
SHOWN = 12  # characters in a sentence


def check_unseen(planned: PlannedRun) -> Iterator[Finding]:
    """Find characters of the other splits that training never sees."""
    transcripts = transcripts_of(planned)
    seen = transcripts[TRAIN].alphabet
    unseen = {name: each.alphabet - seen for name, each in transcripts.items()}
    found, characters = _holding(planned, unseen, "unseen character")
    yield from about(
        planned,
        CHECK,
        "data_folder",
        found=found,
        declared="every character of a transcript must occur in train",
        effect=f"hold characters that do not ({characters})",
        fix="Correct the transcripts, or add speech with these characters to train.",
        stops=False,
    )


def check_rare(planned: PlannedRun) -> Iterator[Finding]:
    """Find characters that train shows once or twice, too seldom to be learned."""
    counts = _count_characters(planned)
    rare = {each for each, count in counts.items() if count <= RARE and script(each) != "CJK"}
    if not rare or counts.total() < ENOUGH_TEXT:
        return
    found, characters = _holding(planned, {TRAIN: rare}, "rare character")
    yield from notice(
        planned,
        found=found,
        declared=f"a character must occur more than {plural(RARE, 'time')} in train to be learned",
        effect=f"hold {plural(len(rare), 'character')} that {'does' if len(rare) == 1 else 'do'} "
        f"not ({characters})",
        fix="Correct the transcripts, or normalize these characters.",
    )


def check_scripts(planned: PlannedRun) -> Iterator[Finding]:
    """Find utterances with letters of another script than most letters of train have."""
    counts: Counter[str] = Counter()
    for character, count in _count_characters(planned).items():
        counts[script(character)] += count
    del counts[""]
    if not counts:
        return
    main, most = counts.most_common(1)[0]
    foreign = {
        name: {one for one in each.alphabet if script(one) not in ("", main)}
        for name, each in transcripts_of(planned).items()
    }
    found, characters = _holding(planned, foreign, "foreign script")
    yield from notice(
        planned,
        found=found,
        declared=f"letters must be of the script of train, {main} ({most / counts.total():.0%} of "
        "its letters)",
        effect=f"hold letters of another ({characters})",
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


def _count_characters(planned: PlannedRun) -> Counter[str]:
    """Count the characters of train; raises MissingPartError where there are no transcripts."""
    _ = transcripts_of(planned)
    return count_characters(read_texts(planned.splits.train))


def _holding(
    planned: PlannedRun, characters: Mapping[str, Set[str]], reason: str
) -> tuple[list[Excluded], str]:
    """List the utterances that hold certain characters of their split, and say which, how often."""
    counts: Counter[str] = Counter()
    found = []
    for split, wanted in characters.items():
        for table in tables(planned, split, "id", TEXT) if wanted else ():
            pairs = zip(table["id"].to_pylist(), table[TEXT].to_pylist(), strict=True)
            for utterance, text in pairs:
                held = "".join(each for each in text if each in wanted)
                counts.update(held)
                if held:
                    found.append(Excluded(split, utterance, reason, held))
    shown = (f"{each!r} x {count:,}" for each, count in counts.most_common())
    return found, listed(shown, most=SHOWN)
