"""Interpolated modified Kneser-Ney smoothing in numpy, as KenLM's lmplz computes it.

Chen and Goodman, "An empirical study of smoothing techniques for language modeling" (1998), with
the choices of Heafield et al., "Scalable modified Kneser-Ney language model estimation" (2013):
below the highest order, the count of an n-gram is the number of different words before it, or, if
it begins with `<s>`, its frequency; unigrams are interpolated with the uniform distribution over
all words, `<unk>` and `</s>`. lmplz counts the last n-gram of each order by its frequency, which is
not repeated here, so discounts of tiny texts may differ.

Legend: T tokens, V words, N n-grams of one order.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sbkit.base.arrays import Float32s, Float64s, Int64s
from sbkit.base.errors import ConfigError, DataError
from sbkit.lm.ngram import BEGIN, END, MAX_ORDER, SPECIAL, Grams, NgramModel

FALLBACK_DISCOUNTS = (0.0, 0.5, 1.0, 1.5)  # of lmplz's --discount_fallback
MIN_LM_PROBABILITY = float(np.finfo(np.float32).tiny)  # replaces zero, which has no logarithm


@dataclass(frozen=True, kw_only=True)
class TrainedNgrams:
    """A model and the size of its training text.

    fallback_orders: orders whose discounts could not be estimated and are 0.5, 1 and 1.5.
    """

    model: NgramModel
    fallback_orders: tuple[int, ...]
    num_sentences: int
    num_tokens: int


@dataclass(frozen=True, eq=False)
class GramCounts:
    """The n-grams of one order, sorted by key.

    keys: (N,) as in `Grams`; suffixes: (N,) rows, in the order below, of the n-gram without its
    first word; counts: (N,) for smoothing, as lmplz defines them.
    """

    keys: Int64s
    suffixes: Int64s
    counts: Int64s


def train(sentences: Iterable[Sequence[str]], *, order: int) -> TrainedNgrams:
    """Train a model on sentences, which are read only once.

    An order whose discounts cannot be estimated uses lmplz's ``--discount_fallback``.

    sentences: each a list of words, or a text with spaces between words; a string is one sentence.

    >>> trained = train([["call", "me"], ["call", "the", "office"]], order=2)
    >>> trained.model.order, trained.num_tokens
    (2, 5)
    """
    if not 1 <= order <= MAX_ORDER:
        raise ConfigError(
            f"The order of a language model must be from 1 to {MAX_ORDER}, but is {order}."
        )
    sentences = [sentences] if isinstance(sentences, str) else sentences
    words, ids = index_words(sentences)
    counts_by_order = count_ngrams(ids, len(words), order)
    num_sentences = int((ids == END).sum())
    estimates = [estimate_discounts(grams.counts) for grams in counts_by_order]
    discounts = [estimate or FALLBACK_DISCOUNTS for estimate in estimates]
    return TrainedNgrams(
        model=NgramModel(words, smooth(counts_by_order, discounts)),
        fallback_orders=tuple(n for n, d in enumerate(estimates, start=1) if d is None),
        num_sentences=num_sentences,
        num_tokens=len(ids) - 2 * num_sentences,
    )


def index_words(sentences: Iterable[Sequence[str]]) -> tuple[tuple[str, ...], Int64s]:
    """Assign ids to the words of sentences: -> different words (V,), ids of the text (T,).

    Each sentence is between `<s>` and `</s>`.
    """
    first_ids: defaultdict[str, int] = defaultdict()
    first_ids.default_factory = first_ids.__len__
    for word in SPECIAL:
        first_ids[word]
    text_ids = array("i")  # 4 bytes a word
    for sentence in sentences:
        text_ids.append(BEGIN)
        sentence_words = sentence.split() if isinstance(sentence, str) else sentence
        text_ids.extend(map(first_ids.__getitem__, sentence_words))
        text_ids.append(END)
    if len(first_ids) == len(SPECIAL):
        raise DataError("A language model needs a text with at least one word.")
    words = sorted(list(first_ids)[len(SPECIAL) :])
    sorted_ids = np.arange(len(first_ids))
    sorted_ids[[first_ids[word] for word in words]] = np.arange(len(SPECIAL), len(first_ids))
    return (*SPECIAL, *words), sorted_ids[np.frombuffer(text_ids, np.intc)]


def count_ngrams(ids: Int64s, size: int, order: int) -> list[GramCounts]:
    """Count the n-grams of all orders up to ``order``: ids (T,) of ``size`` words."""
    frequencies = np.bincount(ids, minlength=size)
    frequencies[BEGIN] = 0  # it is never predicted
    counts_by_order = [GramCounts(np.arange(size), np.zeros(size, np.int64), frequencies)]
    index_type = np.min_scalar_type(len(ids))  # of 4 bytes, which halves the memory
    ids = ids.astype(index_type)
    ends = np.arange(len(ids), dtype=index_type)  # (T',) where an n-gram within one sentence ends
    rows = ids  # (T,) the row of the n-gram that ends there
    begins = np.arange(size) == BEGIN  # (N,) whether an n-gram begins with <s>
    for _ in range(1, order):
        ends = ends[ids[ends] != END] + 1
        all_keys = rows[ends - 1] * np.int64(size) + ids[ends]
        by_key = np.argsort(all_keys)
        ends, all_keys = ends[by_key], all_keys[by_key]
        del by_key
        first = np.flatnonzero(np.diff(all_keys, prepend=-1))
        keys, frequencies = all_keys[first], np.diff(first, append=len(all_keys))
        del all_keys
        suffixes = rows[ends[first]].astype(np.int64)
        lower = counts_by_order[-1]
        num_previous = np.bincount(suffixes, minlength=len(lower.keys))  # different words before
        counts_by_order[-1] = replace(lower, counts=np.where(begins, lower.counts, num_previous))
        counts_by_order.append(GramCounts(keys, suffixes, frequencies))
        begins = begins[keys // size]
        rows = np.zeros_like(rows)
        rows[ends] = np.repeat(np.arange(len(keys), dtype=index_type), frequencies)
    return counts_by_order


def estimate_discounts(counts: Int64s) -> tuple[float, ...] | None:
    """Estimate the discounts for counts of 0, 1, 2, and 3 or more; return None if that fails.

    Chen and Goodman's equation 26, from the numbers t of n-grams with a count of 1 to 4:
    D(k) = k - (k + 1) Y t(k + 1) / t(k), where Y = t(1) / (t(1) + 2 t(2)). It fails if t(1), t(2)
    or t(3) is 0, or D(k) is below 0 or above k.
    """
    t = [int(np.count_nonzero(counts == k)) for k in range(5)]
    if 0 in t[1:4]:
        return None
    y = t[1] / (t[1] + 2 * t[2])
    discounts = (0.0, *(k - (k + 1) * y * t[k + 1] / t[k] for k in (1, 2, 3)))
    return discounts if all(0 <= d <= k for k, d in enumerate(discounts)) else None


def smooth(
    counts_by_order: Sequence[GramCounts], discounts: Sequence[tuple[float, ...]]
) -> tuple[Grams, ...]:
    """Compute the probabilities of all orders, each interpolated with the order below."""
    size = len(counts_by_order[0].keys)
    lower = np.array([1 / (size - 1)])  # of order 0: uniform over all words except <s>
    log_probs: list[Float32s] = []
    log_backoffs: list[Float32s] = []  # of the contexts of each order: the first is empty
    pairs = zip(counts_by_order, discounts, strict=True)
    for order, (grams, discount_by_count) in enumerate(pairs, start=1):
        discount = np.array(discount_by_count)[np.minimum(grams.counts, 3)]  # (N,)
        num_contexts, prefixes = len(lower), grams.keys // size  # (N,) rows of the order below
        totals = np.bincount(prefixes, grams.counts, num_contexts)
        freed_totals = np.bincount(prefixes, discount, num_contexts)
        backoffs = np.ones(num_contexts)  # of an n-gram that is no context
        np.divide(freed_totals, totals, out=backoffs, where=totals > 0)
        probs = (grams.counts - discount) / totals[prefixes]
        probs += backoffs[prefixes] * lower[grams.suffixes]
        if order == 1:
            probs[BEGIN] = 1.0  # as in lmplz; it has no effect on scores
        log_probs.append(_log(probs))
        log_backoffs.append(_log(backoffs))
        lower = probs
    log_backoffs.append(_log(np.ones(len(lower))))  # the highest order has no longer n-grams
    keys = (grams.keys for grams in counts_by_order)
    return tuple(map(Grams, keys, log_probs, log_backoffs[1:]))


def _log(values: Float64s) -> Float32s:
    return np.log(np.clip(values, MIN_LM_PROBABILITY, 1.0)).astype(np.float32)
