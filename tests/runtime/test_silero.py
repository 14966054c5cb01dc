"""silero-vad behind the seam of voice activity, where its package is."""

import numpy as np
import pytest

from sbkit.runtime.voice_detector import VoiceDetector

pytest.importorskip("silero_vad", exc_type=ImportError)


def test_it_finds_no_speech_in_noise_and_pieces_give_what_the_whole_does() -> None:
    detector = VoiceDetector.load("silero")
    noise = np.random.default_rng(0).normal(0, 500, 30_000).astype(np.int16)
    assert detector.speech_segments(noise) == []
    expected, _ = detector.model.advance(noise[: 50 * 512], detector.model.start())
    state, events = detector.start(), []
    for first in range(0, 50 * 512, 700):
        before = state.frames
        _, state = detector.push(noise[first : min(50 * 512, first + 700)], state)
        events.append(state.frames - before)
    assert sum(events) == len(expected) == 50
    assert np.allclose(
        state.model[0], detector.model.advance(noise[: 50 * 512], detector.model.start())[1][0]
    )
