"""`sbkit speak`: a text as a WAV, or each line of a file as a clip, with a table to train on.

lines -> symbols, or the reason why a line is left out -> audio, in batches -> FLAC -> table

A clip is named after a hash of its line, and has its name only when it is whole. So a job that is
started again finds the clips of its lines, wherever they stand in the file.
"""

import csv
import hashlib
import io
import json
import logging
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
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
VOICE_FILE = "voice.json"  # what all clips of a folder have in common


def speak(options: Namespace) -> int:
    """Write the audio of a text or of the lines of a file, and return the exit code.

    Raises SbkitError if the bundle cannot be used, or the options or the text do not fit.
    """
    _check_options(options)
    if options.lines is not None:
        return _speak_lines(options)
    if options.out != STANDARD:
        require_writable(options.out.parent, option="--out")
    with Synthesizer.from_options(options) as voice:
        text = options.text if options.file is None else _read_text(options.file)
        speech = voice.stream(text, 1.0 if options.speed is None else options.speed)
        for note in speech.notes:
            logger.warning(f"note: {note}")
        write_wav(options.out, to_int16(np.concatenate([*speech])), voice.sample_rate)
    return 0


def _check_options(options: Namespace) -> None:
    of_text = {"TEXT": options.text, "--file": options.file, "--out": options.out}
    of_text["--speed"] = options.speed
    of_lines = {"--out-dir": options.out_dir, "--speeds": options.speeds, "--part": options.part}
    with_lines = options.lines is not None
    for name, value in (of_text if with_lines else of_lines).items():
        if value is not None:
            relation = "with" if with_lines else "without"
            raise ConfigError(f"`{name}` cannot be used {relation} --lines. Leave it out.")
    if not with_lines and (options.text is None) == (options.file is None):
        raise ConfigError("`sbkit speak` needs either a text or --file. Pass one of them.")
    if (options.out_dir if with_lines else options.out) is None:
        name = "--out-dir DIR with --lines" if with_lines else "--out FILE"
        raise ConfigError(f"`sbkit speak` needs {name}, for what it writes.")
    speeds = options.speeds or [1.0]
    if len(speeds) > 2 or not MIN_SPEED <= speeds[0] <= speeds[-1] <= MAX_SPEED:
        raise ConfigError(
            "`--speeds` must be one speed, or the lowest and the highest, from "
            f"{MIN_SPEED:g} to {MAX_SPEED:g}, but is {' '.join(f'{speed:g}' for speed in speeds)}."
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


@dataclass
class Line:
    """A line of a file; its text determines the name and the speed of its clip."""

    text: str
    numbers: list[int] = field(default_factory=list)  # of all lines with this text, from 1
    seconds: float = 0.0  # of the clip; 0 if there is none

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def clip(self) -> str:
        return f"{self.digest[:2]}/{self.digest[:24]}.flac"

    def speed(self, speeds: Sequence[float]) -> float:
        """Draw a speed between the first and the last."""
        fraction = int(self.digest[-8:], 16) / (1 << 32)
        return round(speeds[0] + fraction * (speeds[-1] - speeds[0]), 3)


def _speak_lines(options: Namespace) -> int:
    """Write a clip for each line that has none yet, and their table; return the exit code."""
    folder: Path = options.out_dir
    speeds = options.speeds or [1.0]
    part = options.part or WHOLE
    lines = part.of(_read_lines(options.lines))
    require_writable(folder, option="--out-dir")
    speaker = f"voice-{read_checksums(options.bundle)[WEIGHTS_FILE][:12]}"
    _claim(folder, {"speaker": speaker, "speeds": speeds})
    for line in lines:
        line.seconds = declared_seconds(folder / line.clip)
    missing = [line for line in lines if not line.seconds]
    suffix = "" if part == WHOLE else f".{part.number}-of-{part.total}"
    table = folder / f"{options.lines.stem}{suffix}.csv"
    try:
        with (
            Synthesizer.from_options(options) as voice,
            progress_bar("speaking", len(missing), quiet=options.quiet) as advance,
        ):
            for start in range(0, len(missing), LINES_PER_STEP):
                step = missing[start : start + LINES_PER_STEP]
                for line, error in _write_clips(voice, step, folder, speeds):
                    numbers = f"line{'s' * (len(line.numbers) > 1)} {listed(line.numbers)}"
                    logger.warning(f"{options.lines}, {numbers}: left out. {error}")
                advance(len(step))
    finally:  # also of a run that is interrupted
        finished = [line for line in lines if line.seconds]
        rows = [(x.clip, x.text, f"{x.seconds:.3f}", x.speed(speeds), speaker) for x in finished]
        content = io.StringIO()
        csv.writer(content, lineterminator="\n").writerows([COLUMNS, *rows])
        if rows:  # training refuses a table without any
            write_text_atomically(table, content.getvalue())
    duration = timedelta(seconds=round(sum(line.seconds for line in finished)))
    num_left_out = sum(len(line.numbers) for line in lines if not line.seconds)
    logger.info(
        f"{table}: {plural(len(finished), 'clip')}, {duration} of speech, "
        f"{len(lines) - len(missing):,} of them from before; "
        f"{plural(num_left_out, 'line')} left out"
    )
    return FILES_FAILED if num_left_out else 0


def _read_lines(file: Path) -> list[Line]:
    """Return the different lines of a file."""
    lines: dict[str, Line] = {}
    texts = read_text_lines(file, max_bytes=MAX_LINES_BYTES, subject="The file of --lines")
    for number, text in enumerate((text.rstrip("\r") for text in texts), 1):
        lines.setdefault(text, Line(text)).numbers.append(number)
    return [*lines.values()]


def _claim(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write what all clips of a folder have in common; raises ConfigError if it has others."""
    file = folder / VOICE_FILE
    if not file.exists():
        write_text_atomically(file, to_json(settings) + "\n")
    with parse_errors_as_sbkit_errors(file, "name a voice", fix="Choose another --out-dir."):
        present = json.loads(file.read_text(encoding="utf-8"))
    if present != settings:
        raise ConfigError(
            f"All clips of a folder must have one voice and range of speeds, but {folder} has "
            f"{to_json(present)}, not {to_json(settings)}. Choose another --out-dir."
        )


def _write_clips(
    voice: Synthesizer, lines: Sequence[Line], folder: Path, speeds: Sequence[float]
) -> Iterator[tuple[Line, DataError]]:
    """Write the clips of lines; yield each line that the voice cannot speak as it is written."""
    readings: list[Reading] = []
    readable: list[Line] = []
    for line in lines:
        try:
            reading = voice.read(line.text)
            if reading.omitted:
                names = listed(reading.omitted)
                raise DataError(f"No training clip of this voice has {names}.")
        except DataError as error:
            yield line, error
        else:
            readings.append(reading)
            readable.append(line)
    signals = voice.synthesize(readings, [line.speed(speeds) for line in readable])
    for line, signal in zip(readable, signals, strict=True):
        file = folder / line.clip
        file.parent.mkdir(exist_ok=True)
        write_flac(file, to_int16(signal), voice.sample_rate)
        line.seconds = samples_to_seconds(len(signal), voice.sample_rate)
