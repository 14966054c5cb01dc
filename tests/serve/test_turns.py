"""Turns have a little audio before their speech, and their places in the stream."""

import numpy as np
import pytest

from sbkit.runtime.voice_detector import SpeechRules, VoiceDetector
from sbkit.serve.realtime import SpeechTurns, TurnPart
from tests.runtime.told_frames import ToldFrames, is_speech, tell

RATE = 16_000


@pytest.mark.parametrize(("block", "quiet"), [(700, 2.0), (700, 0.2), (200_000, 2.0)])
def test_a_turn_is_from_before_its_speech_to_where_its_end_is_known(
    block: int, quiet: float
) -> None:
    """Where the stream has less before it, it is from its first sample."""
    audio = tell(*is_speech(quiet, 1.0, 1.5, 0.5))
    detector = VoiceDetector(ToldFrames(), SpeechRules(padding=0.0))
    turns, parts = SpeechTurns(detector, silence=0.4, start=100.0), list[TurnPart]()
    for start in range(0, len(audio), block):
        parts += turns.push(audio[start : start + block])
    begins = [place for place, part in enumerate(parts) if part.began is not None]
    first, second = parts[: begins[1]], parts[begins[1] :]
    for turn, began, ended, detected in (
        (first, quiet, quiet + 1.0, quiet + 1.4),
        (second, quiet + 2.5, None, quiet + 3.0),
    ):
        assert turn[0].began == pytest.approx(100 + began)
        assert turn[-1].ended == (ended and pytest.approx(100 + ended))
        start, end = round(max(began - 0.3, 0.0) * RATE), round(detected * RATE)
        assert turn[0].start == 100 * RATE + start
        samples = np.concatenate([part.samples for part in turn])
        assert np.array_equal(samples, audio[start : start + len(samples)])
        # samples that arrived before the end was known are in the turn, too
        assert end <= start + len(samples) <= (end if block > len(audio) else end + 320)
        places = np.cumsum([turn[0].start, *(len(part.samples) for part in turn)])
        assert [part.start for part in turn] == places[:-1].tolist()
