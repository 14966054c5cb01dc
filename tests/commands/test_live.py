"""`sbkit transcribe --live`: what it takes, and what it prints."""

import io
import json
import signal
import sys
import time
import wave
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import soundfile

from sbkit.audio.containers import AudioError
from sbkit.audio.io import Samples
from sbkit.base.errors import DeviceError, SbkitError
from sbkit.commands.cli import run
from sbkit.export.export import export_run
from sbkit.tasks.asr.live import Display, audio_blocks
from sbkit.tasks.asr.predict import Transcriber
from sbkit.tasks.asr.session import Event, Final, Session, StreamingRecognizer
from tests.runtime.bundles import ROOT, make_live_run
from tests.runtime.tones import RATE, finals, silence, speak, streaming_tones
from tests.runtime.tones import run as run_session
from tests.test_readme import blocks

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a model that hears tones in the place of any bundle, and say two sentences."""
    _, tokenizer, _ = streaming_tones(tmp_path)
    monkeypatch.setattr(StreamingRecognizer, "load", lambda *_, **__: streaming_tones(tmp_path)[0])
    parts = [speak(tokenizer, "the dog"), silence(1.5), speak(tokenizer, "a quick fox")]
    soundfile.write(tmp_path / "talk.flac", np.concatenate(parts), RATE)
    return tmp_path / "talk.flac"


def live(*arguments: object) -> int:
    return run(["transcribe", "model", "--live", *map(str, arguments)])


def test_listen_prints_final_and_partial_text(talk: Path, capsys: Captured) -> None:
    assert live(talk) == 0
    text = capsys.readouterr()
    assert text.out == "the dog\na quick fox\n"
    assert text.err.splitlines()[-2:] == ["a quick", "a quick fox"]
    assert live(talk, "--quiet") == 0
    assert capsys.readouterr().err == ""
    assert live(talk, "--format", "json") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [event["event"] for event in events if event["event"] != "partial"]
    assert kinds == ["endpoint", "final", "final"]
    assert [word["text"] for word in events[-1]["words"]] == ["a", "quick", "fox"]


def test_truncated_file_is_kept_if_asked(talk: Path, capsys: Captured) -> None:
    content = talk.read_bytes()
    talk.write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises(AudioError):
        live(talk)
    capsys.readouterr()
    assert live(talk, "--truncated", "keep") == 0
    assert capsys.readouterr().out.startswith("the dog\n")


def piped(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    pipe = io.BufferedReader(cast("io.RawIOBase", io.BytesIO(content)))
    monkeypatch.setattr(pipe, "seekable", lambda: False, raising=False)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=pipe))


def wav_of(subtype: str, format: str) -> bytes:
    soundfile.write(content := io.BytesIO(), np.zeros(RATE), RATE, subtype, format=format)
    return content.getvalue()


def test_live_reads_stdin(talk: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    samples, _ = soundfile.read(talk, dtype="int16")
    twice = np.repeat(samples, 2)  # at twice the rate
    header = io.BytesIO()
    with wave.open(header, "wb") as file:
        file.setparams((2, 2, RATE, 0, "NONE", ""))
        file.writeframes(twice.astype("<i2").tobytes())  # the same on both channels
    endless = bytearray(header.getvalue())
    assert endless[36:40] == b"data"
    endless[4:8] = (36).to_bytes(4, "little")
    # A writer of a stream does not know the length.
    endless_wavs = [
        bytes(endless[:40]) + size.to_bytes(4, "little") + bytes(endless[44:])
        for size in (0, 0x7FFFF000, 0xFFFFFFFF)
    ]
    extensible = io.BytesIO()
    soundfile.write(extensible, np.stack([twice] * 2, 1), 2 * RATE, format="WAVEX")
    for options, content in (
        (["--raw-rate", RATE], samples.astype("<i2").tobytes() + b"\0"),
        (["--raw-rate", 2 * RATE], twice.astype("<i2").tobytes()),
        ([], header.getvalue()),
        *(([], content) for content in endless_wavs),
        ([], extensible.getvalue() + b"LIST\4\0\0\0JUNK"),  # which is no sound
        ([], talk.read_bytes()),  # of any other format
    ):
        piped(monkeypatch, content)
        assert live("-", *options) == 0
        assert capsys.readouterr().out == "the dog\na quick fox\n"
    piped(monkeypatch, samples.tobytes())
    assert len(next(iter(audio_blocks("-", RATE, raw_rate=RATE)))) <= RATE / 10
    has_16_bits, ends = "must have 16 bits", "ends in its header"
    for content, says in (
        (wav_of("PCM_24", "WAV"), has_16_bits),
        (wav_of("FLOAT", "WAVEX"), has_16_bits),
        (wav_of("PCM_U8", "WAV")[:20], ends),
        (endless_wavs[0][:42], ends),
        (endless_wavs[0][:36] + b"JUNK" + 4 * b"\xff" + endless_wavs[0][36:], ends),
    ):
        piped(monkeypatch, content)
        with pytest.raises(SbkitError, match=f"WAV on standard input {says}"):
            live("-")


class Microphone:
    """A microphone that has recorded all its blocks when it is opened."""

    def __init__(self, samples: Samples, callback: Callable[[bytes], object]) -> None:
        self.blocks = np.array_split(samples, 50)
        self.callback = callback

    def __enter__(self) -> None:
        for block in self.blocks:
            self.callback(block.tobytes())

    def __exit__(self, *_: object) -> None:
        pass


def connect(monkeypatch: pytest.MonkeyPatch, open_stream: Callable[..., Microphone]) -> None:
    package = SimpleNamespace(RawInputStream=open_stream, PortAudioError=LookupError)
    monkeypatch.setitem(sys.modules, "sounddevice", package)


def test_ctrl_c_while_a_block_is_decoded_loses_no_word(
    talk: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    samples, _ = soundfile.read(talk, dtype="int16")
    connect(monkeypatch, lambda callback, **_: Microphone(samples, callback))
    push = Session.push
    pushed: list[int] = []

    def interrupted_push(session: Session, block: Samples) -> list[Event]:
        pushed.append(len(block))
        if len(pushed) == 3:
            signal.raise_signal(signal.SIGINT)
        return push(session, block)

    monkeypatch.setattr(Session, "push", interrupted_push)
    assert live("mic") == 0
    assert capsys.readouterr().out == "the dog\na quick fox\n"
    assert sum(pushed) == len(samples)


def test_second_ctrl_c_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, lambda callback, **_: Microphone(np.zeros(RATE, np.int16), callback))
    previous = signal.getsignal(signal.SIGINT)
    blocks = iter(audio_blocks("mic", RATE))
    next(blocks)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert len(list(blocks)) == 49
    assert signal.getsignal(signal.SIGINT) is previous


def test_missing_microphone_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_stream(**_: object) -> Microphone:
        raise LookupError("Error querying device -1")

    connect(monkeypatch, open_stream)
    with pytest.raises(DeviceError, match="cannot record at .* Hz .Error querying device -1"):
        next(iter(audio_blocks("mic", RATE)))


def test_audio_blocks_paces_a_file(talk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    come = [(len(block), clock[0]) for block in audio_blocks(str(talk), RATE, pace=2.0)]
    ends = np.cumsum([size for size, _ in come]) / RATE
    assert [at for _, at in come] == pytest.approx(ends / 2)
    assert max(size for size, _ in come) < RATE / 2  # a block of FLAC


@pytest.mark.parametrize("as_json", [False, True])
def test_display_flushes_each_event(as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe))
    show = Display(as_json=as_json, quiet=False, partial=io.StringIO())
    show([Final(seconds=2.0, text="a dog", start=0.0, end=2.0, words=())])
    assert b"a dog" in pipe.getvalue()


def test_listen_refuses_unsupported_options(talk: Path) -> None:
    for arguments, match in (
        (["a.wav", "b.wav"], "takes one FILE"),
        (["a.wav", "--format", "srt"], "1 with srt"),
        (["a.wav", "--out", "there"], "--out"),
        (["a.wav", "--share", "1/2"], "--share"),
        (["-", "--raw-rate", "16"], "but standard input declares 16 Hz"),
        (["gone.wav"], "does not exist"),
    ):
        with pytest.raises(SbkitError, match=match):
            live(*arguments)


def test_streaming_bundle_equals_its_whole_clip_transcripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    export_run(make_live_run(tmp_path / "run"), tmp_path / "my-live-model")
    random = np.random.default_rng(0)
    clips = [(3000 * random.normal(size=size)).astype(np.int16) for size in (300, 20_000, 60_123)]
    with Transcriber.load(tmp_path / "my-live-model") as transcriber:
        expected = [transcriber.transcribe(clip, RATE) for clip in clips]
    assert any(transcript.text for transcript in expected)
    with StreamingRecognizer.load(tmp_path / "my-live-model") as recognizer:
        for clip, transcript in zip(clips, expected, strict=True):
            spoken = finals(run_session(recognizer, np.array_split(clip, 7)))
            assert "".join(final.text for final in spoken) == transcript.text
            assert [word for final in spoken for word in final.words] == [*transcript.words]
    page = (ROOT / "docs/guide/live.md").read_text("utf-8")
    monkeypatch.chdir(tmp_path)
    screen: dict[str, Any] = {"microphone": np.array_split(clips[1], 3), "callers": clips}
    exec(blocks(page, "python")[0], screen)
    assert expected[1].text in capsys.readouterr().out
    assert len(screen["events"]) == 3
