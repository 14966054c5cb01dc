"""Voice activity: segments do not depend on the size of blocks, and follow the rules."""

from typing import Any

import numpy as np
import pytest

from sbkit.audio.io import Samples
from sbkit.tasks.vad.predict import SpeechEvent, SpeechRules, VoiceDetector
from tests.runtime.scripted_speech import ScriptedSpeech, is_speech, script

BARE = SpeechRules(onset=0.5, offset=0.35, shortest=0.1, hang_over=0.3, padding=0.0)


def find(audio: Samples, **rules: float) -> list[tuple[float, float]]:
    detector = VoiceDetector(ScriptedSpeech(), SpeechRules(**{**vars(BARE), **rules}))
    return [(round(start, 3), round(end, 3)) for start, end in detector.speech_segments(audio)]


@pytest.mark.parametrize(
    ("runs", "rules", "expected"),
    [
        ((1.0, 1.0, 1.0), {}, [(1.0, 2.0)]),
        ((1.0, 1.0, 0.2, 1.0, 1.0), {}, [(1.0, 3.2)]),  # a pause that is shorter than the hang-over
        ((1.0, 1.0, 0.4, 1.0, 1.0), {}, [(1.0, 2.0), (2.4, 3.4)]),
        ((1.0, 0.08, 1.0), {}, []),  # a click
        ((1.0, 0.08, 1.0), {"shortest": 0.06}, [(1.0, 1.08)]),
        ((1.0, 1.0, 1.0), {"padding": 0.2}, [(0.8, 2.2)]),
        ((0.1, 1.0, 0.4, 1.0, 0.1), {"padding": 0.3}, [(0.0, 1.4), (1.4, 2.6)]),
        ((1.0,), {}, []),
        ((0.0, 1.0), {}, [(0.0, 1.0)]),  # speech up to the last sample
    ],
)
def test_speech_rules_turn_probabilities_into_segments(
    runs: tuple[float, ...], rules: dict[str, float], expected: list[tuple[float, float]]
) -> None:
    assert find(script(*is_speech(*runs)), **rules) == expected


class LateFrames(ScriptedSpeech):
    """A model whose output lags four frames behind the audio."""

    delay = 4

    def start(self) -> Any:
        return np.zeros(self.delay)

    def advance(self, samples: Samples, state: Any) -> tuple[Any, Any]:
        frames = np.concatenate([state, super().advance(samples, 0)[0]])
        return frames[: -self.delay], frames[-self.delay :]


def test_voice_detector_corrects_the_delay_of_its_model() -> None:
    detector = VoiceDetector(LateFrames(), BARE)
    events, _ = detector.push(script(*is_speech(1, 1, 1)), detector.start())
    assert [event.kind for event in events] == ["started", "stopped"]
    assert [event.seconds for event in events] == pytest.approx([1.0, 2.0])
    assert [event.detected for event in events] == pytest.approx([1 + 0.1 + 0.08, 2 + 0.3 + 0.08])


def test_speech_begins_at_the_onset_and_continues_above_the_offset() -> None:
    audio = script((1, 0.0), (1, 0.4), (1, 0.6), (1, 0.4), (1, 0.3))
    assert find(audio) == [(2.0, 4.0)]
    assert find(audio, onset=0.3) == [(1.0, 4.0)]
    assert find(audio, onset=0.7) == []


def test_voice_detector_events_do_not_depend_on_block_size() -> None:
    random = np.random.default_rng(0)
    levels = np.repeat(random.random(300), random.integers(1, 20, 300))
    audio = np.repeat((32767 * levels).astype(np.int16), 320)[:-77]
    detector = VoiceDetector(ScriptedSpeech())
    expected, end = detector.push(audio[None] / np.float32(32768), detector.start())  # (1, S)
    assert len(expected) > 20
    for size in (7, 100, 320, 5000):
        events, state = list[SpeechEvent](), detector.start()
        for first in range(0, len(audio), size):
            new_events, state = detector.push(audio[first : first + size], state)
            events += new_events
        assert events == expected and detector.finish(state) == detector.finish(end)


def test_speech_state_can_be_continued_twice() -> None:
    detector = VoiceDetector(ScriptedSpeech(), BARE)
    events, state = detector.push(script((1, 0.0), (1, 1.0)), detector.start())
    assert events == [SpeechEvent("started", 1.0, 1.1)]
    stopped, _ = detector.push(script((1, 0.0)), state)
    assert stopped == [SpeechEvent("stopped", 2.0, 2.3)]
    assert detector.push(script((1, 0.0)), state)[0] == stopped
    assert detector.finish(state) == [SpeechEvent("stopped", 2.0, 2.0)]


def test_silero_finds_no_speech_in_noise_and_blocks_equal_the_whole() -> None:
    pytest.importorskip("silero_vad", exc_type=ImportError)
    detector = VoiceDetector.load("silero")
    noise = np.random.default_rng(0).normal(0, 500, 30_000).astype(np.int16)
    assert detector.speech_segments(noise) == []
    whole = noise[: 50 * 512]
    probabilities, (recurrent, _) = detector.model.advance(whole, detector.model.start())
    state = detector.start()
    for first in range(0, len(whole), 700):
        _, state = detector.push(whole[first : first + 700], state)
    assert state.frames == len(probabilities) == 50
    assert np.allclose(state.model[0], recurrent)
