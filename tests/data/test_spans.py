"""Parts of long recordings: tables with offsets and times."""

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from recipes.OwnData.corpus import OwnData
from sbkit.audio.io import read_audio
from sbkit.base.errors import SbkitError
from sbkit.data.manifest import Manifest
from sbkit.data.shard import read_rows
from tests.data.test_splits import prepare, prepare_manifest

RECORDINGS = {"talk.mp3": 44_100, "talk.flac": 48_000}  # Hz
TIMES = [0.0, 1.2345678, 61.00003, 75.5, 76.5]  # seconds; a block has 60


@pytest.fixture(scope="module")
def folder(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two recordings of real speech, 80 seconds each."""
    folder = tmp_path_factory.mktemp("recordings")
    clips = sorted((asterisk_english / "clips").iterdir())[:40]
    for name, rate in RECORDINGS.items():
        speech = np.concatenate([read_audio(clip, rate) for clip in clips])
        soundfile.write(folder / name, np.resize(speech, 80 * rate), rate)
    return folder


def read(source: Path, **settings: object) -> Manifest:
    all_settings = {"manifest": {"train": str(source)}, "language": "en", **settings}
    return Manifest.join(OwnData(all_settings).blocks("train"))


def write_lines(file: Path, lines: Iterable[str]) -> Path:
    file.write_text("\n".join(lines))
    return file


def write_table(folder: Path, rows: Iterable[str]) -> Path:
    return write_lines(folder / "spans.csv", ["path,offset,duration,text", *rows])


def whole_table(folder: Path) -> Path:
    """Write a table whose rows share the recordings without a gap, in random order."""
    rows = [f"{name},{a},{b - a:.9f},from {a}" for name in RECORDINGS for a, b in pairwise(TIMES)]
    rows += [f"{name},{TIMES[-1]},,the end" for name in RECORDINGS]
    return write_table(folder, [rows[row] for row in np.random.default_rng(0).permutation(10)])


def test_spans_are_slices_of_the_whole_file(folder: Path, opened: list[str]) -> None:
    manifest = read(whole_table(folder))
    assert "talk.mp3-1234-61000" in manifest.ids
    splits = [prepare_manifest(manifest) for _ in range(2)]
    assert sorted(opened) == sorted(str(folder / name) for name in RECORDINGS)  # once
    assert splits[0].digest == splits[1].digest
    for split in splits:
        assert split.excluded == []
        rows = sorted(read_rows(split.dataset, range(10)), key=lambda r: int(r["id"].split("-")[1]))
        for name in RECORDINGS:
            spans = [row["audio"] for row in rows if row["id"].startswith(name)]
            assert np.array_equal(np.concatenate(spans), read_audio(folder / name))
        assert {row["file_rate"] for row in split.dataset["audio"]} == {*RECORDINGS.values()}


@pytest.mark.parametrize(
    ("header", "times"),
    [
        ("start,end", "1.5,2.25"),  # such rows were read as whole files: CER 204 %
        ("Begin,Duration", "1.5,0.75"),
        ("start_ms,end_ms", "1.5e3,2250"),
        ("Start Time (s),End Time (s)", "1.5,2.25"),
        ("offset,end,duration", "1.5,2.25,30"),
        ("end,begin_frame", "2.25,150"),
    ],
)
def test_times_of_a_part_have_several_names_or_are_named_as_unused(
    header: str, times: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    row = f"{folder}/talk.flac,hi,{times}"
    manifest = read(write_lines(tmp_path / "a.csv", [f"path,sentence,{header}", row]))
    is_part = "frame" not in header
    expected = (1_500_000, 2_250_000, None) if is_part else (0, None, None)
    assert [span[1:] for span in manifest.spans] == [expected]
    assert ("end, " in caplog.text and "_frame are not used" in caplog.text) == ("frame" in header)


@pytest.mark.parametrize(
    ("header", "times", "note"),
    [
        ("start,end", "10,14", ""),
        ("start,stop", "480000,672000", "read as samples."),
        ("start,stop", "10,14", "read as seconds, because most do not fit the files as samples."),
        ("start,end", "10000,14000", "read as milliseconds, because .* as seconds."),
        ("offset,duration", "480000,192000", "read as samples, because .* as seconds."),
        ("start_ms,end_ms", "10,14", "read as seconds, because .* as milliseconds."),
        ("begin,end", "10.,", ""),
        ("begin,end", "480000,", "read as samples, because .* as seconds."),
    ],
)
def test_times_in_another_unit_than_they_are_named_are_tried_and_said(
    header: str, times: str, note: str, folder: Path, tmp_path: Path, caplog: Any
) -> None:
    """Whole seconds in `start` and `stop` were samples, and spans of less than a millisecond."""
    caplog.set_level("INFO")
    rows = [f"{folder}/talk.flac,hi,{times}", f"{folder}/talk.mp3,hi,", f"{folder}/lost.mp3,hi,1,2"]
    rows[1] += "," * times.count(",")
    manifest = read(write_lines(tmp_path / "a.csv", [f"path,sentence,{header}", *rows]))
    end = None if times.endswith(",") else 14_000_000
    assert [*manifest.spans][0][1:3] == (10_000_000, end)
    assert bool(note) == bool(caplog.messages)
    assert re.search(f"{note}$", "".join(caplog.messages))


@pytest.mark.parametrize(
    ("header", "times", "span", "note"),
    [  # milliseconds, as likely as samples; a phone; and times behind the file in any unit
        (
            "start,stop",
            "10000,14000",
            (208_333, 291_667),
            "samples, but would .* milliseconds, too",
        ),
        ("start,end", "10.01,10.04", (10_010_000, 10_040_000), ""),
        ("start,end", "9e9,9e9", None, ""),
        # a part of a recording, in a file as long as the span; and spans of 0.299 and 0.3 s
        ("start_ms,end_ms", "2e6,2080400", (2_000_000_000, 2_080_400_000), ""),
        ("offset,duration", "1250,80", (1_250_000_000, 1_330_000_000), ""),
        ("start,end", "1250,1549", (1_250_000_000, 1_549_000_000), ""),
        ("start,end", "1250,1550", (1_250_000, 1_550_000), "read as milliseconds, because"),
    ],
)
def test_times_that_fit_in_no_other_unit_are_those_of_their_names(
    header: str, times: str, span: object, note: str, folder: Path, tmp_path: Path, caplog: Any
) -> None:
    caplog.set_level("INFO")
    rows = [f"path,sentence,{header}", f"{folder}/talk.flac,hi,{times}"]
    manifest = read(write_lines(tmp_path / "a.csv", rows))
    assert [clip_span[1:3] for clip_span in manifest.spans] == ([span] if span else [])
    assert bool(note) == bool(caplog.messages)
    assert re.search(note, "".join(caplog.messages))


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [  # row, reason, detail
        ("talk.flac,-1,2,x", "invalid times of a span", "-1 to 1 s of talk.flac"),
        ("talk.flac,10,2,x", "clip listed twice", "names 10 to 12 s of talk.flac"),
        (
            "talk.flac,11.9,0.5,x",
            "span overlaps another",
            "11.9 to 12.4 s of talk.flac overlaps 10 to 12 s of talk.flac, talk-10000-12000",
        ),
        ("talk.mp3,70,10.11,x", "span beyond the end of its file", "lasts only 80.000 s"),
        ("none.flac,0,1,x", "unreadable audio", "none.flac is missing"),
    ],
)
def test_invalid_part_is_left_out_and_named(
    folder: Path, tmp_path: Path, row: str, reason: str, detail: str
) -> None:
    rows = ["talk.flac,10,2,a", "talk.flac,11.99,2,rounded", "talk.flac,78,2.09,clipped"]
    rows += [f"talk.mp3,{n},1,x" for n in range(40)]
    split = prepare_manifest(read(write_table(folder, [*rows, row])))
    (excluded,) = split.excluded
    assert (excluded.reason, detail in excluded.detail) == (reason, True), excluded
    assert len(split.dataset) == 43
    assert split.dataset["samples"][2] == 2 * 16_000
    again = prepare_manifest(read(write_table(folder, [*rows, row])))
    assert again.excluded == split.excluded


def test_part_without_a_start_begins_with_its_file(folder: Path, tmp_path: Path) -> None:
    """A date among times leaves out its row, not the times of all rows."""
    rows = ["talk.flac,hi,,2", "talk.flac,yo,3,4", "talk.flac,no,2026-01-01,6"]
    file = write_lines(folder / "starts.csv", ["path,text,start,end", *rows])
    manifest = read(file)
    assert [span[1:3] for span in manifest.spans] == [(0, 2_000_000), (3_000_000, 4_000_000)]
    assert [row.reason for row in manifest.excluded] == ["invalid times of a span"]


def test_part_without_text_displaces_none_that_has_one(folder: Path) -> None:
    """Training leaves it out anyway, so both would be lost."""
    rows = ["talk.flac,1,2,", "talk.flac,2,9,hi", "talk.flac,20,2,", "talk.flac,20,2,yo"]
    manifest = read(write_table(folder, rows))
    assert manifest.sentences == ["", "hi", "yo"]
    assert [row.reason for row in manifest.excluded] == ["clip listed twice"]


def test_spans_need_a_store_of_audio(folder: Path, tmp_path: Path) -> None:
    durations = {"duration_ms": "1000"}
    clips = [replace(clip, columns=durations) for clip in read(whole_table(folder))]
    with pytest.raises(SbkitError, match="lazy` decodes whole files, but some clips are spans"):
        prepare(clips, audio_store="lazy")


def test_every_form_selects_the_channel_of_a_speaker(folder: Path, tmp_path: Path) -> None:
    """A call has one speaker on each channel; a column `channel` was ignored, CER 46 %."""
    left_part = read_audio(folder / "talk.flac")[: 16_000 * 4]
    sides = np.stack([left_part, left_part[::-1]], 1)
    soundfile.write(tmp_path / "call.wav", sides, 16_000)
    rows = [("call.wav", channel, "hi") for channel in (1, 0)]
    table = [f"{name},{channel},{text}" for name, channel, text in rows]
    write_lines(tmp_path / "table.csv", ["path,channel,text", *table])
    keys = ("audio_filepath", "channel_selector", "text")
    nemo = [dict(zip(keys, row, strict=True)) for row in rows]
    write_lines(tmp_path / "nemo.json", map(json.dumps, nemo))
    for source in ("table.csv", "nemo.json"):
        manifest = read(tmp_path / source)
        assert [span.channel for span in manifest.spans] == [1, 0], source
        split = prepare_manifest(manifest)
        assert split.excluded == []
        for row, side in zip(read_rows(split.dataset, range(2)), sides.T[::-1], strict=True):
            assert np.array_equal(row["audio"], side), source


def test_channels_that_are_no_channel_of_the_file_are_left_out(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, (16_000, 2))
    for n in range(60):
        soundfile.write(tmp_path / f"{n}.wav", noise, 16_000)
    rows = ["0.wav,1.0,hi", "1.wav,,hi", *(f"{n}.wav,{n % 2},hi" for n in range(2, 58))]
    rows += ['58.wav,"[0, 1]",hi', "59.wav,2,hi"]
    write_lines(tmp_path / "t.csv", ["path,channel,text", *rows])
    manifest = read(tmp_path / "t.csv", columns={"channel": None})
    assert manifest[58].columns["channel"] == "[0, 1]"
    manifest = read(tmp_path / "t.csv")
    assert [span.channel for span in manifest.spans][:2] == [1, None]
    assert [(row.reason, row.detail) for row in manifest.excluded] == [
        ("invalid channel", "[0, 1] is not one channel, counted from 0"),
    ]
    split = prepare_manifest(manifest)
    assert "has no channel 2: it has 2, counted from 0" in split.excluded[-1].detail
    assert len(split.dataset) == 58
