"""`sbkit transcribe`: what files it takes, what it prints and writes, and its exit code."""

import errno
import io
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import soundfile

from sbkit.base.checksums import write_checksums
from sbkit.base.errors import PARTLY_DONE, SbkitError
from sbkit.base.files import task_lock
from sbkit.commands.cli import build_parser, run
from sbkit.tasks.asr import commands
from sbkit.tasks.asr.commands import NO_ENTRY, TEXT_OPTIONS, Entry, assign_names
from sbkit.tasks.asr.predict import Transcriber
from sbkit.tasks.asr.recordings import find_audio
from sbkit.text.recognized_word import Word
from tests.logs.terminal import Terminal
from tests.runtime.bundles import ROOT
from tests.runtime.tones import RATE, speak, tone_transcriber
from tests.shortage import refusing

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
    with refusing("tempfile.mkdtemp", OSError()), find_audio(arguments) as files:
        return [*map(str, files)]


def test_find_audio_lists_files_folders_and_patterns(talks: Path) -> None:
    assert names("talks/*.txt", "talks/a.wav") == ["talks/notes.txt", "talks/a.wav"]
    assert names("talks/**.flac") == ["talks/b.flac"]
    assert names("gone.wav") == ["gone.wav"]
    (talks / "[1].wav").touch()
    assert names("[1].wav") == ["[1].wav"]
    (talks / "empty").mkdir()
    for nothing in ("empty", "talks/*.ogg"):
        with pytest.raises(SbkitError, match="has no audio files"):
            names(nothing)


ALL = ["talks/a.wav", "talks/b.flac", "talks/old/c.mp3", "talks/zlink/d.m4b"]
SKIPPED = "2 hidden files, 2 of unknown endings (.txt, none)"


@pytest.mark.parametrize(
    ("argument", "found", "skipped"),
    [
        ("talks", ALL, SKIPPED),
        ("talks/**", ALL, SKIPPED),
        ("talks/**/**/[abc].*", ALL[:3], "1 hidden file"),  # the folder .git
        ("talks/**/*.wav", ALL[:1], "2 hidden files"),
        ("*/*/?.m[4p]?", ALL[2:], "1 hidden file"),
        ("talks/old/again/old/*.mp3", ["talks/old/again/old/c.mp3"], ""),
    ],
)
def test_links_are_followed_once_and_what_is_skipped_is_counted(
    talks: Path, caplog: pytest.LogCaptureFixture, argument: str, found: list[str], skipped: str
) -> None:
    for folder in ("elsewhere", "talks/.git"):
        (talks / folder).mkdir()
    for name in ("elsewhere/d.m4b", "talks/._a.wav", "talks/.git/g.wav", "talks/README"):
        (talks / name).touch()
    for link, to in {"zlink": "../elsewhere", "again": "old", "old/again": "..", "o": "."}.items():
        (talks / "talks" / link).symlink_to(to)
    caplog.set_level("INFO")
    assert names(argument) == found
    assert "".join(caplog.messages).partition("skipped ")[2] == skipped


def test_truncated_file_is_refused_unless_it_is_to_be_kept(talks: Path, capsys: Captured) -> None:
    content = (talks / "talks/a.wav").read_bytes()
    (talks / "cut.wav").write_bytes(content[: len(content) // 2])
    assert run(["transcribe", "model", "cut.wav", "--truncated", "refuse"]) == PARTLY_DONE
    text = capsys.readouterr()
    assert text.out == "" and "cut.wav" in text.err
    assert run(["transcribe", "model", "cut.wav", "--truncated", "keep"]) == 0
    assert capsys.readouterr().out == "a f\n"


def test_stdin_is_transcribed(
    talks: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    content = io.BytesIO((talks / "talks/b.flac").read_bytes())
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=content))
    monkeypatch.setattr(tempfile, "tempdir", str(talks))
    assert run(["transcribe", "model", "-"]) == 0
    assert capsys.readouterr().out == "the dog\n"
    assert not list(talks.glob("tmp*"))


def test_raw_audio_is_read(talks: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    samples, _ = soundfile.read(talks / "talks/b.flac", dtype="int16")
    content = io.BytesIO(samples.astype("<i2").tobytes() + b"\0")  # and half of one more
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=content))
    with pytest.raises(SbkitError, match="give --raw-rate HZ"):
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
    assert run(["transcribe", "model", *files, "--errors", "errors.jsonl"]) == PARTLY_DONE
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


