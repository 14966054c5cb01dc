"""The command `sbkit transcribe --live`: text as it is spoken, partial and final.

The audio arrives in blocks of int16, from a file, standard input or a microphone.
"""

import json
import queue
import signal
import struct
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path
from shutil import get_terminal_size
from typing import BinaryIO, TextIO, cast

import numpy as np

from sbkit.audio.decode import Block, check_rate
from sbkit.audio.io import (
    FULL_SCALE,
    STANDARD,
    Pipe,
    Samples,
    resample_blocks,
    stream_audio,
    to_int16,
)
from sbkit.base.errors import ConfigError, DataError, DeviceError
from sbkit.base.imports import require_package
from sbkit.base.messages import printable_json
from sbkit.base.process import handle_signals
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.tasks.asr.recordings import recognizer_options
from sbkit.tasks.asr.session import Event, Final, Partial, Session, StreamingRecognizer
from sbkit.tasks.vad.predict import open_detector

MICROPHONE = "mic"
LIVE_BLOCK_SECONDS = 0.1
EXTENSIBLE = 0xFFFE  # the format of a WAV that has its format in an extension of the header
MIN_UNKNOWN_BYTES = 0x7FFF_F000  # SoX declares so many in a pipe, arecord and FFmpeg more
CLEAR_LINE = "\r\033[K"  # of a terminal: go to the beginning of the line, and erase it


def transcribe_live(options: Namespace) -> int:
    """Transcribe one input while it plays; return the exit code.

    Final text goes to standard output, partial text to standard error. As JSON, all events go to
    standard output, one per line.
    """
    names = ("out", "errors", "channel", "share")
    unsupported = [f"--{name}" for name in names if getattr(options, name) is not None]
    if len(options.files) != 1 or unsupported or options.format not in ("text", "json"):
        raise ConfigError(
            "`--live` takes one FILE, - or mic, and --format text or json, but was given "
            f"{len(options.files)} with {' and '.join([options.format, *unsupported])}."
        )
    with StreamingRecognizer.load(options.bundle, **recognizer_options(options)) as recognizer:
        if not options.quiet:
            print(f"running on {recognizer.runs_on}", file=sys.stderr)
        session = Session(recognizer, detector=open_detector(options))
        show = Display(options.format == "json", options.quiet)
        (file,) = options.files
        rate = recognizer.sample_rate
        blocks = audio_blocks(
            file,
            rate,
            raw_rate=options.raw_rate,
            pace=options.pace or 0,
            keep_truncated=options.truncated == "keep",
        )
        for block in blocks:
            show(session.push(block))
        show(session.finish())
    return 0


class Display:
    """Print events as they arrive: on a terminal, partial text on one line that changes."""

    def __init__(self, as_json: bool, quiet: bool, partial: TextIO | None = None) -> None:
        self._as_json = as_json
        self._quiet = quiet
        self._partial = sys.stderr if partial is None else partial
        self._clear = CLEAR_LINE if self._partial.isatty() else ""

    def __call__(self, events: Iterable[Event]) -> None:
        for event in events:
            if self._as_json:
                line = json.dumps(event.plain(), ensure_ascii=False)
                print(printable_json(line), flush=True)
            elif isinstance(event, Final):
                print(end=self._clear, file=self._partial, flush=True)
                print(event.text, flush=True)
            elif isinstance(event, Partial) and not self._quiet:
                text = event.text
                end = "\n"
                if self._clear:  # it erases only one row, so the text must not be longer
                    text = f"{CLEAR_LINE}{text[1 - get_terminal_size().columns :]}"
                    end = ""
                print(text, end=end, file=self._partial, flush=True)


def audio_blocks(
    file: Path | str,
    sample_rate: int,
    *,
    raw_rate: int | None = None,
    pace: float = 0.0,
    keep_truncated: bool = False,
) -> Iterator[Samples]:
    """Yield the audio of an input in blocks (S,).

    Ctrl-C ends the recording of a microphone without interrupting the caller, who can finish what
    was recorded. A second Ctrl-C interrupts.

    file: a file, "-" (standard input) or "mic" (the default microphone).
    sample_rate: the rate of the blocks in Hz.
    raw_rate: the rate of standard input without a header.
    pace: the speed of a file: 1 for real time, 0 for as fast as it can be read.
    keep_truncated: whether a truncated file is read to its end instead of being refused.
    """
    file = str(file)
    if file == MICROPHONE:
        return _microphone(sample_rate)
    if file == str(STANDARD):
        return _stdin(cast("BufferedReader", sys.stdin.buffer), sample_rate, raw_rate)
    file_blocks = stream_audio(
        Path(file), sample_rate, LIVE_BLOCK_SECONDS, keep_truncated=keep_truncated
    )
    return _paced(file_blocks, sample_rate, pace) if pace else file_blocks


