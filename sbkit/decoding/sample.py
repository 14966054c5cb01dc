"""Utterances of the validation sets that a decoder is fitted to, and a sample of them.

Legend: U frames, V vocabulary.
"""

import hashlib
from collections.abc import Collection, Iterable
from typing import NamedTuple

from sbkit.base.arrays import LogProbs
from sbkit.decoding.beam import MAX_CANDIDATES, TOKEN_THRESHOLD
from sbkit.decoding.decoder import AttentionScorer
from sbkit.decoding.greedy import find_speech
from sbkit.distributed.ranks import gather_over_ranks

# Over all ranks; all trials of a token take 3 ms. Even if each frame of 40 ms has `MAX_CANDIDATES`,
# because the model is uncertain, this is enough for three minutes of speech.
MAX_SAMPLE_TOKENS = 60_000

Order = tuple[str, str]  # the sort key of an utterance for filling a sample


class ValidationUtterance(NamedTuple):
    """An utterance of a validation set.

    log_probs: (U, V); text: the reference; attention: for a decoder that rescores; id: decides
    whether the utterance is in a sample.
    """

    log_probs: LogProbs
    text: str
    attention: AttentionScorer | None = None
    id: str = ""

    @property
    def order(self) -> Order:
        return order_of(self.id), self.text


def order_of(id: str) -> str:
    """Return the sort key of an utterance: its id hashed, so that a sample is a random one."""
    return hashlib.sha256(id.encode()).hexdigest()


def sample_utterances(
    utterances: Iterable[ValidationUtterance],
    silent: Collection[int],
    max_tokens: int = MAX_SAMPLE_TOKENS,
) -> list[ValidationUtterance]:
    """Keep this rank's part of a sample with at most ``max_tokens`` over all ranks.

    The sample is the same for any number of ranks. Other utterances are dropped as they arrive,
    because the log-probabilities of a large set do not fit into memory.

    silent: the tokens without sound. Frames without speech are no work, so they do not count.
    """
    sample: list[ValidationUtterance] = []
    counts: dict[Order, int] = {}
    for utterance in utterances:
        sample.append(utterance)
        likely = (utterance.log_probs > TOKEN_THRESHOLD).sum(1)
        is_speech = find_speech(utterance.log_probs, silent)
        counts[utterance.order] = int(likely.clip(max=MAX_CANDIDATES)[is_speech].sum())
        if sum(counts.values()) > 2 * max_tokens:
            last = _last_within(counts.items(), max_tokens)
            counts = {order: count for order, count in counts.items() if order <= last}
            sample = [utterance for utterance in sample if utterance.order <= last]
    all_counts = [pair for share in gather_over_ranks([*counts.items()]) for pair in share]
    last = _last_within(all_counts, max_tokens)
    return [utterance for utterance in sample if utterance.order <= last]


def _last_within(counts: Iterable[tuple[Order, int]], max_tokens: int) -> Order:
    """Return the key of the last utterance in order before the sum exceeds ``max_tokens``."""
    total = 0
    last = ("", "")
    for order, count in sorted(counts):
        total += count
        if total > max_tokens and last != ("", ""):
            break
        last = order
    return last
