"""`sbkit speak`: a text as a WAV, or each line of a file as a clip, with a table to train on.

lines -> symbols, or the reason why a line is left out -> audio, in batches -> FLAC -> table

A clip is named after a hash of its text, and has its name only when it is whole. So a job that is
started again finds the clips of its lines, wherever they stand in the file.
"""

import csv
import hashlib
import io
import json
import logging
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sbkit.audio.io import STANDARD, declared_seconds, to_int16, write_flac, write_wav
from sbkit.base.checksums import read_checksums
from sbkit.base.errors import FILES_FAILED, ConfigError, DataError
from sbkit.base.files import (
    parse_errors_as_sbkit_errors,
    read_regular,
    read_text_lines,
    require_writable,
    to_json,
    write_text_atomically,
)
from sbkit.base.messages import listed, plural
from sbkit.base.units import samples_to_seconds
from sbkit.bundle.config import WEIGHTS_FILE
from sbkit.commands.parts import WHOLE
from sbkit.logs.progress import progress_bar
from sbkit.runtime.synthesizer import (
    MAX_SPEED,
    MAX_TEXT_CHARACTERS,
    MIN_SPEED,
    Reading,
    Synthesizer,
)

logger = logging.getLogger(__name__)

MAX_LINES_BYTES = 1 << 32
LINES_PER_STEP = 256  # synthesized, then written; a job that is killed loses one step
COLUMNS = ("path", "text", "duration", "speed", "speaker")
VOICE_FILE = "voice.json"  # which voice speaks the clips of a folder
SPEED_DECIMALS = 3

Row = tuple[str, ...]  # of COLUMNS


def speak(options: Namespace) -> int:
    """Write the audio of a text or of the lines of a file, and return the exit code.

    Raises SbkitError if the bundle cannot be used, or the options or the text do not fit.
    """
    if options.lines is not None:
        return _speak_lines(options)
    _check_text_options(options)
    with Synthesizer.from_options(options) as voice:
        text = options.text if options.file is None else _read_text(options.file)
        speech = voice.stream(text, options.speed)
        for note in speech.notes:
            logger.warning(f"note: {note}")
        write_wav(options.out, to_int16(np.concatenate([*speech])), voice.sample_rate)
    return 0


def _check_text_options(options: Namespace) -> None:
    for name in ("out_dir", "speeds", "part"):
        if getattr(options, name) is not None:
            option = name.replace("_", "-")
            raise ConfigError(f"`--{option}` needs --lines FILE, whose lines become clips.")
    if (options.text is None) == (options.file is None):
        raise ConfigError("`sbkit speak` needs either a text or --file. Pass one of them.")
    if options.out is None:
        raise ConfigError("`sbkit speak` needs --out FILE, the WAV to write.")
    if options.out != STANDARD:
        require_writable(options.out.parent, option="--out")


def _check_lines_options(options: Namespace) -> None:
    for name, value in (("TEXT", options.text), ("--file", options.file), ("--out", options.out)):
        if value is not None:
            raise ConfigError(f"`--lines` names the texts to speak, so leave {name} out.")
    if options.out_dir is None:
        raise ConfigError("`--lines` needs --out-dir DIR, the folder of the clips.")
    speeds = options.speeds or [options.speed]
    is_range = len(speeds) <= 2 and speeds == sorted(speeds)
    if not is_range or not all(MIN_SPEED <= speed <= MAX_SPEED for speed in speeds):
        raise ConfigError(
            "`--speeds` must be one speed, or the lowest and the highest, from "
            f"{MIN_SPEED:g} to {MAX_SPEED:g}, but is {' '.join(f'{x:g}' for x in speeds)}."
        )


def _read_text(file: Path) -> str:
    if file == STANDARD:
        content = sys.stdin.buffer.read()
    else:
        content = read_regular(file, max_bytes=8 * MAX_TEXT_CHARACTERS, subject="A text")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 ({error}). Convert it.") from error


# ---- a clip for each line


@dataclass(frozen=True)
class ClipFolder:
    """The clips of one voice, at speeds drawn by their texts.

    voice: the SHA-256 of its weights.
    """

    folder: Path
    voice: str
    speeds: Sequence[float]  # one, or the lowest and the highest

    def claim(self) -> None:
        """Write the voice and the speeds; raises ConfigError if the clips there have others."""
        file = self.folder / VOICE_FILE
        settings = {"voice": self.voice, "speeds": [*self.speeds]}
        if not file.exists():
            write_text_atomically(file, to_json(settings) + "\n")
        with parse_errors_as_sbkit_errors(file, "name a voice", fix="Choose another --out-dir."):
            present = json.loads(file.read_text(encoding="utf-8"))
            if present != settings:
                raise ConfigError(
                    f"The clips in {self.folder} are by {_describe(present)}, but this is "
                    f"{_describe(settings)}. Choose another --out-dir."
                )

    def path(self, text: str) -> Path:
        """Return the file of a text's clip."""
        digest = _digest(text)
        return self.folder / digest[:2] / f"{digest[:24]}.flac"

    def speed(self, text: str) -> float:
        """Draw the speed of a text."""
        fraction = int(_digest(text)[-8:], 16) / (1 << 32)
        low, high = self.speeds[0], self.speeds[-1]
        return round(low + fraction * (high - low), SPEED_DECIMALS)

    def row(self, text: str, seconds: float) -> Row:
        """Return the row of a finished clip."""
        path = self.path(text).relative_to(self.folder)
        return str(path), text, f"{seconds:.3f}", f"{self.speed(text):g}", _speaker(self.voice)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _speaker(voice: str) -> str:
    return f"voice-{voice[:8]}"


