"""An n-gram model as an automaton: a state for each history, arcs for words and for back-off."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sbkit.base.errors import SbkitError
from sbkit.lm.ngram import BEGIN, END, Floats, Grams, Ints, NgramModel


class Arcs(NamedTuple):
    """Arcs of one kind, (N,) each: two states, a word's id, a natural logarithm."""

    sources: Ints
    targets: Ints
    words: Ints
    weights: Floats


class Automaton(NamedTuple):
    """A deterministic automaton, but that from each state one may back off.

    start: after `<s>`; words: an arc for each n-gram but those that end in `<s>`; those that end in
    `</s>` are the ends, which lead nowhere; backoffs: to the state of a shorter history.
    """

    start: int
    words: Arcs
    ends: Arcs
    backoffs: Arcs


def make_automaton(model: NgramModel) -> Automaton:
    """Make an automaton of the histories that say more than the shorter ones they end in.

    State 0 is that of no history. Raises SbkitError where the n-grams do not fit together.
    """
    states, words, backoffs = np.zeros(1, np.int64), list[Arcs](), list[Arcs]()
    first = 1  # state of the order
    suffixes = _suffixes(model)
    for grams, longer, suffix in zip(model.grams, [*model.grams[1:], None], suffixes, strict=True):
        contexts, last = np.divmod(grams.keys, len(model.words))
        shorter, own = states[suffix], first + np.arange(len(grams))
        kept = _is_kept(grams, longer, len(model.words))
        targets = np.where(kept, own, shorter)
        words.append(Arcs(states[contexts], targets, last, grams.log_probs))
        backoffs.append(Arcs(own[kept], shorter[kept], last[kept], grams.backoffs[kept]))
        states, first = targets, first + len(grams)
        if len(words) == 1:
            start = int(targets[BEGIN])
    every = Arcs(*map(np.concatenate, zip(*words, strict=True)))
    said, ended = (every.words != BEGIN) & (every.words != END), every.words == END
    return Automaton(
        start,
        Arcs(*(each[said] for each in every)),
        Arcs(*(each[ended] for each in every)),
        Arcs(*map(np.concatenate, zip(*backoffs, strict=True))),
    )


def _is_kept(grams: Grams, longer: Grams | None, size: int) -> npt.NDArray[np.bool_]:
    """Return which n-grams are histories of their own: something follows, or back-off costs."""
    if longer is None:
        return np.zeros(len(grams), np.bool_)
    kept: npt.NDArray[np.bool_] = grams.backoffs != 0
    kept[longer.keys // size] = True
    return kept


def _suffixes(model: NgramModel) -> list[Ints]:
    """Return, by order, the row of each n-gram without its first word in the order below."""
    size, found = len(model.words), [np.zeros(len(model.words), np.int64)]
    for lower, higher in pairwise(model.grams):
        contexts, words = np.divmod(higher.keys, size)
        keys = found[-1][contexts] * size + words
        rows = np.searchsorted(lower.keys, keys)
        if not np.array_equal(lower.keys[np.minimum(rows, len(lower) - 1)], keys):
            raise SbkitError(
                "Each n-gram of a language model must be there without its first word, too, but "
                f"of {len(higher)} in an order of this one not all are. Train it again."
            )
        found.append(rows)
    return found
