"""n-gram models by interpolated modified Kneser-Ney smoothing.

Chen and Goodman, "An empirical study of smoothing techniques for language modeling" (1998), with
the conventions of KenLM's lmplz (Heafield et al., 2013), whose figures these are: one ``<s>`` and
one ``</s>`` a sentence; n-grams that begin with ``<s>`` keep their counts, all others count their
different left neighbours; ``<unk>`` has the count 0, and shares in the uniform distribution.

    sentences -> ids -> n-grams of each order -> adjusted counts -> discounts -> probabilities
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sbkit.base.errors import SbkitError
from sbkit.lm.ngram import BOS, EOS, SPECIAL, UNK, NgramModel

HIGHEST_ORDER = 10
FALLBACK = (0.5, 1.0, 1.5)  # of lmplz, for texts too small or too regular to count
SMALLEST = 1e-30  # of a weight, where discounts are 0
CLASSES = 3  # discounts: of the counts 1, 2, and 3 or more

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Trained:
    """A model, and what it was trained on.

    Attributes:
        words, sentences: how many there were.
        fallback_orders: those whose discounts could not be counted.
    """

    model: NgramModel
    words: int
    sentences: int
    fallback_orders: tuple[int, ...]


@dataclass(frozen=True)
class _Order:
    """All n-grams of an order, by their places.

    keys: sorted; prefix, suffix: places in the order below of all words but the last, the first;
    raw: how often each is there; initial: whether it begins with ``<s>``.
    """

    keys: Ints
    prefix: Ints
    suffix: Ints
    raw: Ints
    initial: npt.NDArray[np.bool_]


def train(sentences: Iterable[Sequence[str]], *, order: int) -> Trained:
    """Train a model on sentences of words, or of tokens.

    Raises:
        SbkitError: the order is out of range, or there is no word.
    """
    if not 1 <= order <= HIGHEST_ORDER:
        raise SbkitError(
            f"The order of a language model must be 1 to {HIGHEST_ORDER}, but is {order}. Take 3 "
            "for words, 6 for characters."
        )
    words, text, count = _read(sentences)
    if len(words) == len(SPECIAL):
        raise SbkitError(
            "A language model must have text to be trained on, but there is no word in it. Name "
            "another text."
        )
    orders = _count(text, len(words), order)
    counts = _adjust(orders)
    log_probs, backoffs, fallback = _estimate(orders, counts, len(words))
    model = NgramModel(
        tuple(words), tuple(each.keys for each in orders[1:]), tuple(log_probs), tuple(backoffs)
    )
    return Trained(model, len(text) - 2 * count, count, tuple(fallback))


def _read(sentences: Iterable[Sequence[str]]) -> tuple[list[str], Ints, int]:
    """Return the words in their order, the text as ids with ``<s>`` and ``</s>``, its sentences."""
    ids: dict[str, int] = {word: place for place, word in enumerate(SPECIAL)}
    text, count = array("q"), 0
    for sentence in sentences:
        text.append(BOS)
        for word in sentence:
            found = ids.setdefault(word, len(ids))
            text.append(found if found not in (BOS, EOS) else UNK)
        text.append(EOS)
        count += 1
    words = [*SPECIAL, *sorted(list(ids)[len(SPECIAL) :])]
    places = np.empty(len(words), np.int64)
    places[[ids[word] for word in words]] = np.arange(len(words))
    return (
        words,
        places[np.frombuffer(text, np.int64)] if len(text) else np.empty(0, np.int64),
        count,
    )


def _count(text: Ints, size: int, order: int) -> list[_Order]:
    """Find all n-grams of each order: in ``text``, a sentence begins at each ``<s>``."""
    place = np.cumsum(text == BOS)  # of the sentence, from 1 on
    within = np.arange(len(text)) - np.flatnonzero(text == BOS)[place - 1]
    words = np.arange(size)
    none = np.zeros(size, np.int64)
    orders = [_Order(words, none, none, np.bincount(text, minlength=size), words == BOS)]
    lower = text  # the place of the n-gram that ends here
    for length in range(2, order + 1):
        ends = np.flatnonzero(within >= length - 1)
        keys, first, inverse, raw = np.unique(
            lower[ends - 1] * size + text[ends],
            return_index=True,
            return_inverse=True,
            return_counts=True,
        )
        prefix, suffix = keys // size, lower[ends[first]]
        orders.append(_Order(keys, prefix, suffix, raw, orders[-1].initial[prefix]))
        lower = np.full(len(text), -1)
        lower[ends] = inverse
    return orders


def _adjust(orders: Sequence[_Order]) -> list[Ints]:
    """Return the counts that are smoothed: raw in the highest order, left neighbours below."""
    counts = []
    for lower, higher in pairwise(orders):
        neighbours = np.bincount(higher.suffix, minlength=len(lower.keys))
        counts.append(np.where(lower.initial, lower.raw, neighbours))
    counts.append(orders[-1].raw.copy())
    counts[0][[UNK, BOS]] = 0
    return counts


def _discounts(counts: Ints) -> Floats | None:
    """Return what is taken off counts of 1, 2 and more; None where that cannot be counted."""
    of = np.bincount(np.minimum(counts, 5), minlength=6)[1:5].astype(np.float64)  # counts 1 to 4
    if not of.all():
        return None
    share = of[0] / (of[0] + 2 * of[1])
    steps = np.arange(1, CLASSES + 1)
    found: Floats = steps - (steps + 1) * share * of[1:] / of[:-1]
    return found if ((found >= 0) & (found <= steps)).all() else None


def _estimate(
    orders: Sequence[_Order], counts: Sequence[Ints], size: int
) -> tuple[list[npt.NDArray[np.float32]], list[npt.NDArray[np.float32]], list[int]]:
    """Return log-probabilities, back-offs of all orders but the last, and the orders that fell."""
    below = np.full(1, 1.0 / (size - 1))  # uniform over all words but <s>
    log_probs, backoffs, fallback = [], list[npt.NDArray[np.float32]](), []
    for length, (grams, count) in enumerate(zip(orders, counts, strict=True), start=1):
        discounts = _discounts(count)
        if discounts is None:
            fallback.append(length)
            discounts = np.array(FALLBACK)
        kind = np.minimum(count, CLASSES)
        off = np.concatenate(([0.0], discounts))[kind]
        contexts = len(orders[length - 2].keys) if length > 1 else 1
        total = np.bincount(grams.prefix, count, minlength=contexts)
        left = np.bincount(grams.prefix, off, minlength=contexts)
        with np.errstate(invalid="ignore"):
            weight = np.where(total > 0, left / total, 1.0)  # of the order below, in each context
            probs = np.maximum(count - off, 0.0) / np.maximum(total, 1)[grams.prefix]
        probs = probs + weight[grams.prefix] * below[grams.suffix]
        if length > 1:
            backoffs.append(np.log(np.maximum(weight, SMALLEST)).astype(np.float32))
        else:
            probs[BOS] = 1.0  # it is never predicted; lmplz writes 0
        log_probs.append(np.log(probs).astype(np.float32))
        below = probs
    return log_probs, backoffs, fallback
