"""Annotations of ELAN and Praat become rows with their times and texts, whatever wrote them."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import soundfile
from praatio import textgrid
from pympi import Eaf

from sbkit.base.errors import ConfigError, DataError
from sbkit.data.annotations import read_annotations
from sbkit.data.tables import TableOptions

TEXTS = ("ǃxóõ ǂʼáã", 'say "no"', "ts’a = mb-a", "a & b < c", "tone ˥˩", "word", "línia\u0301 x")
LENGTH_MS = 60_000


class Annotated(NamedTuple):
    """A file, and the spans of its tier `text` in milliseconds."""

    file: Path
    spans: list[tuple[float, float, str]]


def drawn_spans(random: random.Random, overlaps: bool) -> Iterator[tuple[int, int, str]]:
    end = 0
    for _ in range(random.randint(1, 12)):
        start = max(0, end + random.randint(-400 if overlaps else 0, 1500))
        end = start + random.randint(1, 2500)
        yield start, end, random.choice(TEXTS)


def write_recording(file: Path) -> None:
    soundfile.write(file, np.zeros(16 * LENGTH_MS, np.int16), 16_000)


def write_elan(folder: Path, random: random.Random) -> Annotated:
    """Write tiers of two speakers, with glosses that refer to the text of the first."""
    eaf, file = Eaf(author=""), folder / "talk.eaf"
    eaf.remove_tier("default")
    eaf.add_linguistic_type("utterance")
    eaf.add_linguistic_type("gloss", "Symbolic_Association")
    eaf.add_linguistic_type("word", "Symbolic_Subdivision")
    spans = [*drawn_spans(random, overlaps=False)]
    eaf.add_tier("text", "utterance", part="Ann")
    eaf.add_tier("other", "utterance", part="Bo")
    eaf.add_tier("notes", "utterance")
    for start, end, text in spans:
        eaf.add_annotation("text", start, end, text)
    eaf.add_annotation("other", 0, 700, "")
    eaf.add_tier("gloss", "gloss", parent="text")
    for start, _, text in spans:
        eaf.add_ref_annotation("gloss", "text", start, f"of {text}")
    media = folder / random.choice(["talk.wav", "sub folder/ä b.wav"])
    media.parent.mkdir(exist_ok=True)
    write_recording(media)
    if random.random() < 0.5:
        eaf.add_linked_file("file:///elsewhere/film.mp4", "./film.mp4", "video/mp4")
    path = media.relative_to(folder).as_posix()
    relative = random.choice([f"./{path}", path.replace(" ", "%20")])
    eaf.add_linked_file("file:///C:/Users/me/lost.wav", relative, "audio/x-wav")
    eaf.to_file(str(file), pretty=random.random() < 0.5)
    return Annotated(file, [(float(s), float(e), text) for s, e, text in spans])


def write_praat(folder: Path, random: random.Random) -> Annotated:
    file = folder / random.choice(["talk.TextGrid", "talk.textgrid"])
    spans = [(s / 1000, e / 1000, text) for s, e, text in drawn_spans(random, overlaps=False)]
    grid = textgrid.Textgrid()
    grid.addTier(textgrid.IntervalTier("text", spans, 0, LENGTH_MS / 1000))
    grid.addTier(textgrid.IntervalTier("empty", [], 0, LENGTH_MS / 1000))
    grid.addTier(textgrid.PointTier("clicks", [(0.5, "ǃ")], 0, LENGTH_MS / 1000))
    kind: Any = random.choice(["short_textgrid", "long_textgrid"])
    grid.save(str(file), kind, includeBlankSpaces=True)
    text = file.read_text("utf-8").replace("\n", random.choice(["\n", "\r\n"]))
    file.write_bytes(text.encode(random.choice(["utf-8", "utf-8-sig", "utf-16"])))
    write_recording(folder / "talk.wav")
    return Annotated(file, [(1000 * s, 1000 * e, text) for s, e, text in spans])


@pytest.mark.parametrize("write", [write_elan, write_praat])
@pytest.mark.parametrize("seed", range(20))
def test_times_and_texts_are_read_as_written(write: Any, seed: int, tmp_path: Path) -> None:
    file, spans = write(tmp_path, random.Random(seed))
    table = read_annotations(str(file), TableOptions(tiers=("text",)))
    rows = table.rows.to_pylist()
    assert [row["text"] for row in rows] == [text for *_, text in spans]
    read = [(float(row["start_ms"]), float(row["end_ms"])) for row in rows]
    assert read == [pytest.approx(span[:2], abs=0.5) for span in spans]
    assert all(soundfile.info(row["path"]).frames == 16 * LENGTH_MS for row in rows)
    assert {row["tier"] for row in rows} == {"text"}
    if write is write_elan:
        assert {row["speaker"] for row in rows} == {"Ann"}
        glosses = read_annotations(str(file), TableOptions(tiers=("gloss",))).rows.to_pylist()
        assert [row["text"] for row in glosses] == [f"of {text}" for *_, text in spans]
        assert [float(row["start_ms"]) for row in glosses] == [start for start, *_ in spans]
        by_type = read_annotations(str(file), TableOptions(tiers=("utterance",)))
        assert by_type.rows["speaker"].to_pylist() == ["Ann"] * len(spans) + ["Bo"]
        by_participant = read_annotations(str(file), TableOptions(tiers=("Bo",)))
        assert by_participant.rows["text"].to_pylist() == [""]


ALIGNED = (
    '<ANNOTATION><ALIGNABLE_ANNOTATION ANNOTATION_ID="{}" TIME_SLOT_REF1="{}" TIME_SLOT_REF2="{}">'
)
ALIGNED += "<ANNOTATION_VALUE>{}</ANNOTATION_VALUE></ALIGNABLE_ANNOTATION></ANNOTATION>"
REFERENCE = '<ANNOTATION><REF_ANNOTATION ANNOTATION_ID="{}" ANNOTATION_REF="{}"{}>'
REFERENCE += "<ANNOTATION_VALUE>{}</ANNOTATION_VALUE></REF_ANNOTATION></ANNOTATION>"


def test_open_times_and_subdivisions_share_the_time_of_their_parent(tmp_path: Path) -> None:
    """As ELAN writes a subdivision by time, and words that it only counts."""
    slots = {"ts1": 1000, "ts2": None, "ts3": None, "ts4": 4000}
    values = [
        f'<TIME_SLOT TIME_SLOT_ID="{name}"' + (f' TIME_VALUE="{ms}"/>' if ms else "/>")
        for name, ms in slots.items()
    ]
    parts = zip("abc", ["ts1", "ts2", "ts3"], ["ts2", "ts3", "ts4"], strict=True)
    by_time = "".join(ALIGNED.format(f"{text}1", *ends, text) for text, *ends in parts)
    order = [("w2", ' PREVIOUS_ANNOTATION="w1"', "two"), ("w1", "", "one")]
    words = "".join(REFERENCE.format(id, "p1", before, text) for id, before, text in order)
    file = tmp_path / "talk.eaf"
    xsi = "http://www.w3.org/2001/XMLSchema-instance"
    file.write_text(
        f'<ANNOTATION_DOCUMENT xmlns:xsi="{xsi}" xsi:noNamespaceSchemaLocation="x" VERSION="3.0">'
        '<HEADER TIME_UNITS="milliseconds">'
        '<MEDIA_DESCRIPTOR MEDIA_URL="file:///x/lost.wav" TIME_ORIGIN="900"/>'
        '<MEDIA_DESCRIPTOR MEDIA_URL="https://far.example/talk.wav" TIME_ORIGIN="500"/></HEADER>'
        f"<TIME_ORDER>{''.join(values)}</TIME_ORDER>"
        f'<TIER TIER_ID="p">{ALIGNED.format("p1", "ts1", "ts4", "one two")}</TIER>'
        f'<TIER TIER_ID="time">{by_time}</TIER><TIER TIER_ID="words">{words}</TIER>'
        "</ANNOTATION_DOCUMENT>"
    )
    write_recording(tmp_path / "talk.wav")
    for tier, expected in {
        "time": [("a", 1500, 2500), ("b", 2500, 3500), ("c", 3500, 4500)],
        "words": [("one", 1500, 3000), ("two", 3000, 4500)],
    }.items():
        rows = read_annotations(str(file), TableOptions(tiers=(tier,))).rows.to_pylist()
        read = [(row["text"], float(row["start_ms"]), float(row["end_ms"])) for row in rows]
        assert read == expected


def test_tiers_are_listed_and_missing_recordings_named(tmp_path: Path) -> None:
    file, spans = write_elan(tmp_path, random.Random(1))
    listed = rf"text \(type utterance, participant Ann, {len(spans)} annotation"
    with pytest.raises(ConfigError, match=listed):
        read_annotations(str(file), TableOptions())
    table = read_annotations(str(file), TableOptions(tiers=("nothing",)))
    assert not len(table.rows) and "tiers: text (type" in table.excluded[0].detail
    for recording in tmp_path.rglob("*.wav"):
        recording.unlink()
    with pytest.raises(DataError, match=r"its recording, .*lost\.wav.*, is missing"):
        read_annotations(str(file), TableOptions(tiers=("text",)))
    for name in ("damaged.eaf", "damaged.TextGrid"):
        (tmp_path / name).write_text("<ANNOTATION_DOCUMENT>\n" * 3)
        (tmp_path / "damaged.wav").touch()
        with pytest.raises(DataError, match="cannot be read as a"):
            read_annotations(str(tmp_path / name), TableOptions())