def _paced(blocks: Iterable[Samples], sample_rate: int, pace: float) -> Iterator[Samples]:
    """Yield each block at the time when a speaker would have finished it."""
    start = time.monotonic()
    samples = 0
    for block in blocks:
        samples += len(block)
        due = start + samples_to_seconds(samples, sample_rate) / pace
        time.sleep(max(0.0, due - time.monotonic()))
        yield block


def _stdin(content: BufferedReader, sample_rate: int, raw_rate: int | None) -> Iterator[Samples]:
    """Yield blocks of a pipe as they arrive; PyAV would wait for the first 64 kB of a WAV."""
    if raw_rate is None and not content.peek(4).startswith(b"RIFF"):
        # A read returns what has arrived; a buffered one would wait for a full buffer.
        return stream_audio(Pipe(content.read1), sample_rate, LIVE_BLOCK_SECONDS)
    if raw_rate is not None:
        rate, blocks = raw_rate, _read_pcm(content, raw_rate)
    else:
        rate, blocks = _read_wav(content)
    check_rate("standard input", rate)
    return map(to_int16, resample_blocks(blocks, sample_rate))


def _read_wav(content: BinaryIO) -> tuple[int, Iterator[Block]]:
    """Return the rate and the blocks of piped 16-bit WAV."""
    content.read(len(b"RIFF1234WAVE"))
    form = b""
    while (chunk := content.read(8))[:4] != b"data" and len(chunk) == 8:
        size = int.from_bytes(chunk[4:], "little")
        if size >= MIN_UNKNOWN_BYTES:  # all of the input
            break
        body = content.read(size + size % 2)
        form = body if chunk[:4] == b"fmt " else form
    if chunk[:4] != b"data" or len(chunk) < 8:
        raise DataError("The WAV on standard input ends in its header.")
    kind, channels, rate, bits = struct.unpack_from("<HHI6xH", form.ljust(16, b"\0"))
    if kind == EXTENSIBLE:
        kind = int.from_bytes(form[24:26], "little")
    if (kind, bits) != (1, 16) or not channels:
        raise DataError(
            "A WAV on standard input must have 16 bits. Convert it: ffmpeg -i ... -f s16le -ac 1 "
            "-ar 16000 - | sbkit transcribe ... - --live --raw-rate 16000"
        )
    # A program that writes into a pipe may declare no samples, or the most that it can, because it
    # does not know their number when it writes the header.
    num_bytes = int.from_bytes(chunk[4:], "little")
    is_known = 0 < num_bytes < MIN_UNKNOWN_BYTES
    num_bytes = num_bytes if is_known else sys.maxsize
    return rate, _read_pcm(content, rate, channels=channels, num_bytes=num_bytes)


def _read_pcm(
    content: BinaryIO, rate: int, *, channels: int = 1, num_bytes: int = sys.maxsize
) -> Iterator[Block]:
    """Yield blocks of up to ``num_bytes`` of little-endian int16."""
    block_bytes = 2 * channels * seconds_to_samples(LIVE_BLOCK_SECONDS, rate)
    while block := content.read(min(block_bytes, num_bytes)):
        num_bytes -= len(block)
        count = len(block) // (2 * channels) * channels
        values = np.frombuffer(block, "<i2", count).reshape(-1, channels)
        yield Block(rate, values.astype(np.float32).mean(1) / np.float32(FULL_SCALE))


def _microphone(sample_rate: int) -> Iterator[Samples]:
    """Record until Ctrl-C; yield all blocks recorded before it."""
    try:
        sounddevice = require_package("sounddevice", extra="mic")
    except OSError as error:  # on Linux, the package does not contain PortAudio
        raise DeviceError(
            f"PortAudio is missing ({error}). On Debian: apt-get install libportaudio2"
        ) from error
    recorded: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None: the recording has ended
    is_interrupted = False

    def end_recording(*_: object) -> None:
        nonlocal is_interrupted
        if is_interrupted:
            raise KeyboardInterrupt
        is_interrupted = True
        recorded.put(None)

    with ExitStack() as stack:
        try:
            stream = sounddevice.RawInputStream(
                samplerate=sample_rate,
                blocksize=seconds_to_samples(LIVE_BLOCK_SECONDS, sample_rate),
                channels=1,
                dtype="int16",
                callback=lambda data, *_: recorded.put(bytes(data)),
            )
            stack.enter_context(stream)
        except sounddevice.PortAudioError as error:
            raise DeviceError(
                f"The default microphone cannot record at {sample_rate} Hz ({error})."
            ) from error
        stack.enter_context(handle_signals((signal.SIGINT,), end_recording))
        while (block := recorded.get()) is not None:
            yield np.frombuffer(block, np.int16)
