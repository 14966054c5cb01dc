"""`sbkit speak`: a text as a WAV, or each line of a file as a clip, with a table to train on.

lines -> symbols, or the reason why a line is left out -> audio, in batches -> FLAC -> table

A line that occurs several times has one clip.
"""

import hashlib
import logging
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sbkit.base.errors import PARTLY_DONE, ConfigError, DataError
from sbkit.base.files import read_text_lines, require_writable, to_json
from sbkit.base.messages import listed, plural
from sbkit.cli.arguments import Parser
from sbkit.cli.clip_table import ClipTable, OutputRow, Share, open_clip_table

if TYPE_CHECKING:
    from sbkit.tasks.tts.predict import Reading

logger = logging.getLogger(__name__)

LINES_PER_BATCH = 256  # synthesized, then written; a job that is killed loses one batch
CLIP_COLUMNS = ("path", "text", "duration", "speed", "speaker")


def add_commands(parser: Parser) -> None:
    """Add `speak`."""
    groups = "model runtime import quiet share"
    is_so = {"opens_bundle": True, "is_intermixed": True}
    add = parser.add_command("speak", speak, "write text as speech", groups, **is_so)
    add("text", metavar="TEXT", nargs="?", help="the text to speak")
    add("--file", metavar="FILE", type=Path, help="a UTF-8 text instead; - is standard input")
    add("--out", metavar="FILE", type=Path, help="the WAV; - is standard output")
    add("--speed", metavar="X", type=float, help="from 0.25 to 4 (default: 1)")
    lines = "a UTF-8 text whose lines become clips, with a table to train on"
    add("--lines", metavar="FILE", type=Path, help=lines)
    add("--out-dir", metavar="DIR", type=Path, help="the folder of these clips")
    speeds = "the lowest and the highest speed of these clips; each has one between them"
    add("--speeds", metavar=("LOW", "HIGH"), type=float, nargs=2, help=speeds)


def speak(options: Namespace) -> int:
    """Write the audio of a text or of the lines of a file, and return the exit code."""
    import numpy as np

    from sbkit.audio.io import STANDARD, to_int16, write_wav
    from sbkit.tasks.tts.predict import Synthesizer

    _check_options(options)
    if options.lines is not None:
        return _speak_lines(options)
    if options.out != STANDARD:
        require_writable(options.out.parent, option="--out")
    with Synthesizer.from_options(options) as voice:
        text = options.text
        if text is None:
            is_standard = options.file == STANDARD
            content = sys.stdin.buffer.read() if is_standard else options.file.read_bytes()
            try:
                text = content.decode()
            except UnicodeDecodeError as error:
                raise DataError(f"{options.file} is not UTF-8 ({error}).") from error
        speech = voice.stream(text, 1.0 if options.speed is None else options.speed)
        for note in speech.notes:
            logger.warning(f"note: {note}")
        write_wav(options.out, to_int16(np.concatenate([*speech])), voice.sample_rate)
    return 0


def _check_options(options: Namespace) -> None:
    """Raise ConfigError for options that do not fit."""
    from sbkit.tasks.tts.predict import MAX_SPEED, MIN_SPEED

    for_text = {"TEXT": options.text, "--file": options.file, "--out": options.out}
    for_text["--speed"] = options.speed
    for_lines = {"--out-dir": options.out_dir, "--speeds": options.speeds, "--share": options.share}
    excluded, relation = (for_lines, "without") if options.lines is None else (for_text, "with")
    for name, value in excluded.items():
        if value is not None:
            raise ConfigError(f"`{name}` cannot be used {relation} --lines.")
    if options.lines is None and (options.text is None) == (options.file is None):
        raise ConfigError("`sbkit speak` needs either a text or --file. Pass one of them.")
    if options.lines is None and options.out is None:
        raise ConfigError("`sbkit speak` needs --out FILE, for the audio.")
    if options.lines is not None and options.out_dir is None:
        raise ConfigError("`sbkit speak` needs --out-dir DIR with --lines, for the clips.")
    lowest, highest = options.speeds or (1.0, 1.0)
    if not MIN_SPEED <= lowest <= highest <= MAX_SPEED:
        raise ConfigError(
            f"`--speeds` must be the lowest and the highest, from {MIN_SPEED:g} to {MAX_SPEED:g}, "
            f"but is {lowest:g} {highest:g}."
        )


