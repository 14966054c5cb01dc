"""The attention decoder of a model in torch, for each utterance of a batch.

Legend: B utterances, N sequences, L tokens, U frames of 40 ms, D model width, V vocabulary.
"""

from functools import partial

import torch
from torch import Tensor

from sbkit.decoding.attention import AttentionDecoder, Counts, Floats
from sbkit.models.asr import AsrModel


def attend(model: AsrModel, states: Tensor, frame_lengths: Tensor) -> list[AttentionDecoder]:
    """Make a decoder for each utterance of a batch: (B, U, D), (B,)."""
    pairs = zip(states, frame_lengths.tolist(), strict=True)
    # Copies: a view would keep the states of the whole batch as long as one utterance.
    scores = (partial(score_tokens, model, row[:frames].clone()) for row, frames in pairs)
    return [AttentionDecoder(log_probs=each, eos=model.vocabulary.eos) for each in scores]


@torch.no_grad()
def score_tokens(model: AsrModel, states: Tensor, tokens: Counts) -> Floats:
    """Score every token after each prefix of sequences: (U, D), (N, L) -> (N, L + 1, V)."""
    states = states.float().expand(len(tokens), *states.shape)
    lengths = torch.full((len(tokens),), states.shape[1])
    scored = model.decoder_log_probs(torch.from_numpy(tokens).to(states.device), states, lengths)
    found: Floats = scored.double().cpu().numpy()
    return found
