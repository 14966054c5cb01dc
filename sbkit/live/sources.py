"""Where live speech comes from: a file, standard input or a microphone, in blocks of int16."""

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
from sbkit.base.errors import SbkitError
from sbkit.base.imports import require_package
from sbkit.base.units import samples_to_seconds, seconds_to_samples

STANDARD_INPUT, MICROPHONE = "-", "mic"
BLOCK_SECONDS = 0.1


def live_blocks(
    name: str, sample_rate: int, *, raw_rate: int | None = None, pace: float = 0.0
) -> Iterator[Samples]:
    """Yield blocks (S,) at a rate in Hz, from a file, "-" or "mic", until it ends.

    raw_rate: of standard input without a header; pace: of a file, 1 for real time, 0 for as fast as
    it can be read. A microphone ends with Ctrl-C.

    Raises:
        SbkitError: it is no audio, or there is no package for microphones.
    """
    if name == MICROPHONE:
        return _microphone(sample_rate)
    if name == STANDARD_INPUT:
        blocks, rate = _standard_input(sys.stdin.buffer, raw_rate)
        check_rate("standard input", rate)
        return map(to_int16, resample_blocks(blocks, rate, sample_rate))
    blocks_of_file = stream_audio(Path(name), sample_rate, BLOCK_SECONDS)
    return _paced(blocks_of_file, sample_rate, pace) if pace else blocks_of_file


def _paced(blocks: Iterable[Samples], sample_rate: int, pace: float) -> Iterator[Samples]:
    """Yield each block when it has been said."""
    begin, samples = time.monotonic(), 0
    for block in blocks:
        samples += len(block)
        said = begin + samples_to_seconds(samples, sample_rate) / pace
        time.sleep(max(0.0, said - time.monotonic()))
        yield block


def _standard_input(content: BinaryIO, raw_rate: int | None) -> tuple[Iterator[Signal], int]:
    """Return blocks of 16-bit samples as they are piped, channels averaged, and their rate."""
    if raw_rate is not None:
        return _pcm(lambda frames: content.read(2 * frames), raw_rate, channels=1), raw_rate
    with suppress(wave.Error, EOFError):
        file = wave.open(content)  # noqa: SIM115, standard input is not ours to close
        rate = file.getframerate()
        if file.getsampwidth() == 2:
            return _pcm(file.readframes, rate, channels=file.getnchannels()), rate
    raise SbkitError(
        "Standard input must be WAV of 16 bits, or samples of 16 bits (little-endian, mono) with "
        "--raw-rate HZ, to be transcribed as it comes, but is neither. Convert it: ffmpeg -i ... "
        "-f s16le -ac 1 -ar 16000 -"
    )


def _pcm(read: Callable[[int], bytes], rate: int, *, channels: int) -> Iterator[Signal]:
    """Yield blocks (S,) of the little-endian int16 that ``read`` gives by frames."""
    while block := read(seconds_to_samples(BLOCK_SECONDS, rate)):
        count = len(block) // (2 * channels) * channels
        values = np.frombuffer(block, "<i2", count).reshape(-1, channels)
        yield values.astype(np.float32).mean(1) / np.float32(FULL_SCALE)


def require_sounddevice() -> Any:
    """Import sounddevice; raises SbkitError where it, or PortAudio, is not there."""
    try:
        return require_package("sounddevice", extra="mic")
    except OSError as error:  # its wheels for Linux have no PortAudio
        raise SbkitError(
            f"Microphone and loudspeaker must be used by PortAudio, but there is none ({error}). "
            "Install it, on Debian: apt-get install libportaudio2"
        ) from error


def _microphone(sample_rate: int) -> Iterator[Samples]:
    """Record until Ctrl-C."""
    recorded: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    blocksize = seconds_to_samples(BLOCK_SECONDS, sample_rate)
    stream = require_sounddevice().RawInputStream(
        samplerate=sample_rate,
        blocksize=blocksize,
        channels=1,
        dtype="int16",
        callback=lambda data, *_: recorded.put(bytes(data)),
    )
    with suppress(KeyboardInterrupt), stream:
        while True:
            yield np.frombuffer(recorded.get(), np.int16)
