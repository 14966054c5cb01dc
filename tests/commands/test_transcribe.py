"""`sbkit transcribe`: what files it takes, what it prints and writes, and its exit code."""

import io
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import soundfile

from sbkit.base.errors import FILES_FAILED, SbkitError
from sbkit.commands.cli import run
from sbkit.tasks.recognition.predict import Transcriber
from sbkit.tasks.recognition.recordings import find_audio
from sbkit.text.word import Word
from tests.logs.terminal import Terminal
from tests.runtime.bundles import ROOT
from tests.runtime.tones import RATE, speak, tone_transcriber

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def talks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a model that hears tones in the place of any bundle, and go to a folder of talks."""
    _, tokenizer, _ = tone_transcriber(tmp_path)
    monkeypatch.setattr(Transcriber, "load", lambda *_, **__: tone_transcriber(tmp_path)[0])
    (tmp_path / "talks/old").mkdir(parents=True)
    for name, text in {"a.wav": "a fox", "b.flac": "the dog", "old/c.mp3": "lazy dog"}.items():
        soundfile.write(tmp_path / "talks" / name, speak(tokenizer, text), RATE)
    (tmp_path / "talks/notes.txt").write_text("no audio")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(*arguments: str) -> list[str]:
    with find_audio(arguments) as files:
        return [*map(str, files)]


def test_find_audio_lists_files_folders_and_patterns(talks: Path) -> None:
    (talks / "talks/._a.wav").touch()
    assert names("talks") == ["talks/a.wav", "talks/b.flac", "talks/old/c.mp3"]
    assert names("talks/*.txt", "talks/a.wav") == ["talks/notes.txt", "talks/a.wav"]
    assert names(f"{talks}/talks/*/*") == [f"{talks}/talks/old/c.mp3"]
    assert names("talks/**/*.mp3") == ["talks/old/c.mp3"]
    assert names("talks/**.flac") == ["talks/b.flac"]
    assert names("gone.wav") == ["gone.wav"]
    (talks / "[1].wav").touch()
    assert names("[1].wav") == ["[1].wav"]
    (talks / "empty").mkdir()
    for nothing in ("empty", "talks/*.ogg"):
        with pytest.raises(SbkitError, match="has no audio files"):
            names(nothing)


def test_transcribe_reads_standard_input(
    talks: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    content = io.BytesIO((talks / "talks/b.flac").read_bytes())
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=content))
    monkeypatch.setattr(tempfile, "tempdir", str(talks))
    assert run(["transcribe", "model", "-"]) == 0
    assert capsys.readouterr().out == "the dog\n"
    assert not list(talks.glob("tmp*"))


def test_transcribe_reads_raw_samples(
    talks: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    samples, _ = soundfile.read(talks / "talks/b.flac", dtype="int16")
    content = io.BytesIO(samples.astype("<i2").tobytes() + b"\0")  # and half of one more
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=content))
    with pytest.raises(SbkitError, match=r"or give --raw-rate HZ"):
        run(["transcribe", "model", "-"])
    with pytest.raises(SbkitError, match="768000 Hz, but `--raw-rate` declares 16 Hz"):
        run(["transcribe", "model", "-", "--raw-rate", "16"])
    with pytest.raises(SbkitError, match="describes standard input"):
        run(["transcribe", "model", "talks/a.wav", "--raw-rate", str(RATE)])
    content.seek(0)
    assert run(["transcribe", "model", "-", "--raw-rate", str(RATE)]) == 0
    assert capsys.readouterr().out == "the dog\n"


def test_transcribe_prints_good_files_and_reports_bad_ones(talks: Path, capsys: Captured) -> None:
    assert run(["transcribe", "model", "talks/a.wav"]) == 0
    out, error = capsys.readouterr()
    assert (out, error) == ("a fox\n", "running on tones, cpu, fp32\n")
    files = ["gone.wav", "talks/notes.txt", "talks/b.flac", "talks/a.wav"]
    assert run(["transcribe", "model", *files, "--errors", "errors.jsonl"]) == FILES_FAILED
    out, error = capsys.readouterr()
    assert out == "talks/b.flac\tthe dog\ntalks/a.wav\ta fox\n"
    missing, notes, end = error.splitlines()[1:]
    assert (files[0] in missing, files[1] in notes) == (True, True)
    assert end == "2 written, 2 failed; the errors are in errors.jsonl"
    listed = [json.loads(line) for line in (talks / "errors.jsonl").read_text().splitlines()]
    assert listed == [{"file": files[0], "error": missing}, {"file": files[1], "error": notes}]
    assert run(["transcribe", "model", *files[2:]]) == 0
    assert capsys.readouterr().err.splitlines()[1] == "2 written, 0 failed"
    with pytest.raises(FileNotFoundError, match="none/errors"):
        run(["transcribe", "model", *files, "--errors", "none/errors"])


def test_transcribe_shows_progress_unless_quiet(
    talks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for more, says in (([], True), (["--quiet"], False)):
        terminal = Terminal()
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", terminal)
            patched.setenv("TERM", "xterm")
            assert run(["transcribe", "model", "talks/a.wav", *more]) == 0
        assert ("transcribing" in terminal.getvalue()) is says
        assert ("running on" in terminal.getvalue()) is says


def test_transcribe_json_has_words_and_effective(talks: Path, capsys: Captured) -> None:
    (talks / "talks/a.wav").rename("größe.wav")
    assert run(["transcribe", "model", "größe.wav", "--format", "json"]) == 0
    line = capsys.readouterr().out
    result = json.loads(line)
    assert (result["file"], result["text"]) == ("größe.wav", "a fox") and "größe" in line
    assert result["seconds"] == pytest.approx(0.6)
    assert [word["text"] for word in result["words"]] == ["a", "fox"]
    assert result["effective"]["device"] == "cpu"


def fields(value: Any, name: str = "") -> Iterator[str]:
    """Yield the names of all that an object of JSON holds, as `words.text`."""
    if isinstance(value, list):
        for element in value:
            yield from fields(element, name)
    elif isinstance(value, dict):
        for key, element in value.items():
            yield (below := f"{name}.{key}".lstrip("."))
            yield from fields(element, below)


def test_page_lists_every_field_of_json(talks: Path, capsys: Captured) -> None:
    assert run(["transcribe", "model", "talks", "--format", "json"]) == 0
    result = [{*fields(json.loads(line))} for line in capsys.readouterr().out.splitlines()]
    sure = fields({"words": Word("a", 0, 1, confidence=0.5).plain()})
    text = (ROOT / "docs/guide/transcribe.md").read_text("utf-8")
    _, _, table = text.partition("| field of `json` |")
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}
    assert listed == result[0] | {*sure}
    assert result == 3 * result[:1]


def test_transcribe_out_writes_a_file_per_recording(talks: Path, capsys: Captured) -> None:
    for kind in ("srt", "vtt", "tsv", "text", "json"):
        assert run(["transcribe", "model", "talks", "--format", kind, "--out", kind]) == 0
        assert sorted(file.name for file in (talks / kind).iterdir()) == [
            f"{name}.{'txt' if kind == 'text' else kind}" for name in "abc"
        ]
    assert capsys.readouterr().out == ""
    assert (talks / "text/b.txt").read_text() == "the dog\n"
    assert (talks / "vtt/c.vtt").read_text().startswith("WEBVTT\n\n00:00:00.0")


def test_transcribe_parts_are_the_whole(talks: Path, capsys: Captured) -> None:
    for part in ("1/2", "2/2", "4/4"):
        assert run(["transcribe", "model", "talks", "--part", part, "--quiet"]) == 0
    lines = ["talks/a.wav\ta fox", "talks/old/c.mp3\tlazy dog", "talks/b.flac\tthe dog"]
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["talks/?.*", "--format", "tsv"], "prints one recording, but there are 2"),
        (["talks/a.wav", "talks/a.flac", "--out", "here"], "2 of them would be a.txt"),
        (["talks", "--out", "/proc/here"], "`--out` must name a folder that"),
        (["talks", "--part", "3"], "K from 1 to N, such as 3/16, but is 3"),
    ],
)
@pytest.mark.usefixtures("talks")
def test_transcribe_checks_its_output_first(arguments: list[str], says: str) -> None:
    with pytest.raises(SbkitError, match=says):
        run(["transcribe", "model", *arguments])
