"""Columns of tables: which one says the sound, the text, the speaker or the split, and how.

Names are compared without case, spaces and brackets: "Start Time (s)" is ``start_time_s``.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from sbkit.audio.io import AudioPart, declared_seconds
from sbkit.base.units import MICROSECONDS
from sbkit.data.manifest import DURATION_COLUMN, Excluded, unreserved_name

PATH_COLUMNS = (
    *("path", "audio", "audio_filepath", "audio_path", "wav", "file", "filename"),
    *("file_name", "audio_file"),
)
TEXT_COLUMNS = ("sentence", "text", "transcript", "transcription", "txt", "wrd")
ID_COLUMNS = ("id", "utt_id", "utterance_id", "key")
SPEAKER_IDS = ("speaker", "client_id", "speaker_id", "spk_id", "spk")  # become ``speaker``
SPEAKER_COLUMNS = (
    *SPEAKER_IDS,
    *("spkr", "speakerid", "spkid", "speaker_name", "speaker_index", "talker", "talker_id"),
    *("reader", "reader_id", "user_id", "participant", "participant_id", "subject_id"),
    *("worker_id", "narrator"),
)
SPLIT_COLUMNS = ("split", "subset", "partition", "set", "fold")
ROLE_OF = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("dev", "valid", "validation", "val", "development"), "valid"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
CHANNEL_COLUMNS = (
    *("channel", "channel_selector", "channel_id", "audio_channel", "channel_index"),
    *("chan", "ch", "side"),
)
CHANNEL_WORDS = {"a": 0, "b": 1, "left": 0, "right": 1, "l": 0, "r": 1}
CHANNEL = re.compile(r"\[?\s*(?:ch(?:annel)?\s*)?(\d{1,3})(?:\.0)?\s*\]?")
CHANNELS = re.compile(r"[\[(]?\s*-?\d+(\s*,\s*\d+)*\s*[\])]?")  # no single one: refused
INVALID_CHANNEL = "invalid channel"  # reason

# Of a part of a file, in seconds: its start and its length, or its start and its end.
OFFSET_COLUMN, LENGTH_COLUMN = "offset", "duration"
START_COLUMN, END_COLUMN = "start", "end"
STOP_COLUMN = "stop"  # of SpeechBrain: with it, whole numbers count samples
# The start and the end have one kind of name. With "onset" (of DCASE), the offset is the end.
ENDS_OF_START = {
    START_COLUMN: (END_COLUMN, STOP_COLUMN),
    "begin": (END_COLUMN,),
    "onset": (OFFSET_COLUMN, END_COLUMN),
    "from": ("to",),
    "tmin": ("tmax",),
    "xmin": ("xmax",),
    "t0": ("t1",),
}
LENGTHS = (LENGTH_COLUMN, "dur", "length")
SECONDS = {"time", "at", "ts", "in", "s", "sec", "secs", "second", "seconds"}
MILLISECONDS = {"ms", "msec", "msecs", "millis", "milliseconds"}
TIME_WORDS = {OFFSET_COLUMN, START_COLUMN, END_COLUMN, STOP_COLUMN, "begin", "onset"}
SPAN = re.compile(r"(.*_)?(segment|span|interval|timestamps?|times?)")
TIME_VALUE = re.compile(r"[-+]?[\d:.,]*\d[\d:.,]*(e[-+]?\d+)?\s*s?", re.IGNORECASE)
MIN_PART_SECONDS, MAX_PART_SECONDS = 0.001, 1e9
MAX_ROUNDING = 0.5  # seconds
MAX_CUT_DIFFERENCE = 0.1  # seconds between a part and the file that was cut for it
INVALID_PART = "invalid times of a part"  # reason
CUT_SHORT = "ends of files that are longer than `duration` or `end` says"  # a reason of loss


def plain_name(column: str) -> str:
    """Return the name of a column without case, spaces and brackets.

    >>> plain_name("Start Time (s)"), plain_name("speakerId"), plain_name("ID")
    ('start_time_s', 'speaker_id', 'id')
    """
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", column.strip())
    return re.sub(r"\W+", "_", words).strip("_").lower()


def find_columns(columns: Sequence[str], name: str | None, usual: Sequence[str]) -> list[str]:
    """Return the column that the YAML names, or those with usual names, in their order."""
    if name:
        return [column for column in columns if column.lower() == name.lower()][:1]
    by_name: dict[str, str] = {}
    for column in columns:
        by_name.setdefault(plain_name(column), column)
    return [by_name[name] for name in usual if name in by_name]


def find_column(columns: Sequence[str], name: str | None, usual: Sequence[str]) -> str | None:
    """Return the first of `find_columns`."""
    return next(iter(find_columns(columns, name, usual)), None)


def rename_columns(names: Sequence[str], used: Collection[str]) -> dict[str, str]:
    """Map the names of a corpus's columns, except those used for the clip, to sbkit's names.

    The speaker's column becomes ``speaker``. A reserved name gets the prefix ``manifest_``.
    """
    unused = [name for name in names if name not in used]
    speaker = find_column(unused, None, SPEAKER_IDS)
    return {name: "speaker" if name == speaker else unreserved_name(name) for name in unused}


def role_of(split: str) -> str | None:
    """Return the role of a split, such as test for ``test-noisy``; None for another name."""
    return ROLE_OF.get(re.split(r"[-_.]", split.strip().lower())[0])


def find_split_column(columns: Sequence[str], read: Callable[[str], Iterable[str]]) -> str | None:
    """Return the column ``split``, or another in which every value is the name of a split.

    read: returns the values of a column.
    """
    for column in find_columns(columns, None, SPLIT_COLUMNS):
        values = {value.strip() for value in read(column)} - {""}
        if plain_name(column) == SPLIT_COLUMNS[0] or (values and all(map(role_of, values))):
            return column
    return None


# ---- channels


def find_channel(value: str) -> int | None:
    """Return a channel, counted from 0; None if the value is not one.

    >>> find_channel("1.0"), find_channel("B"), find_channel("left"), find_channel("[0]")
    (1, 1, 0, 0)
    """
    value = value.strip().lower()
    match = CHANNEL.fullmatch(value)
    return int(match[1]) if match else CHANNEL_WORDS.get(value)


# ---- parts of files


class PartColumns(NamedTuple):
    """The columns of the start, the length and the end of parts; "" for none."""

    start: str = ""
    length: str = ""
    end: str = ""

    @property
    def counts_samples(self) -> bool:
        """Whether whole numbers are samples, as in SpeechBrain's start and stop."""
        return plain_name(self.end) == STOP_COLUMN and plain_name(self.start) == START_COLUMN