def test_progress_is_shown_unless_quiet(talks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for more, says in (([], True), (["--quiet"], False)):
        terminal = Terminal()
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", terminal)
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


def test_speakers_of_a_call_are_merged_on_one_time_line(talks: Path, capsys: Captured) -> None:
    """The second one agrees while the first one talks, and answers in a pause."""
    _, tokenizer, _ = tone_transcriber(talks)
    spoken = {0: [(0.0, "the quick fox"), (3.5, "a dog")], 1: [(0.7, "a"), (2.0, "lazy dog")]}
    call = np.zeros((5 * RATE, 2), np.int16)
    for channel, parts in spoken.items():
        for start, text in parts:
            samples = speak(tokenizer, text)
            first = round(start * RATE)
            call[first : first + len(samples), channel] = samples
    soundfile.write("call.flac", call, RATE)
    command = ["transcribe", "model", "call.flac", "--channel", "each", "--format"]

    def printed(format: str) -> str:
        assert run([*command, format]) == 0
        return capsys.readouterr().out

    assert printed("text") == "1: the quick fox\n2: a\n2: lazy dog\n1: a dog\n"
    result = json.loads(printed("json"))
    words = [(word["channel"], word["text"]) for word in result["words"]]
    assert words == [
        *[(1, "the"), (1, "quick"), (2, "a"), (1, "fox")],
        *[(2, "lazy"), (2, "dog"), (1, "a"), (1, "dog")],
    ]
    starts = [word["start"] for word in result["words"]]
    assert (starts, result["seconds"]) == (sorted(starts), 5)
    assert printed("tsv").splitlines()[0] == "start\tend\tword\tchannel"
    subtitles = printed("srt").strip().split("\n\n")
    assert [block.splitlines()[2] for block in subtitles] == [
        *("1: the quick fox", "2: a", "2: lazy dog", "1: a dog")
    ]
    assert run(["transcribe", "model", "call.flac", "talks/a.wav", "--channel=each"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (len(lines), lines[-1]) == (5, "talks/a.wav\t1: a fox")
    soundfile.write("call.flac", np.zeros((RATE, 8)), RATE)
    assert printed("text") == "\n"
    soundfile.write("call.wav", np.zeros((RATE, 9)), RATE)
    assert run(["transcribe", "model", "call.wav", "--channel=each"]) == PARTLY_DONE
    assert "call.wav has 9 channels, but at most 8 are transcribed" in capsys.readouterr().err


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
    sure = fields({"words": Word("a", 0, 1, confidence=0.5, channel=1).plain()})
    text = (ROOT / "docs/guide/transcribe.md").read_text("utf-8")
    _, _, table = text.partition("| field of `json` |")
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}
    assert listed == result[0] | {*sure}
    assert result == 3 * result[:1]


def results(folder: Path) -> list[str]:
    files = [file for file in folder.rglob("*.*") if not file.match("sbkit-results*.jsonl")]
    return sorted(str(file.relative_to(folder)) for file in files)


def test_transcribe_out_writes_a_file_per_recording(talks: Path, capsys: Captured) -> None:
    for kind in ("srt", "vtt", "tsv", "text", "json"):
        assert run(["transcribe", "model", "talks", "--format", kind, "--out", kind]) == 0
        ending = "txt" if kind == "text" else kind
        assert results(talks / kind) == [f"{name}.{ending}" for name in ("a", "b", "old/c")]
    assert capsys.readouterr().out == ""
    assert (talks / "text/b.txt").read_text() == "the dog\n"
    assert (talks / "vtt/old/c.vtt").read_text().startswith("WEBVTT\n\n00:00:00.0")


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("x/1.wav y/1.wav y/2.wav", "1.txt 1.wav.txt 2.txt"),
        ("x y", "1.txt 1.mp3.txt 1.wav.txt 1.wav.2.txt 2.txt"),
        ("*/1.*", "x/1.txt x/1.mp3.txt x/1.wav.txt y/1.txt"),
        ("y/1.wav x/1.wav x/../x/1.wav .", "1.txt 1.wav.txt x/1.txt x/1.mp3.txt y/2.txt"),
    ],
)
def test_results_are_named_below_what_is_given(
    talks: Path, monkeypatch: pytest.MonkeyPatch, given: str, written: str
) -> None:
    for name in ("x/1.wav", "x/1.flac", "x/1.mp3", "y/1.wav", "y/2.wav"):
        (talks / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy("talks/a.wav", talks / "in" / name)
    monkeypatch.chdir("in")
    assert run(["transcribe", "model", *given.split(), "--out", "../out"]) == 0
    assert results(talks / "out") == sorted(written.split())


def change_model() -> None:
    Path("model/config.json").write_text(str(time.time_ns()))
    write_checksums(Path("model"))


RECORD = Path("out/sbkit-results.1-of-1.jsonl")
ALL_RESULTS = ["a.txt", "b.txt", "old/c.txt"]
CHANGES: list[tuple[Callable[[], object], list[str], str]] = [
    # between two runs: which results the second one writes, and what it says
    (lambda: None, [], "transcribe: none.*0 written, 0 failed, 3 skipped"),
    (lambda: shutil.copy("talks/b.flac", "talks/b.aac"), ["b.aac.txt"], ": 1 new.*, 3 skipped"),
    (lambda: os.utime("talks/b.flac", (1, 1)), ["b.txt"], ": 1 recording changed\n"),
    (lambda: Path("out/a.txt").unlink(), ["a.txt"], ": 1 result missing\n"),
    (change_model, ALL_RESULTS, ": 3 model changed\n"),
    (lambda: Path("words").write_text("fox"), ALL_RESULTS, ": 3 options changed\n"),
    (lambda: Path("out/a.txt").write_text("A fox."), [], "out/a.txt was edited, .*2 skipped"),
    (lambda: RECORD.unlink(), [], "out/b.txt was .*0 written, 3 failed"),
    (
        lambda: RECORD.write_bytes(RECORD.read_bytes()[:-20]),
        [],
        "out/old/c.txt was .* is kept.*0 written, 1 failed, 2 skipped",
    ),
]


@pytest.mark.parametrize(("change", "written", "says"), CHANGES)
def test_second_run_does_what_is_missing(
    talks: Path, capsys: Captured, change: Callable[[], object], written: list[str], says: str
) -> None:
    Path("model").mkdir()
    change_model()
    Path("words").write_text("dog")
    command = ["transcribe", "model", "talks", "--out", "out", "--hotwords", "words"]
    assert run([*command, "--share", "1/1"]) == 0  # into a record of its own
    change()
    before = {name: (talks / "out" / name).stat() for name in results(talks / "out")}
    capsys.readouterr()
    code = run([*command, "--errors", "errors"])
    names = results(talks / "out")
    assert [n for n in names if (talks / "out" / n).stat() != before.get(n)] == written
    lines = capsys.readouterr().err
    assert re.search(says, lines, re.DOTALL)
    assert code == (0 if " 0 failed" in lines else PARTLY_DONE)
    assert bool(Path("errors").read_text()) is bool(code)
    assert run([*command, "--again"]) == run(command) == 0
    assert "none\n0 written, 0 failed" in capsys.readouterr().err


def test_result_stays_with_its_recording_where_that_was_moved(
    talks: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    digest = Mock(side_effect=commands._digest)
    monkeypatch.setattr(commands, "_digest", digest)

    def due(folder: str, *options: str) -> str:
        digest.reset_mock()
        assert run(["transcribe", "model", folder, "--out", "out", *options]) == 0
        return capsys.readouterr().err.partition("To transcribe: ")[2].splitlines()[0]

    shutil.copy("talks/b.flac", "talks/e.flac")  # the same bytes twice
    assert due("talks", "--share", "1/1") == "4 new"
    Path("talks").rename("usb")
    os.utime("usb/a.wav", (1, 1))
    Path("link").symlink_to("usb")
    assert due("usb") == "none"
    assert [due("link"), due("usb"), due("usb"), digest.mock_calls] == [*3 * ["none"], []]
    assert results(talks / "out") == sorted([*ALL_RESULTS, "e.txt"])
    shutil.copytree("usb", "talks")
    assert due("talks") == "4 new"
    assert digest.call_count == 4  # of the results: no recording is gone
    content = bytearray(Path("usb/a.wav").read_bytes())
    content[-1] ^= 1
    shutil.rmtree("usb")
    Path("new").mkdir()
    Path("new/a.wav").write_bytes(content)  # its name and size are those of another one
    assert due("new") == "1 new"
    Path("talks/a.wav").rename("new/b.wav")
    (talks / "out/a.txt").write_text("A fox.")
    assert run(["transcribe", "model", "new/b.wav", "--out", "out"]) == PARTLY_DONE
    assert "out/a.txt was edited" in capsys.readouterr().err


def test_name_without_a_result_is_free_once_its_recording_is_gone(talks: Path) -> None:
    for folder in ("day1", "day2", "day3"):
        Path(folder).mkdir()
        Path(folder, "talk.wav").write_text("no audio")
    command = ["transcribe", "model", "--out", "out"]
    assert run([*command, "day1"]) == PARTLY_DONE
    shutil.copy("talks/a.wav", "day2/talk.wav")
    assert run([*command, "day2"]) == 0
    assert results(talks / "out") == ["talk.wav.txt"]  # day1 may be repaired
    shutil.rmtree("day1")
    shutil.copy("talks/b.flac", "day3/talk.wav")
    assert run([*command, "day3"]) == 0
    shutil.rmtree("day2")  # the name of a result that is there is never free
    shutil.copytree("day3", "day4")
    assert run([*command, "day4"]) == 0
    assert results(talks / "out") == ["talk.txt", "talk.wav.2.txt", "talk.wav.txt"]
    assert (talks / "out/talk.txt").read_text() == "the dog\n"


def test_recording_that_was_overwritten_meanwhile_is_transcribed_where_it_is_moved(
    talks: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    to_text = commands._to_text

    def overwrite(*arguments: Any) -> str:
        shutil.copy("talks/b.flac", "talks/a.wav")
        return to_text(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(commands, "_to_text", overwrite)
        assert run(["transcribe", "model", "talks/a.wav", "--out", "out"]) == 0
    Path("talks/a.wav").rename("new.wav")
    assert run(["transcribe", "model", "new.wav", "--out", "out"]) == 0
    assert "To transcribe: 1 new\n" in capsys.readouterr().err
    assert Path("out/new.txt").read_text() == "the dog\n"


def test_commands_with_one_folder_of_results_lose_nothing(
    talks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one starts and ends while the first one loads its model."""
    for day, recording in (("day1", "a.wav"), ("day2", "b.flac")):
        Path(day).mkdir()
        shutil.copy(f"talks/{recording}", f"{day}/talk.wav")
    command = ["transcribe", "model", "--out", "out"]
    load = Transcriber.load

    def load_while_another_transcribes(*arguments: Any, **options: Any) -> Transcriber:
        monkeypatch.setattr(Transcriber, "load", load)
        assert run([*command, "day2"]) == 0
        return load(*arguments, **options)

    locked: list[bool] = []

    def watch(name: str) -> None:
        function = getattr(commands, name)

        def watched(*arguments: Any) -> Any:
            with task_lock(talks / "out", commands.RECORD, wait=False) as is_free:
                locked.append(not is_free)
            return function(*arguments)

        monkeypatch.setattr(commands, name, watched)

    for name in ("_read_record", "write_text_atomically", "_add_to_record"):
        watch(name)
    monkeypatch.setattr(Transcriber, "load", load_while_another_transcribes)
    assert run([*command, "day1"]) == 0
    texts = {name: (talks / "out" / name).read_text() for name in results(talks / "out")}
    assert texts == {"talk.txt": "a fox\n", "talk.wav.txt": "the dog\n"}
    assert locked == 8 * [True]


@pytest.mark.parametrize(
    "call", ["sbkit.tasks.asr.commands._add_to_record", "pathlib.Path.replace"]
)
def test_result_of_a_killed_command_is_written_by_the_next_one(
    talks: Path, capsys: Captured, call: str
) -> None:
    Path("model").mkdir()
    command = ["transcribe", "model", "talks", "--out", "out"]
    original = resolve_name(call)

    def kill_at_results(first: Path, second: Any) -> None:
        if isinstance(second, Path):
            is_result = second.suffix == ".txt"
        else:
            is_result = any(entry.version != NO_ENTRY.version for entry in second)
        if is_result:
            raise SystemExit
        original(first, second)

    for _ in range(2):  # without results, and with those of another model
        change_model()
        with patch(call, kill_at_results), pytest.raises(SystemExit):
            run(command)
        assert run(command) == 0
        assert "3 written, 0 failed\n" in capsys.readouterr().err


def test_record_has_every_option_with_an_effect() -> None:
    actions = build_parser().commands.choices["transcribe"]._actions
    options = {action.dest for action in actions if action.option_strings}
    neutral = {"help", "out", "again", "errors", "quiet", "device", "share", "imports"}
    neutral |= {"truncated"}  # adds results, and others stay
    assert options - neutral - {"live", "pace"} == {*TEXT_OPTIONS}  # the last two never write


def test_shares_and_later_recordings_keep_names() -> None:
    stems = ("talk", "day/talk", "talk.mp3", "talk.mp3.2", "talk.2")
    paths = [f"{folder}/{stem}{end}" for folder in "abc" for stem in stems for end in (".mp3", "")]
    random = Random(1)
    for _ in range(200):
        given = {path: Path(path[2:]) for path in random.sample(paths, 12)}
        names = assign_names(given, [], ".srt")
        entries = [Entry(name, (), path, {}) for path, name in names.items()]
        assert assign_names(given, random.sample(entries, 5), ".srt") == names
        grown = assign_names({f"0/{path}": name for path, name in given.items()}, entries, ".srt")
        assert grown == grown | names
        assert len({*grown.values()}) == 2 * len(given)


def test_result_that_cannot_be_written_stops_no_other(
    talks: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (talks / "talks/a.wav").rename(talks / f"talks/{'x' * 251}.wav")  # .json is a byte too long
    (talks / "out/b.json").mkdir(parents=True)
    command = ["transcribe", "model", "talks", "--out", "out", "--again", "--format"]
    assert run([*command, "json"]) == PARTLY_DONE
    assert (talks / "out/old/c.json").exists()
    *_, folder, long, end = capsys.readouterr().err.splitlines()
    assert ("b.json cannot" in folder, "xxx.json cannot" in long) == (True, True)
    assert end == "1 written, 2 failed; the errors are above"
    assert run([*command, "text"]) == 0  # the longest name that there may be
    monkeypatch.setattr("sbkit.base.files.fsync", Mock(side_effect=OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        run([*command, "tsv"])


def test_transcribe_parts_are_the_whole(talks: Path, capsys: Captured) -> None:
    for name in ("u.wav", "v.wav"):
        (talks / name).write_text("no audio")
    command = ["transcribe", "model", "u.wav", "v.wav", "--errors", "errors"]
    for share in (["--share", "1/2"], ["--share", "2/2"], [], []):  # others begin the file anew
        assert run([*command, *share]) == PARTLY_DONE
        assert "u.wav" in Path("errors").read_text()
    assert len(Path("errors").read_text().splitlines()) == 2
    capsys.readouterr()
    for part in ("1/2", "2/2", "4/4"):
        assert run(["transcribe", "model", "talks", "--share", part, "--quiet"]) == 0
    lines = ["talks/a.wav\ta fox", "talks/old/c.mp3\tlazy dog", "talks/b.flac\tthe dog"]
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["talks/?.*", "--format", "tsv"], "prints one recording, not 2"),
        (["talks", "--out", "/proc/here"], "`--out`: /proc/here"),
        (["talks", "--share", "3"], "`--share` .* 3"),
    ],
)
@pytest.mark.usefixtures("talks")
def test_transcribe_checks_its_output_first(arguments: list[str], says: str) -> None:
    with pytest.raises(SbkitError, match=says):
        run(["transcribe", "model", *arguments])