def _describe(settings: Mapping[str, Any]) -> str:
    speeds = " to ".join(f"{speed:g}" for speed in settings["speeds"])
    return f"{_speaker(settings['voice'])} at speed {speeds}"


def _speak_lines(options: Namespace) -> int:
    """Write a clip for each line that has none yet, and their table; return the exit code."""
    _check_lines_options(options)
    numbers_by_text = _read_lines(options.lines)
    require_writable(options.out_dir, option="--out-dir")
    voice_hash = read_checksums(options.bundle)[WEIGHTS_FILE]
    clips = ClipFolder(options.out_dir, voice_hash, options.speeds or [options.speed])
    clips.claim()
    part = options.part or WHOLE
    rows, missing = _find_clips(clips, part.of([*numbers_by_text]))
    suffix = "" if part == WHOLE else f".{part.number}-of-{part.total}"
    table = options.out_dir / f"{options.lines.stem}{suffix}.csv"
    write_text_atomically(table, _to_csv([COLUMNS, *rows]))
    num_present = len(rows)
    num_left_out = 0
    with (
        Synthesizer.from_options(options) as voice,
        progress_bar("speaking", len(missing), quiet=options.quiet) as advance,
    ):
        for start in range(0, len(missing), LINES_PER_STEP):
            texts = missing[start : start + LINES_PER_STEP]
            readings, errors = _read_whole(voice, texts)
            for text, error in errors.items():
                numbers = numbers_by_text[text]
                num_left_out += len(numbers)
                place = f"line{'s' * (len(numbers) > 1)} {listed(numbers)}"
                logger.warning(f"{options.lines}, {place}: left out. {error}")
            new_rows = _write_clips(voice, clips, readings)
            with table.open("a", encoding="utf-8") as file:
                file.write(_to_csv(new_rows))
            rows += new_rows
            advance(len(texts))
    if not rows:
        table.unlink()  # training refuses a table without rows
    minutes = sum(float(row[COLUMNS.index("duration")]) for row in rows) / 60
    logger.info(
        f"{table}: {plural(len(rows), 'clip')}, {minutes:.1f} min, {num_present:,} of them made "
        f"before; {plural(num_left_out, 'line')} left out"
    )
    return FILES_FAILED if num_left_out else 0


def _read_lines(file: Path) -> dict[str, list[int]]:
    """Return the different lines of a text, each with its line numbers."""
    numbers_by_text: dict[str, list[int]] = {}
    lines = read_text_lines(file, max_bytes=MAX_LINES_BYTES, subject="The file of --lines")
    for number, line in enumerate(lines, 1):
        numbers_by_text.setdefault(line.rstrip("\r"), []).append(number)
    return numbers_by_text


def _find_clips(clips: ClipFolder, texts: Iterable[str]) -> tuple[list[Row], list[str]]:
    """Return the rows of the texts that have a clip, and the other texts."""
    rows: list[Row] = []
    missing: list[str] = []
    for text in texts:
        seconds = declared_seconds(clips.path(text))
        if seconds:
            rows.append(clips.row(text, seconds))
        else:
            missing.append(text)
    return rows, missing


def _read_whole(
    voice: Synthesizer, texts: Iterable[str]
) -> tuple[dict[str, Reading], dict[str, DataError]]:
    """Read texts; return the error of one that the voice cannot speak as the table will say."""
    readings: dict[str, Reading] = {}
    errors: dict[str, DataError] = {}
    for text in texts:
        try:
            reading = voice.read(text)
        except DataError as error:
            errors[text] = error
            continue
        if reading.omitted:
            message = f"No training clip of this voice has {listed(reading.omitted)}."
            errors[text] = DataError(message)
        else:
            readings[text] = reading
    return readings, errors


def _write_clips(
    voice: Synthesizer, clips: ClipFolder, readings: Mapping[str, Reading]
) -> list[Row]:
    """Synthesize texts, write their clips, and return their rows."""
    speeds = [clips.speed(text) for text in readings]
    signals = voice.synthesize([*readings.values()], speeds)
    rows: list[Row] = []
    for text, signal in zip(readings, signals, strict=True):
        file = clips.path(text)
        file.parent.mkdir(exist_ok=True)
        write_flac(file, to_int16(signal), voice.sample_rate)
        rows.append(clips.row(text, samples_to_seconds(len(signal), voice.sample_rate)))
    return rows


def _to_csv(rows: Iterable[Row]) -> str:
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows(rows)
    return lines.getvalue()
