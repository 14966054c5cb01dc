"""Fit a search to a validation set: the weights of its models, and the confidences of its words.

log-probabilities and texts of the set -> a sample -> errors with some weights -> the best weights
-> features of the words that are then decoded -> confidences
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sbkit.base.errors import SbkitError
from sbkit.base.messages import plural
from sbkit.decoding.attention import AttentionDecoder, Floats
from sbkit.decoding.confidence import (
    GREEDY,
    FittedConfidence,
    LabeledWords,
    WordAligner,
    fit_confidence,
    label_words,
)
from sbkit.decoding.decoder import LIKELY, MOST_TOKENS, BeamDecoder, Weights
from sbkit.decoding.frames import LogProbs
from sbkit.decoding.greedy import GreedySearch, best_tokens
from sbkit.decoding.language_models import LanguageModels
from sbkit.distributed.ranks import gather_over_ranks
from sbkit.evaluate.wer import Scores, count_errors
from sbkit.lm.ngram import NgramModel
from sbkit.logs.progress import shown
from sbkit.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

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
ENOUGH = 60_000  # tokens of a sample over all ranks, the most; one takes 3 ms with all weights
# The least: 60 s. Three minutes are 4,500 frames of 40 ms, each with 3 to 4 likely tokens where a
# model has learned; one that has not has `MOST_TOKENS`, and its weights are left alone.
MIN_TOKENS = 20_000
# Of a larger validation set, so that the weights are not a matter of a few clips.
MIN_UTTERANCES, MIN_SECONDS = 20, 180.0
# A tenth of the training time of the default run: two cores train on 130 s of audio in a second.
TOKENS_PER_SECOND = 0.2

Add = Callable[[Sequence[Scores]], list[Scores]]
Ping = Callable[[], object]
Order = tuple[str, str]


class TuningUtterance(NamedTuple):
    """An utterance of the validation set: its log-probabilities (U, V), and its reference text.

    attention: its attention decoder, for a search that uses it; id: chooses whether it is in a
    sample; seconds: of its audio.
    """

    log_probs: LogProbs
    text: str
    attention: AttentionDecoder | None = None
    id: str = ""
    seconds: float = 0.0

    @property
    def order(self) -> Order:
        """Return its place in the order in which a sample is filled."""
        return order_of(self.id), self.text


@dataclass(frozen=True)
class Tuned:
    """The weights that were chosen, and the errors with them.

    by_words: false for a language that writes no spaces between words, which has no WER.
    kept: the sentence on why the weights are the defaults, "" where they were chosen.
    """

    weights: Weights
    scores: Scores
    utterances: int
    by_words: bool = True
    kept: str = ""

    def plain(self) -> dict[str, Any]:
        """Return them as plain data."""
        return {
            "weights": self.weights.plain(),
            "CER": self.scores.cer,
            **({"WER": self.scores.wer} if self.by_words else {}),
            "utterances": self.utterances,
            **({"kept": self.kept} if self.kept else {}),
        }


def tune(
    decoder: BeamDecoder,
    utterances: Sequence[TuningUtterance],
    *,
    by_words: bool = True,
    add: Add = list,
    ping: Ping = int,
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
        errors.append(count_all_errors(tried, utterances, decoder.tokenizer, ping))
    found = add(errors)
    if not found[0].utterances:
        raise SbkitError(
            "The weights of a decoder must be chosen on a validation set, but it is empty. Write "
            "them into the YAML, or name a set."
        )
    smooth = _fit(points, np.array([error_of(each, by_words=by_words) for each in found]))
    best = _weights_at(names, ranges, points[smooth.argsort(kind="stable")[:AVERAGED]].mean(0))
    best_found = decoder.with_weights(best)
    (reached,) = add([count_all_errors(best_found, utterances, decoder.tokenizer, ping)])
    return Tuned(best, reached, reached.utterances, by_words)


def error_of(scores: Scores, *, by_words: bool) -> float:
    """Return what weights are chosen by: the sum of both error rates, or that of characters."""
    return scores.cer + (scores.wer if by_words else 0)


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


# ---- a sample of the validation set


def order_of(name: str) -> str:
    """Return where an utterance stands in the order in which a sample is filled, by its id."""
    return hashlib.sha256(name.encode()).hexdigest()


def tokens_to_try(trained_seconds: float) -> int:
    """Return how many tokens a sample has, so that fitting takes a tenth of the training time.

    It is computed from the audio that was trained on, not from the time it took, so that the same
    run has the same sample on any machine and any number of ranks.
    """
    return min(ENOUGH, max(MIN_TOKENS, round(TOKENS_PER_SECOND * trained_seconds)))


def limit_tokens(
    utterances: Iterable[TuningUtterance], most: int = ENOUGH
) -> list[TuningUtterance]:
    """Keep this rank's part of a sample with at most so many tokens over all ranks.

    A set that has no more is kept whole; of a larger one, the same utterances on any number of
    ranks. The others are dropped as they come, because the log-probabilities of a large set do not
    fit into memory.
    """
    kept, counts = list[TuningUtterance](), dict[Order, int]()
    for each in utterances:
        kept.append(each)
        likely = (each.log_probs > LIKELY).sum(1)
        counts[each.order] = int(likely.clip(max=MOST_TOKENS).sum())
        if sum(counts.values()) > 2 * most:
            last = _last_within(counts.items(), most)
            kept = [each for each in kept if each.order <= last]
            counts = {each.order: counts[each.order] for each in kept}
    everyone = [pair for share in gather_over_ranks([*counts.items()]) for pair in share]
    last = _last_within(everyone, most)
    return [each for each in kept if each.order <= last]


def _last_within(counts: Iterable[tuple[Order, int]], most: int) -> Order:
    """Return the last of the utterances in order that have no more tokens together."""
    total, last = 0, ("", "")
    for order, count in sorted(counts):
        total += count
        if total > most and last != ("", ""):
            break
        last = order
    return last


def count_all_errors(
    search: BeamDecoder | GreedySearch,
    utterances: Sequence[TuningUtterance],
    tokenizer: Tokenizer,
    ping: Ping = int,
) -> Scores:
    """Decode utterances, and count their errors; ``ping`` is called before each."""
    scores = Scores()
    for each in utterances:
        ping()
        tokens = list(search.nbest(each.log_probs, each.attention)[0].tokens)
        scores += count_errors(each.text, tokenizer.decode(tokens))
    return scores


# ---- all that is fitted to it


def fit_weights(
    search: BeamDecoder,
    utterances: Sequence[TuningUtterance],
    *,
    sets: Sequence[str],
    total: int,
    by_words: bool,
    add: Add = list,
    ping: Ping = int,
    quiet: bool = False,
) -> tuple[BeamDecoder, Tuned]:
    """Return the search with the best weights, and what they reach.

    ``total``: the utterances of the sets, of which these are the sample. Where it is too small a
    part of them, the weights are the defaults, and ``Tuned.kept`` says why.
    """
    if kept := _too_few(utterances, total):
        search = search.with_weights(Weights() if by_words else Weights(word=0.0))
        (reached,) = add([count_all_errors(search, utterances, search.tokenizer, ping)])
        logger.info(kept)
        return search, Tuned(search.weights, reached, reached.utterances, by_words, kept)
    logger.info(f"decoder: {POINTS} weights are tried on {_count(utterances)} ({', '.join(sets)})")
    decoded = (POINTS + 1) * len(utterances)
    with shown("trying weights of the decoder", decoded, quiet=quiet) as advance:
        moved = _both(ping, advance)
        tuned = tune(search, utterances, by_words=by_words, add=add, ping=moved)
    search = search.with_weights(tuned.weights)
    chosen = tuned.weights.plain()
    said = ", ".join(f"{name} {chosen[name]:g}" for name in used_weights(search))
    if search.language_models.words is not None and not search.weights.word:
        said += ", without the model of words, which the language does not separate"
    logger.info(f"decoder: {said} (chosen on {', '.join(sets)})")
    return search, tuned


def _too_few(utterances: Sequence[TuningUtterance], total: int) -> str:
    """Return the sentence on why no weights are fitted to a sample, "" where they are."""
    own = len(utterances), sum(each.seconds for each in utterances)
    count, seconds = (sum(share) for share in zip(*gather_over_ranks(own), strict=True))
    if count >= total or (count >= MIN_UTTERANCES and seconds >= MIN_SECONDS):
        return ""
    return (
        "the weights of the decoder stay at their defaults, since a model this uncertain leaves "
        f"time to try them on {count} of {plural(total, 'utterance')} only ({seconds:.0f} s). "
        "Train longer, or write them into the YAML."
    )


def fit_confidences(
    aligner: WordAligner,
    search: BeamDecoder | None,
    utterances: Sequence[TuningUtterance],
    *,
    sets: Sequence[str],
    ping: Ping = int,
    quiet: bool = False,
) -> dict[str, FittedConfidence]:
    """Fit the confidences of words, of greedy decoding and of a search, on all ranks alike."""
    tokenizer = aligner.tokenizer
    labeled = {GREEDY: list[LabeledWords]()} | ({} if search is None else {search.kind: []})
    with shown("fitting the confidence of words", len(utterances), quiet=quiet) as advance:
        for each in utterances:
            _both(ping, advance)()
            tokens = best_tokens(each.log_probs, tokenizer.vocabulary.blank)
            found = aligner.extract_features(each.log_probs, tokens)
            labeled[GREEDY].append(label_words(found, each.text))
            if search is not None:
                beam = search.nbest(each.log_probs, each.attention)
                found = aligner.extract_features(each.log_probs, beam[0].tokens, beam)
                labeled[search.kind].append(label_words(found, each.text))
    fitted = {
        name: fit_confidence([each for share in gather_over_ranks(own) for each in share])
        for name, own in labeled.items()
    }
    for name, fit in fitted.items():
        logger.info(
            f"confidence of words, {name}: {fit} ({', '.join(sets) or 'no validation set'})"
        )
    return fitted


def _both(ping: Ping, advance: Callable[[float], None]) -> Ping:
    def moved() -> None:
        ping()
        advance(1)

    return moved


def _count(utterances: Sequence[TuningUtterance]) -> str:
    return plural(sum(gather_over_ranks(len(utterances))), "utterance")
