"""Find the columns of tables by their usual names, and parse the times of spans of files.

Names are compared without case, spaces and brackets: "Start Time (s)" is ``start_time_s``.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from sbkit.audio.io import AudioSpan, declared_seconds
from sbkit.base.units import MICROSECONDS
from sbkit.data.manifest import DURATION_COLUMN, Excluded

STOP_COLUMN = "stop"  # in tables of SpeechBrain, where whole numbers are samples
USUAL_COLUMNS: Mapping[str, tuple[str, ...]] = {  # by role, the keys of `columns`
    "path": (
        *("path", "audio", "audio_filepath", "audio_path", "wav", "file", "filename"),
        *("file_name", "audio_file"),
    ),
    "text": ("sentence", "text", "transcript", "transcription", "txt", "wrd"),
    "id": ("id", "utt_id", "utterance_id", "key"),
    "speaker": ("speaker", "client_id", "speaker_id", "spk_id", "spk"),
    "language": ("language", "lang"),
    "split": ("split",),
    "start": ("start", "start_time", "offset", "begin", "onset", "segment_start"),
    "end": ("end", "end_time", STOP_COLUMN, "segment_end"),
    "duration": ("duration",),
    "channel": ("channel", "channel_selector"),
}
TIME_ROLES = ("start", "duration", "end")
TIME_WORDS = {"start", "begin", "onset", "offset", "end", STOP_COLUMN}
TIME_UNIT = re.compile(r"_(ms|msec|milliseconds|s|sec|seconds)$")
SPLIT_COLUMNS = (*USUAL_COLUMNS["split"], "subset", "partition", "set", "fold")
ROLE_OF = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("dev", "valid", "validation", "val", "development"), "valid"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
MIN_SPAN_SECONDS, MAX_SPAN_SECONDS = 0.001, 1e9
MAX_ROUNDING_SECONDS = 0.5
# Reasons to exclude a row, or a part of its audio
INVALID_CHANNEL = "invalid channel"
INVALID_SPAN = "invalid times of a span"
CUT_SHORT = "ends of files that are longer than `duration` or `end` says"


def plain_name(column: str) -> str:
    """Return the name of a column without case, spaces and brackets.

    >>> plain_name("Start Time (s)"), plain_name("speakerId"), plain_name("ID")
    ('start_time_s', 'speaker_id', 'id')
    """
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", column.strip())
    return re.sub(r"\W+", "_", words).strip("_").lower()


def find_columns(names: Sequence[str], role: str) -> list[str]:
    """Return the columns with a usual name of a role; names of times may end in a unit."""
    plain = {name: plain_name(name) for name in names}
    if role in TIME_ROLES:
        plain = {name: TIME_UNIT.sub("", text) for name, text in plain.items()}
    return [name for name in names if plain[name] in USUAL_COLUMNS[role]]


def role_of(split: str) -> str | None:
    """Return the role of a split, such as test for ``test-noisy``; None for another name."""
    return ROLE_OF.get(re.split(r"[-_.]", split.strip().lower())[0])


def find_split_column(columns: Sequence[str], read: Callable[[str], Iterable[str]]) -> str | None:
    """Return the column ``split``, or a similar column with only names of splits as values.

    read: returns the values of a column.
    """
    by_name = {plain_name(column): column for column in reversed(columns)}
    for name in SPLIT_COLUMNS:
        if name in by_name:
            values = {value.strip() for value in read(by_name[name])} - {""}
            if name == SPLIT_COLUMNS[0] or (values and all(map(role_of, values))):
                return by_name[name]
    return None


# ---- parts of files


class SpanColumns(NamedTuple):
    """The columns of the start, the length and the end of spans; "" for none."""

    start: str = ""
    length: str = ""
    end: str = ""

    @classmethod
    def choose(cls, start: str | None, length: str | None, end: str | None) -> "SpanColumns":
        """Choose among the columns of these roles; there may be no start, as in NeMo."""
        if start:
            return cls(start, "" if end else length or "", end or "")
        if length and plain_name(length) != DURATION_COLUMN:  # the duration of the whole file
            return cls(length=length)
        return cls(end=end or "")

    @property
    def counts_samples(self) -> bool:
        """Whether whole numbers are samples, as in SpeechBrain's start and stop."""
        return plain_name(self.end) == STOP_COLUMN and plain_name(self.start) == "start"


def is_like_time(column: str) -> bool:
    """Check whether a column seems to have times of spans."""
    return not TIME_WORDS.isdisjoint(plain_name(column).split("_"))


def units_per_second(column: str) -> int:
    """Return 1000 for a column of milliseconds, else 1."""
    unit = TIME_UNIT.search(plain_name(column))
    return 1000 if unit and unit[1].startswith("m") else 1


def parse_span(
    path: str, times: Sequence[str], units: Sequence[int], channel: str
) -> AudioSpan | Excluded:
    """Return the span of a file from its start, length and end; the whole file if all are empty.

    A span without a start begins with its file, and one without a length or end lasts to the end.

    times: the fields of the start, the length and the end.
    units: how many units of each field make a second.
    """
    text = channel.strip().removesuffix(".0")  # pandas writes 1.0 for 1
    number = int(text) if text.isdecimal() else None
    if text and number is None:
        return Excluded("", INVALID_CHANNEL, f"{channel} is not one channel, counted from 0")
    start, length, end = map(str.strip, times)
    if not (start or length or end):
        return AudioSpan(path, channel=number)
    name = path.rpartition("/")[2]
    try:
        first, last = float(start or 0) / units[0], MAX_SPAN_SECONDS
        last = float(end) / units[2] if end else last
        last = first + float(length) / units[1] if length else last
    except ValueError as error:
        return Excluded("", INVALID_SPAN, f"{name}: {error}")
    is_open = not (length or end)
    if not (first >= 0 and first + MIN_SPAN_SECONDS <= last <= MAX_SPAN_SECONDS):
        text = f"{first:g} to " + ("the end" if is_open else f"{last:g} s")
        return Excluded("", INVALID_SPAN, f"{text} of {name}")
    if not start:
        seconds = declared_seconds(path)
        # A rounded length must not cut off words; many scripts write int(seconds).
        if seconds - last <= max(MAX_ROUNDING_SECONDS, last / 10) or last == int(seconds):
            return AudioSpan(path, channel=number)
    microseconds = None if is_open else round(last * MICROSECONDS)
    return AudioSpan(path, round(first * MICROSECONDS), microseconds, number)
