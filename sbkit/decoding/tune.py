"""Choose the weights of a search on a validation set.

log-probabilities and texts of the set -> errors with some weights -> the best weights
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sbkit.base.errors import SbkitError
from sbkit.decoding.attention import AttentionDecoder, Floats
from sbkit.decoding.decoder import LIKELY, BeamDecoder, Weights
from sbkit.decoding.frames import LogProbs
from sbkit.decoding.language_models import LanguageModels
from sbkit.evaluate.wer import Scores, count_errors
from sbkit.lm.ngram import NgramModel

TRIED: Mapping[str, tuple[float, float]] = {  # from the least to the most
    "word": (0.2, 1.0),
    "word_bonus": (0.0, 2.5),
    "unknown": (-10.0, -2.0),
    "token": (0.0, 0.6),
    "token_bonus": (0.0, 1.0),
    "attention": (0.0, 2.5),
}
# A path has one alignment, and an unknown word the cost of its tokens.
TRIED_OF_GRAPH = {"word": (0.5, 1.5), "word_bonus": (-1.0, 2.0), "unknown": (-8.0, 1.0)}
OF_WORDS = ("word", "unknown", "word_bonus")
BASES = (2, 3, 5, 7, 11, 13)
POINTS = 64  # weights that are tried
AVERAGED = 12
NARROW = 16  # the beam that they are tried with: in half the time of 32
RIDGE = 1.0
MOST_NGRAMS = 100_000  # in a graph that weights are tried with: 4 s to make each
ENOUGH = 60_000  # tokens that a rank tries with each of the weights: 2 minutes for all of them

Add = Callable[[Sequence[Scores]], list[Scores]]


class TuningUtterance(NamedTuple):
    """An utterance of the validation set: its log-probabilities (U, V), and its reference text.

    attention: its attention decoder, for a search that uses it.
    """

    log_probs: LogProbs
    text: str
    attention: AttentionDecoder | None = None


@dataclass(frozen=True)
class Tuned:
    """The weights that were chosen, and the errors with them.

    by_words: false for a language that writes no spaces between words, which has no WER.
    """

    weights: Weights
    scores: Scores
    utterances: int
    by_words: bool = True

    def plain(self) -> dict[str, Any]:
        """Return them as plain data."""
        return {
            "weights": self.weights.plain(),
            "CER": self.scores.cer,
            **({"WER": self.scores.wer} if self.by_words else {}),
            "utterances": self.utterances,
        }


def tune(
    decoder: BeamDecoder,
    utterances: Sequence[TuningUtterance],
    *,
    by_words: bool = True,
    add: Add = list,
    ping: Callable[[], object] = int,
) -> Tuned:
    """Choose weights by the sum of word and character error rate; without words, by the latter.

    ``POINTS`` weights are tried that lie evenly in the space of all, and a quadratic function is
    fitted to their errors. The mean of the ``AVERAGED`` weights for which it is lowest is chosen,
    not those with the fewest errors: on a set of a few hundred words these are a matter of luck.
    A language that does not separate words is decoded without the model of words, which would know
    whole sentences.

    ``add`` adds the errors of all ranks, each of which has a share of the set; ``ping`` is called
    before each utterance, for a watchdog. Raises SbkitError where the set is empty.
    """
    names = list(used_weights(decoder))
    if not by_words and "token" in names:
        names = [name for name in names if name not in OF_WORDS]
    points = np.stack([_halton(POINTS, base) for base in BASES[: len(names)]], 1)
    ranges = [(TRIED_OF_GRAPH if decoder.kind == "graph" else TRIED)[name] for name in names]
    narrow, quick = min(decoder.beam_size, NARROW), _make_quick(decoder)
    errors = list[Scores]()
    for point in points:
        tried = quick.with_weights(_weights_at(names, ranges, point), beam_size=narrow)
        errors.append(_errors(tried, utterances, ping))
    found = add(errors)
    if not found[0].utterances:
        raise SbkitError(
            "The weights of a decoder must be chosen on a validation set, but it is empty. Write "
            "them into the YAML, or name a set."
        )
    smooth = _fit(points, np.array([each.cer + (each.wer if by_words else 0) for each in found]))
    best = _weights_at(names, ranges, points[smooth.argsort(kind="stable")[:AVERAGED]].mean(0))
    (reached,) = add([_errors(decoder.with_weights(best), utterances, ping)])
    return Tuned(best, reached, reached.utterances, by_words)


def _make_quick(decoder: BeamDecoder) -> BeamDecoder:
    """Return a faster decoder for which much the same weights are the best.

    A joint search maximizes what rescoring does, and takes ten times as long. A graph is built
    again for all weights, so its language model keeps only orders with few n-grams.
    """
    words = decoder.language_models.words
    if decoder.kind == "graph" and words is not None:
        sizes = np.cumsum([len(grams) for grams in words.grams])
        orders = max(1, int((sizes <= MOST_NGRAMS).sum()))
        shorter = NgramModel(words.words, words.grams[:orders])
        return decoder.with_language_models(LanguageModels(words=shorter, tokens=None))
    return decoder.with_attention("rescore") if decoder.attention else decoder


def _weights_at(
    names: Sequence[str], ranges: Sequence[tuple[float, float]], point: Floats
) -> Weights:
    """Return the weights at a point of the unit cube."""
    values = {
        name: round(low + share * (high - low), 3)
        for name, (low, high), share in zip(names, ranges, point.tolist(), strict=True)
    }
    return Weights(**({"word": 0.0} | values))


def _halton(count: int, base: int) -> Floats:
    """Return the first numbers of Halton's sequence: they fill the unit interval evenly."""
    units = float(base) ** np.arange(7)  # more digits than POINTS has in base 2
    numbers: Floats = (np.arange(1, count + 1)[:, None] // units % base / units / base).sum(1)
    return numbers


def _fit(points: Floats, values: Floats) -> Floats:
    """Fit a quadratic function by ridge regression, and return it at the points: (N, D), (N,)."""
    centred = 2 * points - 1
    first, second = np.triu_indices(points.shape[1])
    features = np.concatenate([centred, centred[:, first] * centred[:, second]], 1)
    features = features - features.mean(0)
    penalty = RIDGE * np.eye(features.shape[1])
    weights = np.linalg.solve(
        features.T @ features + penalty, features.T @ (values - values.mean())
    )
    fitted: Floats = features @ weights + values.mean()
    return fitted


def used_weights(decoder: BeamDecoder) -> Iterator[str]:
    """Name the weights that have an effect."""
    models = decoder.language_models
    if models.words is not None and decoder.weights.word:
        yield from OF_WORDS
    if models.tokens is not None and decoder.kind != "graph":
        yield from ("token", "token_bonus")
    if decoder.attention is not None:
        yield "attention"


def limit_tokens(utterances: Iterable[TuningUtterance]) -> list[TuningUtterance]:
    """Keep utterances spread evenly over the set, of at most ``ENOUGH`` tokens together.

    Of a larger set, every second one is kept, or every fourth and so on. The others are dropped as
    they come, because the log-probabilities of a large set do not fit into memory.
    """
    kept, counts, stride = list[TuningUtterance](), list[int](), 1
    for number, each in enumerate(utterances):
        if number % stride:
            continue
        kept.append(each)
        counts.append(int((each.log_probs > LIKELY).sum()))
        while sum(counts) > ENOUGH and len(kept) > 1:
            kept, counts, stride = kept[::2], counts[::2], 2 * stride
    return kept


def _errors(
    decoder: BeamDecoder, utterances: Sequence[TuningUtterance], ping: Callable[[], object]
) -> Scores:
    scores = Scores()
    for each in utterances:
        ping()
        tokens = decoder.nbest(each.log_probs, each.attention)[0].tokens
        scores += count_errors(each.text, decoder.tokenizer.decode(tokens))
    return scores