# ---- a clip for each line


def _speak_lines(options: Namespace) -> int:
    """Write a clip for each line that has none yet, and their table; return the exit code."""
    from sbkit.base.checksums import read_checksums
    from sbkit.bundle.config import WEIGHTS_FILE

    folder: Path = options.out_dir
    lines = _read_lines(options.lines)
    share = options.share or Share()
    suffix = f".{share.number}-of-{share.total}" if options.share else ""
    require_writable(folder, option="--out-dir")
    settings = {
        "weights": read_checksums(options.bundle)[WEIGHTS_FILE],
        "speeds": options.speeds or [1.0, 1.0],
    }
    with open_clip_table(folder / f"{options.lines.stem}{suffix}.csv", settings) as table:
        texts = table.unfinished(share.of([*lines]))
        num_left_out = _write_clips(texts, table, settings, options, lines) if texts else 0
        rows = table.sorted_rows()
        minutes = sum(row["duration"] for row in rows) / 60
        left_out = f"{plural(num_left_out, 'line')} left out"
        summary = f"{plural(len(rows), 'clip')} ({minutes:.1f} min); {left_out}"
        table.write(CLIP_COLUMNS, rows, summary)
    return PARTLY_DONE if num_left_out else 0


def _read_lines(file: Path) -> dict[str, int]:
    """Return the different lines of a file, and the number of the first one of each."""
    lines: dict[str, int] = {}
    texts = read_text_lines(file, subject="The file of --lines")
    for number, text in enumerate(texts, 1):
        lines.setdefault(text.rstrip("\r"), number)
    return lines


def _write_clips(
    texts: Sequence[str],
    table: ClipTable,
    settings: Mapping[str, Any],
    options: Namespace,
    numbers: Mapping[str, int],
) -> int:
    """Add the clip of each text to a table; return how many texts the voice cannot speak."""
    from sbkit.audio.io import encode_audio, to_int16
    from sbkit.base.files import write_bytes_atomically
    from sbkit.base.units import samples_to_seconds
    from sbkit.logs.progress import progress_bar
    from sbkit.tasks.tts.predict import Synthesizer

    num_left_out = 0
    progress = progress_bar("speaking", len(texts))
    with Synthesizer.from_options(options) as voice, progress as advance:
        for start in range(0, len(texts), LINES_PER_BATCH):
            batch = texts[start : start + LINES_PER_BATCH]
            readings: dict[str, Reading] = {}
            for text in batch:
                try:
                    reading = voice.read(text)
                    if reading.omitted:
                        missing = listed(reading.omitted)
                        raise DataError(f"No training clip of this voice has {missing}.")
                    readings[text] = reading
                except DataError as error:
                    logger.warning(f"{options.lines}, line {numbers[text]}: left out. {error}")
            num_left_out += len(batch) - len(readings)
            clips = [_plan_clip(text, settings) for text in readings]
            signals = voice.synthesize([*readings.values()], [clip["speed"] for clip in clips])
            for clip, signal in zip(clips, signals, strict=True):
                file = options.out_dir / clip["path"]
                file.parent.mkdir(exist_ok=True)
                flac = encode_audio(to_int16(signal), voice.sample_rate, "FLAC")
                write_bytes_atomically(file, flac)
                seconds = samples_to_seconds(len(signal), voice.sample_rate)
                table.add(clip["text"], [{**clip, "duration": round(seconds, 3)}])
            advance(len(batch))
    return num_left_out


def _plan_clip(text: str, settings: Mapping[str, Any]) -> OutputRow:
    """Return the row of a text's clip, without its duration.

    Its file and speed follow from a hash of text, voice and speeds, so voices can share a folder.
    """
    digest = hashlib.sha256(to_json([text, settings]).encode()).hexdigest()
    lowest, highest = settings["speeds"]
    fraction = int(digest[-8:], 16) / (1 << 32)
    return {
        "path": f"{digest[:2]}/{digest[:24]}.flac",
        "text": text,
        "speed": round(lowest + fraction * (highest - lowest), 3),
        "speaker": f"voice-{settings['weights'][:12]}",
    }
