"""The prefix beam search of a whole batch, on any device.

Legend: B utterances, U frames of 40 ms, V vocabulary, K hypotheses of a beam.

The host waits for the device twice: when it checks the log-probabilities, and for the answer.
"""

from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter

import torch
from torch import Tensor

from sbkit.decoding.frames import BeamSettings, Hypothesis, frame_error, require_vocabulary
from sbkit.decoding.scorer import NOTHING
from sbkit.decoding.scorer_table import ScorerTable, tabulate
from sbkit.distributed.device import widest_float

# Of Knuth's MMIX generator. Only prefixes of one beam are compared, by 64 bits: two different ones
# are taken for one by a chance of 1e-19 a pair.
MULTIPLIER = 6364136223846793005
NO_PARENT = -1  # of the empty prefix


@dataclass(frozen=True, eq=False)
class Beam:
    """The prefixes of a batch: all (B, K).

    in_blank, in_token: ln of the alignments that end so; added: what the scorer adds; state: its
    state; last: the last token, the blank where there is none; key, parent_key: hashes of the
    tokens, and of all but the last.
    """

    in_blank: Tensor
    in_token: Tensor
    added: Tensor
    state: Tensor
    last: Tensor
    key: Tensor
    parent_key: Tensor

    @property
    def total(self) -> Tensor:
        """Return ln of all alignments: (B, K)."""
        return torch.logaddexp(self.in_blank, self.in_token)


@dataclass(frozen=True, eq=False)
class Step:
    """Where a beam came from: (B, K) the place in the beam before, and the token or -1."""

    parent: Tensor
    token: Tensor


class BatchedBeamSearch:
    """Find what `PrefixBeamSearch` finds, for all utterances of a batch at once.

    table: of a `TokenScorer` or another scorer with few states, None to add nothing; it is copied
    for each batch unless it is on the device, in float64.
    """

    def __init__(self, *, settings: BeamSettings, table: ScorerTable | None = None) -> None:
        self.settings, self._size = settings, settings.beam_size
        self._table = table or tabulate(NOTHING, settings)

    @torch.inference_mode()
    def decode(self, log_probs: Tensor, frame_lengths: Tensor) -> list[list[Hypothesis]]:
        """Return the beam of each utterance, best first: (B, U, V) natural logs, (B,) -> B lists.

        Raises SbkitError for another vocabulary and for frames without a finite largest value.
        """
        require_vocabulary(log_probs.shape[-1], self.settings.vocab_size)
        # Added up in float64, as the plain search does, where the device has it.
        dtype = widest_float(log_probs.device)
        log_probs = self._blank_padding(log_probs.to(dtype), frame_lengths)
        _check(log_probs)
        table = self._table.to(log_probs.device, dtype)
        beam, steps = self._start(log_probs), list[Step]()
        for frame, tried in zip(log_probs.unbind(1), self._try(log_probs).unbind(1), strict=True):
            beam, step = self._advance(beam, frame, tried, table)
            steps.append(step)
        return _hypotheses(beam, steps, table)

    def _blank_padding(self, log_probs: Tensor, frame_lengths: Tensor) -> Tensor:
        """Make the blank certain after the end of an utterance, which then stays as it is."""
        places = torch.arange(log_probs.shape[1], device=log_probs.device)
        padding = places >= frame_lengths.to(log_probs.device)[:, None]  # (B, U)
        certain = log_probs.new_full((log_probs.shape[-1],), -inf)
        certain[self.settings.blank] = 0
        return torch.where(padding[..., None], certain, log_probs)

    def _try(self, log_probs: Tensor) -> Tensor:
        """Return the log-probabilities of what may be appended, -inf for the rest: (B, U, V)."""
        barred = [self.settings.blank, *self.settings.excluded]
        tried = log_probs.index_fill(-1, torch.tensor(barred, device=log_probs.device), -inf)
        keep = (tried > self.settings.token_threshold) | (tried == tried.amax(-1, keepdim=True))
        return torch.where(keep, tried, -inf)

    def _start(self, log_probs: Tensor) -> Beam:
        shape = log_probs.shape[0], self._size
        nothing = log_probs.new_full(shape, -inf)
        in_blank = nothing.clone()
        in_blank[:, 0] = 0
        zeros = torch.zeros(shape, dtype=torch.int64, device=log_probs.device)
        beam = Beam(
            in_blank=in_blank,
            in_token=nothing,
            added=torch.zeros_like(nothing),
            state=zeros,
            last=zeros + self.settings.blank,
            key=zeros,
            parent_key=zeros + NO_PARENT,
        )
        return _forget_impossible(beam, in_blank)

    def _advance(
        self, beam: Beam, frame: Tensor, tried: Tensor, table: ScorerTable
    ) -> tuple[Beam, Step]:
        """Read one frame: (B, V) of all tokens, (B, V) of those to append."""
        total = beam.total
        extended = total[..., None] + tried[:, None]  # (B, K, V)
        repeated = beam.in_blank + tried.gather(1, beam.last)  # a blank lies between
        extended = extended.scatter(2, beam.last[..., None], repeated[..., None])
        extended, gained = _merge(beam, extended, self.settings.blank)
        stayed = replace(
            beam,
            in_blank=total + frame[:, self.settings.blank, None],
            in_token=torch.logaddexp(beam.in_token + frame.gather(1, beam.last), gained),
        )
        scores = extended + beam.added[..., None] + table.scores[beam.state]
        choices = torch.cat([stayed.total + beam.added, scores.flatten(1)], 1)  # (B, K + K * V)
        score, choice = choices.topk(self._size, dim=1)
        return _select(stayed, extended, score, choice, table)


