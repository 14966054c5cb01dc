"""Decoding: from CTC log-probabilities to texts, and words with times and confidences.

A decoder is greedy, or a prefix beam search with language models and hotwords, or the best path
through a decoding graph (WFST). The attention decoder of a model may rescore. Only `fit`, which
runs on all ranks of a training, imports torch.
"""

from typing import TYPE_CHECKING

from sbkit.base.imports import lazy_names

if TYPE_CHECKING:
    from sbkit.decoding.attention import AttentionDecoder as AttentionDecoder
    from sbkit.decoding.confidence import WordAligner as WordAligner
    from sbkit.decoding.decoder import BeamDecoder as BeamDecoder
    from sbkit.decoding.decoder import Weights as Weights
    from sbkit.decoding.frames import Hypothesis as Hypothesis
    from sbkit.decoding.greedy import GreedyDecoder as GreedyDecoder
    from sbkit.decoding.language_models import LanguageModels as LanguageModels
    from sbkit.decoding.prefix_beam import PrefixBeamSearch as PrefixBeamSearch

__getattr__ = lazy_names(
    "sbkit.decoding",
    AttentionDecoder="attention",
    BeamDecoder="decoder",
    GreedyDecoder="greedy",
    Hypothesis="frames",
    LanguageModels="language_models",
    PrefixBeamSearch="prefix_beam",
    Weights="decoder",
    WordAligner="confidence",
)
