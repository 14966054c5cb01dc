"""Sources of streaming speech in blocks of int16: files, standard input, a microphone."""

import queue
import sys
import time
import wave
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sbkit.audio.io import FULL_SCALE, Samples, check_rate, stream_audio, to_int16
from sbkit.audio.resample import Signal, resample_blocks
from sbkit.base.errors import DataError, DeviceError
from sbkit.base.imports import require_package
from sbkit.base.units import samples_to_seconds, seconds_to_samples

STANDARD_INPUT, MICROPHONE = "-", "mic"
BLOCK_SECONDS = 0.1


def audio_blocks(
    source: str, sample_rate: int, *, raw_rate: int | None = None, pace: float = 0.0
) -> Iterator[Samples]:
    """Yield blocks (S,) at a rate in Hz, from a file, "-" (standard input) or "mic", until it ends.

    A microphone ends with Ctrl-C.

    raw_rate: the rate of standard input without a header.
    pace: the speed of a file: 1 for real time, 0 for as fast as it can be read.

    Raises:
        SbkitError: the source is not audio, or the package for microphones is missing.
    """
    if source == MICROPHONE:
        return _microphone(sample_rate)
    if source == STANDARD_INPUT:
        blocks, rate = _standard_input(sys.stdin.buffer, raw_rate)
        check_rate("standard input", rate)
        return map(to_int16, resample_blocks(blocks, rate, sample_rate))
    file_blocks = stream_audio(Path(source), sample_rate, BLOCK_SECONDS)
    return _paced(file_blocks, sample_rate, pace) if pace else file_blocks


def _paced(blocks: Iterable[Samples], sample_rate: int, pace: float) -> Iterator[Samples]:
    """Yield each block when it would have been spoken."""
    begin = time.monotonic()
    samples = 0
    for block in blocks:
        samples += len(block)
        due = begin + samples_to_seconds(samples, sample_rate) / pace
        time.sleep(max(0.0, due - time.monotonic()))
        yield block


def _standard_input(content: BinaryIO, raw_rate: int | None) -> tuple[Iterator[Signal], int]:
    """Return blocks of piped 16-bit samples, with channels averaged, and their rate."""
    if raw_rate is not None:
        return _pcm(lambda frames: content.read(2 * frames), raw_rate, channels=1), raw_rate
    with suppress(wave.Error, EOFError):
        file = wave.open(content)  # noqa: SIM115, standard input is not ours to close
        rate = file.getframerate()
        if file.getsampwidth() == 2:
            return _pcm(file.readframes, rate, channels=file.getnchannels()), rate
    raise DataError(
        "To be transcribed while it arrives, standard input must be 16-bit WAV, or 16-bit samples "
        "(little-endian, mono) with --raw-rate HZ. Convert it: ffmpeg -i ... -f s16le -ac 1 -ar "
        "16000 -"
    )


def _pcm(read: Callable[[int], bytes], rate: int, *, channels: int) -> Iterator[Signal]:
    """Yield blocks (S,) of little-endian int16; ``read`` takes a number of frames."""
    while block := read(seconds_to_samples(BLOCK_SECONDS, rate)):
        count = len(block) // (2 * channels) * channels
        values = np.frombuffer(block, "<i2", count).reshape(-1, channels)
        yield values.astype(np.float32).mean(1) / np.float32(FULL_SCALE)


def _microphone(sample_rate: int) -> Iterator[Samples]:
    """Record until Ctrl-C."""
    recorded: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    stream = require_sounddevice().RawInputStream(
        samplerate=sample_rate,
        blocksize=seconds_to_samples(BLOCK_SECONDS, sample_rate),
        channels=1,
        dtype="int16",
        callback=lambda data, *_: recorded.put(bytes(data)),
    )
    with suppress(KeyboardInterrupt), stream:
        while True:
            yield np.frombuffer(recorded.get(), np.int16)


def require_sounddevice() -> Any:
    """Import sounddevice; raises SbkitError if it or PortAudio is missing."""
    try:
        return require_package("sounddevice", extra="mic")
    except OSError as error:  # its wheels for Linux have no PortAudio
        raise DeviceError(
            f"Microphone and loudspeaker need PortAudio, which is missing ({error}). Install it, "
            "on Debian: apt-get install libportaudio2"
        ) from error
