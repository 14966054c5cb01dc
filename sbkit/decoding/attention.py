"""What the attention decoder of a model says of token sequences, for one utterance at a time.

Legend: B utterances, N sequences, L tokens, U frames of 40 ms, D model width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sbkit.decoding.hypothesis import Hypothesis
from sbkit.models.asr import AsrModel

Tokens = tuple[int, ...]


class AttentionDecoder:
    """Score token sequences against the frames of one utterance, each sequence once.

    model: with a decoder and `seq_lin`; states: (U, D) of its encoder.
    """

    def __init__(self, *, model: AsrModel, states: Tensor) -> None:
        self._model, self._states = model, states.float()
        self._eos = model.vocabulary.eos
        self._known = dict[Tokens, float]()

    def score(self, sequences: Sequence[Tokens]) -> list[float]:
        """Return ln p(tokens and their end | audio) of each sequence."""
        new = [each for each in dict.fromkeys(sequences) if each not in self._known]
        if new:
            self._known |= zip(new, self._score(new), strict=True)
        return [self._known[each] for each in sequences]

    def next_log_probs(self, prefixes: Sequence[Tokens]) -> npt.NDArray[np.float64]:
        """Score what may follow prefixes of one length, the end too: -> (N, V)."""
        last = self._log_probs(torch.tensor(prefixes, dtype=torch.long).reshape(len(prefixes), -1))[
            :, -1
        ]
        return last.double().cpu().numpy()

    def _score(self, sequences: Sequence[Tokens]) -> list[float]:
        longest = max(map(len, sequences))
        tokens = torch.full((len(sequences), longest), self._eos)
        for row, each in zip(tokens, sequences, strict=True):
            row[: len(each)] = torch.tensor(each, dtype=torch.long)
        wanted = torch.nn.functional.pad(tokens, (0, 1), value=self._eos)  # (N, L + 1)
        log_probs = self._log_probs(tokens)
        of_each = log_probs.gather(2, wanted.to(log_probs.device).unsqueeze(2)).squeeze(2)
        until = torch.tensor([len(each) for each in sequences]).unsqueeze(1)
        counted = torch.arange(longest + 1) <= until  # the tokens and one end
        total = (of_each.double() * counted.to(of_each.device)).sum(1)
        return [float(each) for each in total.tolist()]

    @torch.no_grad()
    def _log_probs(self, tokens: Tensor) -> Tensor:
        states = self._states.expand(len(tokens), *self._states.shape)
        lengths = torch.full((len(tokens),), states.shape[1])
        return self._model.decoder_log_probs(tokens.to(states.device), states, lengths)


def attend(model: AsrModel, states: Tensor, frame_lengths: Tensor) -> list[AttentionDecoder]:
    """Make a decoder for each utterance of a batch: (B, U, D), (B,)."""
    pairs = zip(states, frame_lengths.tolist(), strict=True)
    return [AttentionDecoder(model=model, states=row[:frames]) for row, frames in pairs]


def rescore(
    hypotheses: Sequence[Hypothesis], attention: AttentionDecoder, weight: float
) -> list[Hypothesis]:
    """Add the attention decoder's weighted scores, and return the best hypothesis first.

    Source: Watanabe et al. 2017 (hybrid CTC/attention), section "rescoring".
    """
    if not hypotheses:
        return []
    scores = attention.score([each.tokens for each in hypotheses])
    added = [
        replace(each, score=each.score + weight * score, attention_score=weight * score)
        for each, score in zip(hypotheses, scores, strict=True)
    ]
    return sorted(added, key=lambda each: each.score, reverse=True)
