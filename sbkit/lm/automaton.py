"""An n-gram model as an automaton: a state for each history, arcs for words and for back-off."""

from typing import NamedTuple

import numpy as np

from sbkit.lm.ngram import BEGIN, END, Floats, Ints, NgramModel


class Arcs(NamedTuple):
    """Arcs of one kind, (N,) each: two states, a word's id, a natural logarithm."""

    sources: Ints
    targets: Ints
    words: Ints
    weights: Floats


class Automaton(NamedTuple):
    """An automaton that is deterministic but for its arcs of back-off.

    start: after `<s>`; words: an arc for each n-gram but those that end in `<s>`; those that end in
    `</s>` are the ends, which lead nowhere; backoffs: to the state of a shorter history.
    """

    start: int
    words: Arcs
    ends: Arcs
    backoffs: Arcs


def make_automaton(model: NgramModel) -> Automaton:
    """Make an automaton of the states of a model, by their numbers."""
    made = model.numbered()
    every = Arcs(made.contexts[1:], made.states[1:], made.words[1:], made.log_probs[1:])
    said, ended = (every.words != BEGIN) & (every.words != END), every.words == END
    states = 1 + np.flatnonzero(every.targets == np.arange(1, len(made.states)))
    return Automaton(
        model.start,
        Arcs(*(each[said] for each in every)),
        Arcs(*(each[ended] for each in every)),
        Arcs(states, made.shorter[states], made.words[states], made.backoffs[states]),
    )
