"""A conversation from file to file: the recognizer understands the answer."""

import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from shutil import which

import numpy as np
import pytest
import soundfile

from sbkit.audio.io import FULL_SCALE
from sbkit.audio.resample import Signal
from sbkit.base.errors import SbkitError
from sbkit.streaming.session import StreamingRecognizer
from tests.runtime.tones import RATE, silence, speak
from tests.streaming.streaming_tones import streaming_tones
from tools.talk import __main__ as talk


def test_talk_echoes_and_prints_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recognizer, tokenizer, _ = streaming_tones(tmp_path)

    class Tones:
        sample_rate = RATE

        def __init__(self, language: str) -> None:
            assert language == "en"

        def stream(self, text: str) -> Iterator[Signal]:
            yield from np.array_split(speak(tokenizer, text).astype(np.float32) / FULL_SCALE, 3)

    monkeypatch.setattr(StreamingRecognizer, "load", lambda *_: recognizer)
    monkeypatch.setattr(talk, "Espeak", Tones)
    question, answer = tmp_path / "question.wav", tmp_path / "answer.wav"
    soundfile.write(question, np.concatenate([speak(tokenizer, "the dog"), silence(2.0)]), RATE)
    options = [str(question), "--pace", "20", "--out", str(answer)]
    monkeypatch.setattr(sys, "argv", ["talk", "my-live-model", *options])
    talk.main()
    text, answered, trace, again = capsys.readouterr().out.splitlines()
    assert (text, answered, again) == ("> the dog", "< the dog", "recognized again: the dog")
    stages = r"  endpoint -?\d+ \+ recognizer \d+ \+ answer \d+ \+ sound \d+ = -?\d+ ms"
    assert re.fullmatch(stages, trace)


def test_talk_with_a_voice_needs_no_espeak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(StreamingRecognizer, "load", nullcontext)
    monkeypatch.setattr(sys, "argv", ["talk", "my-live-model", "--voice", "no-such-voice"])
    with pytest.raises(SbkitError, match="no-such-voice"):
        talk.main()


@pytest.mark.skipif(which("espeak-ng") is None, reason="needs espeak-ng")
def test_espeak_speaks() -> None:
    (sound,) = talk.Espeak("en").stream("- hello")
    assert 0.3 < len(sound) / talk.Espeak.sample_rate < 3.0
    assert 0.05 < np.abs(sound).max() <= 1.0
