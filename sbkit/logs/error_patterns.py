"""What a recognizer gets wrong again and again: confused words, and words that it does not know."""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from sbkit.text.wer import WordPairs


@dataclass(frozen=True, kw_only=True)
class Confusion:
    """A word, what was recognized instead, and how often by each run.

    One of the two is "": of a word that was inserted, or deleted.
    """

    reference: str
    hypothesis: str
    counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class UnknownWord:
    """A word of the references that the recognizer has never seen written.

    count: how often it is said; right: how often it is recognized; instead: what else is, the most
    frequent first.
    """

    word: str
    count: int
    right: int
    instead: tuple[str, ...]


def confusions(runs: Sequence[Iterable[WordPairs]]) -> tuple[Confusion, ...]:
    """Return the errors of one run or several, the most frequent first."""
    counted = [
        Counter(pair for pairs in utterances for pair in pairs if pair[0] != pair[1])
        for utterances in runs
    ]
    together = sum(counted, Counter[tuple[str, str]]())
    ranked = sorted(together, key=lambda pair: (-together[pair], pair))
    return tuple(
        Confusion(
            reference=reference,
            hypothesis=hypothesis,
            counts=tuple(each[reference, hypothesis] for each in counted),
        )
        for reference, hypothesis in ranked
    )


def unknown_words(
    utterances: Iterable[WordPairs], known: Container[str]
) -> tuple[UnknownWord, ...]:
    """Return the words of the references that are not known, the most frequent first."""
    heard: dict[str, Counter[str]] = defaultdict(Counter)
    for pairs in utterances:
        for said, recognized in pairs:
            if said and said not in known:
                heard[said][recognized] += 1
    found = (
        UnknownWord(
            word=word,
            count=counts.total(),
            right=counts[word],
            instead=tuple(other for other, _ in counts.most_common() if other not in (word, "")),
        )
        for word, counts in heard.items()
    )
    return tuple(sorted(found, key=lambda each: (-each.count, each.word)))
