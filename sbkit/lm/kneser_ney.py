"""Interpolated modified Kneser-Ney smoothing, in numpy: what KenLM's lmplz computes.

Chen and Goodman, "An empirical study of smoothing techniques for language modeling" (1998), with
the choices of Heafield et al., "Scalable modified Kneser-Ney language model estimation" (2013):
below the highest order the count of an n-gram is the number of different words seen before it, or,
where it begins with `<s>`, how often it was seen; unigrams are interpolated with the uniform
distribution over all words, `<unk>` and `</s>`. lmplz counts the last n-gram of each order by how
often it was seen, an oversight that is not repeated: discounts of tiny texts may differ.

Legend: T tokens, V words, N n-grams of one order.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sbkit.base.arrays import Float32s, Int64s
from sbkit.base.errors import SbkitError
from sbkit.lm.ngram import BEGIN, END, LARGEST_ORDER, SPECIAL, Grams, NgramModel

FALLBACK = (0.0, 0.5, 1.0, 1.5)  # lmplz's --discount_fallback
LEAST = float(np.finfo(np.float32).tiny)  # stands for a weight of zero, which has no logarithm


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model and what it was trained on.

    fallback_orders: those whose discounts could not be estimated and are 0.5, 1 and 1.5;
    tokens: words read.
    """

    model: NgramModel
    fallback_orders: tuple[int, ...]
    sentences: int
    tokens: int


@dataclass(frozen=True, eq=False)
class Counted:
    """The n-grams of one order, sorted by key.

    prefixes, suffixes: (N,) rows, in the order below, of what is left without the last or the
    first word; times: (N,) seen; counts: (N,) smoothed with, those of lmplz.
    """

    keys: Int64s
    prefixes: Int64s
    suffixes: Int64s
    times: Int64s
    counts: Int64s


def train(sentences: Iterable[Sequence[str]], *, order: int) -> Trained:
    """Train a model of an order, from sentences of words that are read once.

    Where discounts cannot be estimated, which lmplz refuses unless told, its
    ``--discount_fallback`` stands in and ``fallback_orders`` says so.
    Raises SbkitError for an order out of range, and for no words.
    """
    if not 1 <= order <= LARGEST_ORDER:
        raise SbkitError(
            f"The order of a language model must be from 1 to {LARGEST_ORDER}, but is {order}. "
            "Take 3 for words, 6 for characters."
        )
    words, ids = read_text(sentences)
    counted = count(ids, len(words), order)
    sentence_count = int((ids == END).sum())
    discounts = [estimate_discounts(each.counts) for each in counted]
    return Trained(
        model=NgramModel(words, smooth(counted, [each or FALLBACK for each in discounts])),
        fallback_orders=tuple(n for n, each in enumerate(discounts, start=1) if each is None),
        sentences=sentence_count,
        tokens=len(ids) - 2 * sentence_count,
    )


def read_text(sentences: Iterable[Sequence[str]]) -> tuple[tuple[str, ...], Int64s]:
    """Number the words of sentences, and keep each different word once: -> words (V,), ids (T,).

    Each sentence is between `<s>` and `</s>`. Raises SbkitError for no words.
    """
    seen: defaultdict[str, int] = defaultdict()
    seen.default_factory = seen.__len__
    for word in SPECIAL:
        seen[word]
    stream = array("i")  # 4 bytes a word
    for sentence in sentences:
        stream.append(BEGIN)
        stream.extend(map(seen.__getitem__, sentence))
        stream.append(END)
    if len(seen) == len(SPECIAL):
        raise SbkitError(
            "A text to train on must hold at least one word, but its sentences hold none. Check "
            "the file and the normalizer."
        )
    own = sorted(list(seen)[len(SPECIAL) :])
    renumbered = np.arange(len(seen))
    renumbered[[seen[word] for word in own]] = np.arange(len(SPECIAL), len(seen))
    return (*SPECIAL, *own), renumbered[np.frombuffer(stream, np.intc)]


def count(ids: Int64s, size: int, order: int) -> list[Counted]:
    """Count the n-grams of all orders up to one, of so many words: (T,)."""
    times = np.bincount(ids, minlength=size)
    times[BEGIN] = 0  # it is never predicted
    nothing = np.zeros(size, np.int64)
    counted = [Counted(np.arange(size), nothing, nothing, times, times)]
    ends = np.arange(len(ids))  # (T',) where an n-gram ends that is within one sentence
    rows = ids  # (T,) the row of the n-gram that ends there
    begins = np.arange(size) == BEGIN  # (N,) whether an n-gram begins with <s>
    for _ in range(1, order):
        ends = ends[ids[ends] != END] + 1
        all_keys = rows[ends - 1] * size + ids[ends]
        keys, first, inverse, times = np.unique(
            all_keys, return_index=True, return_inverse=True, return_counts=True
        )
        suffixes, lower = rows[ends[first]], counted[-1]
        before = np.bincount(suffixes, minlength=len(lower.keys))  # different words before
        counted[-1] = replace(lower, counts=np.where(begins, lower.times, before))
        counted.append(Counted(keys, keys // size, suffixes, times, times))
        begins = begins[keys // size]
        rows = np.zeros_like(rows)
        rows[ends] = inverse
    return counted


def estimate_discounts(counts: Int64s) -> tuple[float, ...] | None:
    """Estimate what is taken from a count of 0, 1, 2, and 3 or more; None where that fails.

    Chen and Goodman's equation 26, from the numbers t of n-grams with a count of 1 to 4:
    D(k) = k - (k + 1) Y t(k + 1) / t(k), where Y = t(1) / (t(1) + 2 t(2)). It fails where t(1),
    t(2) or t(3) is 0, or D(k) is below 0 or above k.
    """
    t = [int(np.count_nonzero(counts == k)) for k in range(5)]
    if 0 in t[1:4]:
        return None
    y = t[1] / (t[1] + 2 * t[2])
    discounts = (0.0, *(k - (k + 1) * y * t[k + 1] / t[k] for k in (1, 2, 3)))
    return discounts if all(0 <= each <= k for k, each in enumerate(discounts)) else None


def smooth(counted: Sequence[Counted], discounts: Sequence[tuple[float, ...]]) -> tuple[Grams, ...]:
    """Compute the probabilities of all orders, each interpolated with the one below."""
    size = len(counted[0].keys)
    lower = np.array([1 / (size - 1)])  # of the order 0: uniform over all words but <s>
    log_probs, weights = list[Float32s](), list[Float32s]()
    for order, (grams, discount) in enumerate(zip(counted, discounts, strict=True), start=1):
        taken = np.array(discount)[np.minimum(grams.counts, 3)]  # (N,)
        contexts = len(lower)
        totals = np.bincount(grams.prefixes, grams.counts, contexts)
        freed_totals = np.bincount(grams.prefixes, taken, contexts)
        backoffs = np.ones(contexts)  # of what is no context
        np.divide(freed_totals, totals, out=backoffs, where=totals > 0)
        probs = (grams.counts - taken) / totals[grams.prefixes]
        probs += backoffs[grams.prefixes] * lower[grams.suffixes]
        if order == 1:
            probs[BEGIN] = 1.0  # as lmplz writes it: scored, it changes nothing
        log_probs.append(_log(probs))
        weights.append(_log(backoffs))
        lower = probs
    weights.append(_log(np.ones(len(lower))))  # the highest order has nothing to back off from
    keys = (each.keys for each in counted)
    return tuple(map(Grams, keys, log_probs, weights[1:]))


def _log(values: npt.NDArray[np.float64]) -> Float32s:
    return np.log(np.clip(values, LEAST, 1.0)).astype(np.float32)