def _check(log_probs: Tensor) -> None:
    best = log_probs.amax(-1)  # (B, U), NaN where one is
    bad = ~best.isfinite()
    if bool(bad.any()):
        utterance, frame = bad.nonzero()[0].tolist()
        raise frame_error(frame, float(best[utterance, frame]))


def _merge(beam: Beam, extended: Tensor, blank: int) -> tuple[Tensor, Tensor]:
    """Take what leads to another prefix of the beam out of the extensions: (B, K, V), (B, K)."""
    parents = beam.key[:, :, None] == beam.parent_key[:, None, :]  # (B, K, K), of at most one
    last = beam.last[:, None, :].expand(parents.shape)
    gained = torch.where(parents, extended.gather(2, last), -inf).amax(1)
    merged = torch.where(parents, last, blank)  # the blank is -inf as it is
    return extended.scatter(2, merged, -inf), gained


def _select(
    stayed: Beam, extended: Tensor, score: Tensor, choice: Tensor, table: ScorerTable
) -> tuple[Beam, Step]:
    """Make the next beam of choices (B, K): to stay, or prefix * V + token after those."""
    size, vocab_size = extended.shape[1:]
    leads = choice >= size
    arc = (choice - size).clamp(min=0)
    parent = torch.where(leads, arc // vocab_size, choice)
    token = arc % vocab_size
    state, key = stayed.state.gather(1, parent), stayed.key.gather(1, parent)
    added = stayed.added.gather(1, parent)
    in_token = extended.flatten(1).gather(1, arc)
    beam = Beam(
        in_blank=torch.where(leads, -inf, stayed.in_blank.gather(1, parent)),
        in_token=torch.where(leads, in_token, stayed.in_token.gather(1, parent)),
        added=torch.where(leads, added + table.scores[state, token], added),
        state=torch.where(leads, table.next_states[state, token], state),
        last=torch.where(leads, token, stayed.last.gather(1, parent)),
        key=torch.where(leads, _hash(key, token), key),
        parent_key=torch.where(leads, key, stayed.parent_key.gather(1, parent)),
    )
    return _forget_impossible(beam, score), Step(parent, torch.where(leads, token, -1))


def _hash(key: Tensor, token: Tensor) -> Tensor:
    return (key + token + 1) * MULTIPLIER  # modulo 2^64


def _forget_impossible(beam: Beam, score: Tensor) -> Beam:
    """Let what fills up a beam have no parent, or it would come back as the double of another."""
    return replace(beam, parent_key=torch.where(score == -inf, NO_PARENT, beam.parent_key))


def _hypotheses(beam: Beam, steps: list[Step], table: ScorerTable) -> list[list[Hypothesis]]:
    """Trace each prefix back to the start, with one transfer of tokens and one of scores."""
    place = torch.arange(beam.key.shape[1], device=beam.key.device).expand(beam.key.shape)
    tokens = [torch.full_like(beam.key, -1)]  # (B, K) of each frame, the last first
    for step in reversed(steps):
        tokens.append(step.token.gather(1, place))
        place = step.parent.gather(1, place)
    texts = torch.stack(tokens[::-1], -1).tolist()  # (B, K, U + 1)
    added = beam.added + table.ends[beam.state]
    scores = torch.stack([beam.total + added, beam.total, added], -1).tolist()
    answers = []
    for rows, values in zip(texts, scores, strict=True):
        hypotheses = [
            Hypothesis(
                tokens=tuple(token for token in row if token >= 0),
                score=score,
                ctc_score=ctc_score,
                lm_score=lm_score,
            )
            for row, (score, ctc_score, lm_score) in zip(rows, values, strict=True)
            if score > -inf
        ]
        answers.append(sorted(hypotheses, key=attrgetter("score"), reverse=True))
    return answers
