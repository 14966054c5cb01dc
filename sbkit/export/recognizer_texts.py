"""The texts of a recognizer, by which its formats are compared with the trained model."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sbkit.audio.io import FULL_SCALE
from sbkit.base.arrays import Array, Float32s
from sbkit.decoding.greedy import best_tokens
from sbkit.decoding.word_times import GREEDY
from sbkit.tasks.asr.bundle import AsrBundle

# For a decoder with its own tokens, the log-probabilities of this text are compared in every clip.
PARITY_TEXT = "1 2 3 4 5 6 7 8"


def best_path_texts(
    bundle: AsrBundle[Any], clips: Sequence[Float32s], log_probs: Sequence[Array]
) -> list[str]:
    """Decode CTC's log-probabilities (U, V) of clips greedily."""
    best = (best_tokens(frames, bundle.blank) for frames in log_probs)
    return [bundle.tokenizer.decode(tokens) for tokens in best]


def greedy_texts(
    bundle: AsrBundle[Any], clips: Sequence[Float32s], outputs: Sequence[Array]
) -> list[str]:
    """Transcribe clips between -1 and 1 greedily, with the bundle's own decoder."""
    return bundle.with_decoder(GREEDY).transcribe(
        [np.rint(clip * FULL_SCALE).astype(np.int16) for clip in clips]
    )


def respell(bundle: AsrBundle[Any], text: str) -> str:
    """Normalize a text, and spell it with the bundle's tokens."""
    return bundle.tokenizer.decode(bundle.tokenizer.encode(bundle.normalizer()(text)))