class TimeColumn(NamedTuple):
    """The name of a column of times, such as segment_start_ms: segment, start, milliseconds."""

    prefix: str
    word: str
    unit: str  # "s", "ms" or another, such as "samples"

    @classmethod
    def parse(cls, column: str) -> "TimeColumn":
        *prefix, last = plain_name(column).split("_")
        unit = "s"
        while prefix and (last in SECONDS or last in MILLISECONDS or prefix[-1] in TIME_WORDS):
            if last in MILLISECONDS:
                unit = "ms"
            elif last not in SECONDS:
                unit = last
            last = prefix.pop()
        return cls("_".join(prefix), last, unit)


def find_part_columns(columns: Sequence[str]) -> PartColumns:
    """Return the columns of parts in seconds or milliseconds; there may be no start, as in NeMo.

    >>> find_part_columns(["path", "Segment Start", "segment_end_ms", "duration"])
    PartColumns(start='Segment Start', length='', end='segment_end_ms')
    """
    groups: dict[str, dict[str, str]] = {"": {}}
    for column in columns:
        prefix, word, unit = TimeColumn.parse(column)
        if unit in ("s", "ms"):
            groups.setdefault(prefix, {}).setdefault(word, column)
    for prefix, group in groups.items():
        length = next((group[word] for word in LENGTHS if word in group), "")
        for start, ends in ENDS_OF_START.items():
            end = next((group[word] for word in ends if word in group), "")
            if start in group and end:
                return PartColumns(group[start], end=end)
        for start in (OFFSET_COLUMN, START_COLUMN, "begin", "onset"):
            if start in group and (length or (start == OFFSET_COLUMN and not prefix)):
                end = "" if length else group.get(END_COLUMN, "")
                return PartColumns(group[start], length, end)
    # DURATION_COLUMN states the length of the whole file.
    own = {word: column for word, column in groups[""].items() if column != DURATION_COLUMN}
    length = next((own[word] for word in LENGTHS if word in own), "")
    return PartColumns(length=length, end="" if length else own.get(END_COLUMN, ""))


