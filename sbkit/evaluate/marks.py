"""Precision and recall of punctuation marks and of capitals in recognized texts.

Words are paired with the words of the reference as if neither had marks or capitals. A mark is
right if both words of a pair have it, even if the word itself is wrong.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache

from sbkit.evaluate.wer import FigureDict, ScoredUtterance, align_units
from sbkit.text.normalization import is_mark

CAPITALS = "capitals"


def measure_marks(scored: Iterable[ScoredUtterance]) -> dict[str, FigureDict]:
    """Return the precision and recall of each mark, the most frequent first, and of capitals.

    A precision is None if the model wrote none, a recall if the references have none.
    """
    right, written, expected = Counter[str](), Counter[str](), Counter[str]()
    for utterance in scored:
        split = str.split if utterance.by_words else _characters
        references, hypotheses = split(utterance.reference), split(utterance.hypothesis)
        pairs = align_units(references, hypotheses, key=lambda word: _bare(word).lower())
        for reference, hypothesis in pairs:
            in_reference, in_hypothesis = _find(reference), _find(hypothesis)
            if not in_reference and not in_hypothesis:
                continue
            for counts, places in (
                (right, in_reference & in_hypothesis),
                (written, in_hypothesis),
                (expected, in_reference),
            ):
                counts.update(name for name, _ in places.elements())
    names = sorted(expected | written, key=lambda name: (name == CAPITALS, -expected[name], name))
    return {
        name: {
            "precision": right[name] / written[name] if written[name] else None,
            "recall": right[name] / expected[name] if expected[name] else None,
            "right": right[name],
            "written": written[name],
            "expected": expected[name],
        }
        for name in names
    }


def describe_marks(figures: Mapping[str, FigureDict]) -> str:
    """Write precision and recall in one line."""
    return "; ".join(
        f"{name if name == CAPITALS else repr(name)} {_percent(row['precision'])} and "
        f"{_percent(row['recall'])} "
        f"({row['right']} right / {row['written']} written / {row['expected']} expected)"
        for name, row in figures.items()
    )


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.1f} %"


def _characters(text: str) -> list[str]:
    """Split a text into characters, each with the marks behind it."""
    characters: list[str] = []
    for char in "".join(text.split()):
        if is_mark(char) and characters:
            characters[-1] += char
        else:
            characters.append(char)
    return characters


@lru_cache(maxsize=1 << 16)
def _bare(word: str) -> str:
    """Return a word without marks."""
    return "".join(char for char in word if not is_mark(char))


@lru_cache(maxsize=1 << 16)
def _find(word: str) -> Counter[tuple[str, int]]:
    """Count the marks of a word, and its capitals by their place: iPhone and Iphone share none."""
    marks = [(char, 0) for char in word if is_mark(char)]
    letters = enumerate(_bare(word))
    return Counter([*marks, *((CAPITALS, place) for place, char in letters if char.isupper())])
