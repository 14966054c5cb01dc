"""The best path of an utterance through a word graph.

Legend: U frames of 40 ms, V vocabulary.
"""
from itertools import groupby
from typing import Any

import numpy as np

from sbkit.decoding.frames import BeamSettings, LogProbs, make_frames
from sbkit.decoding.hypothesis import Hypothesis
from sbkit.decoding.word_graph import require_package

BEAM, MOST_ACTIVE = 16.0, 3000


class GraphSearch:
    def __init__(self, *, graph: Any, settings: BeamSettings) -> None:
        kaldi = require_package("kaldi_decoder")
        self._graph, self._settings, self._kaldi = graph, settings, kaldi
        self._decoder = kaldi.FasterDecoder(graph, kaldi.FasterDecoderOptions(beam=BEAM, max_active=MOST_ACTIVE))

    def decode(self, log_probs: LogProbs) -> list[Hypothesis]:
        d = self._decoder
        d.decode(self._kaldi.DecodableCtc(np.ascontiguousarray(log_probs, dtype=np.float32)))
        found, path = d.get_best_path()
        _, labels, _, cost = require_package("kaldifst").get_linear_symbol_sequence(path)
        blank = self._settings.blank
        tokens = tuple(l - 1 for l, _ in groupby(labels) if l != blank + 1)
        return [Hypothesis(tokens=tokens, score=-(cost.value1 + cost.value2), ctc_score=-cost.value2, lm_score=-cost.value1)], found, d.reached_final()
