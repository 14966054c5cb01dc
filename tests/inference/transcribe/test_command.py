"""`sbkit transcribe`: what files it takes, what it prints and writes, and its exit code."""

import io
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import soundfile

from sbkit.base.errors import BAD_INPUT, SbkitError
from sbkit.cli import run
from sbkit.inference.transcribe.command import find_audio
from sbkit.inference.transcribe.transcriber import Transcriber
from tests.inference.tones import RATE, speak, tone_transcriber

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
    with find_audio(arguments) as found:
        return [str(each) for each in found]


def test_files_folders_and_patterns(talks: Path) -> None:
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
        with pytest.raises(SbkitError, match="has none"):
            names(nothing)


def test_standard_input(talks: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    content = io.BytesIO((talks / "talks/b.flac").read_bytes())
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=content))
    monkeypatch.setattr(tempfile, "tempdir", str(talks))
    assert run(["transcribe", "model", "-"]) == 0
    assert capsys.readouterr().out == "the dog\n"
    assert not list(talks.glob("tmp*"))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"no audio")))
    assert run(["transcribe", "model", "-"]) == BAD_INPUT
    assert (
        capsys.readouterr()
        .err.splitlines()[1]
        .partition("stdin")[2]
        .startswith(" must be audio (wav")
    )


def test_all_that_can_be_is_printed_and_the_code_tells_of_the_rest(
    talks: Path, capsys: Captured
) -> None:
    assert run(["transcribe", "model", "talks/a.wav"]) == 0
    out, error = capsys.readouterr()
    assert (out, error) == ("a fox\n", "running on tones, cpu, fp32\n")
    files = ["gone.wav", "talks/notes.txt", "talks/b.flac", "talks/a.wav"]
    assert run(["transcribe", "model", *files]) == BAD_INPUT
    out, error = capsys.readouterr()
    assert out == "talks/b.flac\tthe dog\ntalks/a.wav\ta fox\n"
    gone, notes = error.splitlines()[1:]
    assert (files[0] in gone, files[1] in notes) == (True, True)


def test_json_has_the_words_and_what_it_ran_on(talks: Path, capsys: Captured) -> None:
    assert run(["transcribe", "model", "talks/a.wav", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["file"], found["text"]) == ("talks/a.wav", "a fox")
    assert found["seconds"] == pytest.approx(0.6)
    assert [each["text"] for each in found["words"]] == ["a", "fox"]
    assert found["effective"]["device"] == "cpu"


def test_each_gets_a_file_of_its_own(talks: Path, capsys: Captured) -> None:
    for kind in ("srt", "vtt", "tsv", "text", "txt", "json"):
        assert run(["transcribe", "model", "talks", "--format", kind, "--out", kind]) == 0
        assert sorted(each.name for each in (talks / kind).iterdir()) == [
            f"{name}.{'txt' if kind == 'text' else kind}" for name in "abc"
        ]
    assert capsys.readouterr().out == ""
    assert (talks / "text/b.txt").read_text() == (talks / "txt/b.txt").read_text() == "the dog\n"
    assert (talks / "vtt/c.vtt").read_text().startswith("WEBVTT\n\n00:00:00.0")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["talks", "--format", "tsv"], "must be of one recording, but there are 3"),
        (["talks/a.wav", "talks/a.wav", "--out", "here"], "must have different names"),
        (["talks", "--out", "/proc/here"], "`--out` must name a folder to write to"),
    ],
)
@pytest.mark.usefixtures("talks")
def test_what_cannot_be_written_is_told_first(arguments: list[str], says: str) -> None:
    with pytest.raises(SbkitError, match=says):
        run(["transcribe", "model", *arguments])
