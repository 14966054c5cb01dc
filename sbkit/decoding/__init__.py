"""Decoding: from CTC log-probabilities to texts, and words with times and confidences.

A decoder is greedy, or a prefix beam search with language models and hotwords. The attention
decoder of a model may rescore. Only the modules that fit a decoder, on all ranks of a training,
import torch.
"""

from typing import TYPE_CHECKING

from sbkit.base.imports import lazy_names

if TYPE_CHECKING:
    from sbkit.decoding.beam import BeamDecoder as BeamDecoder
    from sbkit.decoding.decoder import AttentionScorer as AttentionScorer
    from sbkit.decoding.decoder import DecoderWeights as DecoderWeights
    from sbkit.decoding.greedy import GreedyDecoder as GreedyDecoder
    from sbkit.decoding.greedy import Hypothesis as Hypothesis
    from sbkit.decoding.prefix_beam import PrefixBeamSearch as PrefixBeamSearch
    from sbkit.decoding.words import WordAligner as WordAligner

__getattr__, __dir__ = lazy_names(
    "sbkit.decoding",
    AttentionScorer="decoder",
    BeamDecoder="beam",
    GreedyDecoder="greedy",
    Hypothesis="greedy",
    PrefixBeamSearch="prefix_beam",
    DecoderWeights="decoder",
    WordAligner="words",
)
