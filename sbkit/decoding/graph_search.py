"""The best path of an utterance through a word graph.

Legend: U frames of 40 ms, V vocabulary.
"""

from itertools import groupby
from typing import Any

import numpy as np

from sbkit.base.optional import require_package
from sbkit.decoding.frames import BeamSettings, LogProbs, check_log_probs
from sbkit.decoding.frames import Hypothesis

BEAM, MOST_ACTIVE = 16.0, 3000  # cost, states of a frame; sherpa-onnx has the same


class GraphSearch:
    """Find the best path through a graph, as `make_graph` makes it.

    The score of CTC is that of one alignment. Where the beam has lost every path that ends with a
    word, the best one that does not is taken (none of the 120 clips of the default corpus's dev and
    test set; sherpa-onnx says nothing then). Raises SbkitError where kaldi-decoder is missing.
    """

    def __init__(self, *, graph: Any, settings: BeamSettings) -> None:
        self._fst, self._kaldi = (
            require_package("kaldifst", extra="graph"),
            require_package("kaldi_decoder", extra="graph"),
        )
        options = self._kaldi.FasterDecoderOptions(beam=BEAM, max_active=MOST_ACTIVE)
        self.graph, self._settings = graph, settings  # the decoder refers to the graph, unowned
        self._decoder = self._kaldi.FasterDecoder(graph, options)

    def decode(self, log_probs: LogProbs) -> list[Hypothesis]:
        """Return the best hypothesis of natural log-probabilities (U, V), one alone."""
        check_log_probs(log_probs, self._settings)
        if not len(log_probs):
            return [Hypothesis(tokens=(), score=0.0, ctc_score=0.0, lm_score=0.0)]
        rows = np.ascontiguousarray(log_probs, np.float32)
        self._decoder.decode(self._kaldi.DecodableCtc(rows))
        _, path = self._decoder.get_best_path()
        _, labels, _, cost = self._fst.get_linear_symbol_sequence(path)
        heard = (label - 1 for label, _ in groupby(labels))
        ctc_score, lm_score = -float(cost.value2), -float(cost.value1)
        return [
            Hypothesis(
                tokens=tuple(token for token in heard if token != self._settings.blank),
                score=ctc_score + lm_score,
                ctc_score=ctc_score,
                lm_score=lm_score,
            )
        ]
