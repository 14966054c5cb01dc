"""CTC segmentation: find the utterances of a text in a long recording (Kürzinger et al., 2020).

log-probabilities of a recording, tokens of its utterances -> best path -> their frames and scores

The path visits the tokens of all utterances in order. Unlike in the paper, it may leave audio or
text out: before, between and after the utterances it may stay in a gap, which accepts any token at
GAP_PENALTY, and it may skip an utterance at SKIP_PENALTY. So text may be missing or added.

Only WINDOW_STATES are compared in a frame, and the path is traced back block by block, so time and
memory grow with the frames, but not with the text. A frame may skip three quarters of a window.

Legend: U frames, V vocabulary, N states: gap, tokens of an utterance, gap, ..., gap; W of them are
in the window.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from sbkit.base.arrays import Counts, Float32s, LogProbs
from sbkit.text.vocabulary import Vocabulary

GAP_PENALTY = 3.5  # in ln p per frame with a token, of speech without text
SKIP_PENALTY = 10.0  # in ln p, of an utterance without speech
WINDOW_STATES = 16_384  # about 20 minutes of characters
TRACED_FRAMES = 250
SCORE_FRAMES = 10  # 0.4 s, about a word: the 30 of the paper find fewer words that are missing
PAUSE_FRAMES = 5  # 0.2 s
# How a state was reached: from the same state, the one before, over a gap, from the gap before.
STAY, NEXT, OVER_GAP, SKIP = range(4)

FrameBlock = tuple[int, Float32s]
"""The first state of a window, and ln p of the best path to each state before a block: (W,)."""


class AlignedUtterance(NamedTuple):
    """Where an utterance is spoken: its first frame, the frame after its last, and its score.

    The score is the lowest mean of ln p in SCORE_FRAMES consecutive frames. A single letter occurs
    anywhere in speech, so its score is also limited by ln p of silence in PAUSE_FRAMES around it.
    """

    first: int
    end: int
    score: float


@dataclass(frozen=True, eq=False)
class _States:
    """The states of a text, and the column of `_emissions` that each state reads."""

    columns: Counts  # (N,)
    gaps: Counts  # the states that are gaps, in order
    blank: int

    @classmethod
    def of(cls, utterances: Sequence[Sequence[int]], vocabulary: Vocabulary) -> "_States":
        unknown, gap = vocabulary.size, vocabulary.size + 1
        columns = np.array([gap, *chain.from_iterable([*u, gap] for u in utterances)])
        columns[columns == vocabulary.unk] = unknown
        return cls(columns, np.flatnonzero(columns == gap), vocabulary.blank)


def _emissions(log_probs: LogProbs, silent_ids: Collection[int]) -> Float32s:
    """Add ln p of a character that the tokens cannot spell, and of a gap: -> (U, V + 2)."""
    any_token = log_probs.max(1) - GAP_PENALTY
    gap = np.maximum(any_token, log_probs[:, list(silent_ids)].max(1))
    return np.column_stack([log_probs, any_token, gap]).astype(np.float32)


class _Window:
    """The window of states from ``first`` on, which the frames of a block are aligned with."""

    def __init__(self, states: _States, first: int) -> None:
        self._columns = states.columns[first : first + WINDOW_STATES]
        gaps = states.gaps[np.searchsorted(states.gaps, first) :] - first
        self._gaps = gaps[gaps < len(self._columns)]
        self._starts = self._gaps[(self._gaps > 0) & (self._gaps + 1 < len(self._columns))] + 1
        self._skip_costs = SKIP_PENALTY * np.arange(len(self._gaps), dtype=np.float32)
        self._blank = states.blank

    def advance(self, best: Float32s, frame: Float32s) -> tuple[Float32s, Counts]:
        """Return ln p of the best paths after a frame, and how each state was reached.

        best: ln p of the best path to each state (W,); frame: (V + 2,).
        """
        stay = best + np.maximum(frame, frame[self._blank])[self._columns]
        entered = np.empty_like(best)
        entered[0] = -np.inf
        entered[1:] = best[:-1]
        over_gap = self._starts[best[self._starts - 2] > entered[self._starts]]
        entered[over_gap] = best[over_gap - 2]
        entered += frame[self._columns]
        moves = (entered > stay).astype(np.int8)
        moves[over_gap] *= OVER_GAP
        best = np.maximum(stay, entered)
        in_gaps = best[self._gaps]
        skipping = np.maximum.accumulate(in_gaps + self._skip_costs) - self._skip_costs
        is_skipped = np.zeros(len(in_gaps), np.bool_)
        is_skipped[1:] = skipping[:-1] - SKIP_PENALTY > in_gaps[1:]
        skipped_gaps = self._gaps[is_skipped]
        best[skipped_gaps] = skipping[is_skipped]
        moves[skipped_gaps] = SKIP
        return best, moves


def align_utterances(
    log_probs: LogProbs,
    utterances: Sequence[Sequence[int]],
    *,
    vocabulary: Vocabulary,
    silent_ids: Collection[int],
) -> list[AlignedUtterance | None]:
    """Find utterances, lists of tokens, in the frames of a recording (U, V); None: not spoken.

    silent_ids: the tokens without sound, blank and space.
    """
    states = _States.of(utterances, vocabulary)
    blocks, last_state = _run_forward(states, log_probs, silent_ids)
    path, emissions = _trace_back(states, log_probs, silent_ids, blocks, last_state)
    aligned: list[AlignedUtterance | None] = []
    for start, end in zip(states.gaps[:-1] + 1, states.gaps[1:], strict=True):
        first, last, after = np.searchsorted(path, [start, end - 1, end]).tolist()
        if first == after or start == end:
            aligned.append(None)
            continue
        token = utterances[len(aligned)][-1]
        is_token = log_probs[last + 1 : after, token] > log_probs[last + 1 : after, states.blank]
        end_frame = last + 1 + int(np.logical_and.accumulate(is_token).sum())
        width = min(SCORE_FRAMES, end_frame - first)
        sums = np.concatenate([[0.0], np.cumsum(emissions[first:end_frame], dtype=np.float64)])
        score = float((sums[width:] - sums[:-width]).min() / width)
        num_letters = sum(token not in silent_ids for token in utterances[len(aligned)])
        if num_letters == 1:  # which occurs anywhere
            around = [*range(max(0, first - PAUSE_FRAMES), first)]
            around += range(end_frame, min(len(log_probs), end_frame + PAUSE_FRAMES))
            score = min([score, *log_probs[around][:, list(silent_ids)].max(1).tolist()])
        aligned.append(AlignedUtterance(first, end_frame, score))
    return aligned


def _run_forward(
    states: _States, log_probs: LogProbs, silent_ids: Collection[int]
) -> tuple[list[FrameBlock], int]:
    """Return ln p of the best paths before each block, and the best last state, a gap."""
    num_states = len(states.columns)
    best = np.full(min(WINDOW_STATES, num_states), -np.inf, np.float32)
    best[0] = 0.0
    first = 0
    blocks: list[FrameBlock] = []
    for start in range(0, len(log_probs), TRACED_FRAMES):
        best_state = int(best.argmax())
        # In a passage that resembles a later one, the best state may be too far ahead.
        earliest = int((best > best[best_state] - GAP_PENALTY * WINDOW_STATES / 4).argmax())
        earliest = max(earliest, best_state - 3 * WINDOW_STATES // 4)
        shift = max(0, min(earliest, num_states - WINDOW_STATES - first))
        new_states = np.full(shift, -np.inf, np.float32)
        best = np.concatenate([best[shift:], new_states]) - best.max()
        first += shift
        blocks.append((first, best))
        window = _Window(states, first)
        for frame in _emissions(log_probs[start : start + TRACED_FRAMES], silent_ids):
            best, _ = window.advance(best, frame)
    gaps = states.gaps[(states.gaps >= first) & (states.gaps < first + len(best))]
    return blocks, int(gaps[best[gaps - first].argmax()])


def _trace_back(
    states: _States,
    log_probs: LogProbs,
    silent_ids: Collection[int],
    blocks: Sequence[FrameBlock],
    state: int,
) -> tuple[Counts, Float32s]:
    """Return the state of each frame on the best path that ends in a state, and its ln p: (U,)."""
    path = np.zeros(len(log_probs), np.int64)
    emitted = np.zeros(len(log_probs), np.float32)
    for block_index in range(len(blocks) - 1, -1, -1):
        first, best = blocks[block_index]
        start = block_index * TRACED_FRAMES
        emissions = _emissions(log_probs[start : start + TRACED_FRAMES], silent_ids)
        window = _Window(states, first)
        moves = np.empty((len(emissions), len(best)), np.int8)
        for index, frame in enumerate(emissions):
            best, moves[index] = window.advance(best, frame)
        for index in range(len(emissions) - 1, -1, -1):
            while moves[index, state - first] == SKIP:
                state = int(states.gaps[np.searchsorted(states.gaps, state) - 1])
            frame = emissions[index]
            move = int(moves[index, state - first])
            column = states.columns[state]
            path[start + index] = state
            emitted[start + index] = frame[column]
            if move == STAY:
                emitted[start + index] = max(frame[column], frame[states.blank])
            state -= move
    return path, emitted