def is_span(name: str, value: Sequence[object]) -> bool:
    """Return whether a list is the start and the end of a part: "timestamp": [1.5, 3]."""
    return (
        len(value) == 2
        and all(type(time) in (int, float) for time in value)
        and SPAN.fullmatch(plain_name(name)) is not None
    )


def unused_time_columns(columns: Sequence[str], used: PartColumns) -> list[str]:
    """Return the columns that look like times of parts, but are not used."""
    return [
        column
        for column in columns
        if column not in used and TimeColumn.parse(column).word in TIME_WORDS
    ]


def to_seconds(texts: Sequence[str], column: str) -> Sequence[str]:
    """Return the times of a column in seconds, if it has milliseconds."""
    if not column or TimeColumn.parse(column).unit != "ms":
        return texts
    seconds = list(texts)
    for row, text in enumerate(texts):
        with suppress(ValueError):  # reported with its row
            seconds[row] = repr(float(text) / 1000)
    return seconds


def parse_time(text: str) -> float:
    """Return a time in seconds: 1.5, or as spreadsheets and subtitles write it, 01:02:03,5."""
    seconds = 0.0
    for field in text.strip().removesuffix("s").replace(",", ".").split(":", 2):
        seconds = 60 * seconds + float(field)
    return seconds


@lru_cache(maxsize=1000)
def _seconds_of(path: str, time: int) -> float:  # of a file with many parts, unless it changes
    return declared_seconds(path)


def parse_span(path: str, start: str, length: str, end: str, channel: str) -> AudioPart | Excluded:
    """Return the part of a file at times in seconds; the whole file if all are empty.

    A part without a start begins with its file, and one without a length or end lasts to the end.
    """
    number = find_channel(channel)
    if channel.strip() and number is None:
        return Excluded("", INVALID_CHANNEL, f"{channel} is not one channel, counted from 0")
    if not (start.strip() or length.strip() or end.strip()):
        return AudioPart(path, channel=number)
    name = path.rpartition("/")[2]
    try:
        first = parse_time(start.strip() or "0")
        last = parse_time(end) if end.strip() else MAX_PART_SECONDS
        last = first + parse_time(length) if length.strip() else last
    except ValueError as error:
        return Excluded("", INVALID_PART, f"{name}: {error}")
    is_open = not (length.strip() or end.strip())
    if not (first >= 0 and first + MIN_PART_SECONDS <= last <= MAX_PART_SECONDS):
        times = f"{first:g} to " + ("the end" if is_open else f"{last:g} s")
        return Excluded("", INVALID_PART, f"{times} of {name}")
    is_file = os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises for a name that is too long
    seconds = _seconds_of(path, Path(path).stat().st_mtime_ns) if is_file else 0.0
    # Without a start, a rounded length must not cut words; many scripts write int(seconds).
    is_near = seconds - last <= max(MAX_ROUNDING, last / 10) or last == int(seconds)
    is_rounded = not start.strip() and is_near
    # Some corpora keep the times that clips, which are cut already, had in a recording.
    is_cut = last > seconds + MAX_CUT_DIFFERENCE >= last - first >= seconds - MAX_CUT_DIFFERENCE
    if is_rounded or (seconds and is_cut):
        return AudioPart(path, channel=number)
    microseconds = None if is_open else round(last * MICROSECONDS)
    return AudioPart(path, round(first * MICROSECONDS), microseconds, number)
