"""Hostile audio, given to a healthy bundle."""

import os
import struct
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from tests.attacks.case import Case, Place


def all_audio() -> Iterator[Case]:
    """List every hostile file of audio."""
    for name, make in FILES.items():
        yield Case("audio", name, partial(_heard, make), harmless=name in HARMLESS)
    for name, content in _mangled():
        yield Case("mangled", name, partial(_heard, partial(_write, content)), harmless=True)


def _heard(make: Callable[[Path], Any], place: Place) -> list[str]:
    place.clip.unlink()
    make(place.clip)
    return place.transcribe()


def encoded(kind: str, rate: int = 16_000, seconds: float = 1.0, **more: Any) -> bytes:
    """Write noise in a format of libsndfile."""
    samples = np.random.default_rng(0).integers(-3000, 3000, round(rate * seconds)).astype(np.int16)
    content = BytesIO()
    soundfile.write(content, samples, rate, format=kind, **more)
    return content.getvalue()


def wav(
    *, rate: int = 16_000, channels: int = 1, size: int = 2000, data: bytes = b"\0" * 1000
) -> bytes:
    """Write a wav with a header of choice."""
    width = channels * 2
    head = struct.pack(
        "<HHIIHH", 1, channels, rate, (rate * width) & 0xFFFFFFFF, width & 0xFFFF, 16
    )
    chunks = b"fmt " + struct.pack("<I", 16) + head + b"data" + struct.pack("<I", size) + data
    return b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WAVE" + chunks


def _with_length(frames: int) -> bytes:
    """Write a FLAC whose header says another number of samples: 36 bits at byte 21."""
    content = bytearray(encoded("FLAC"))
    value = int.from_bytes(content[18:26], "big") >> 36 << 36 | frames
    content[18:26] = value.to_bytes(8, "big")
    return bytes(content)


def _half(kind: str) -> bytes:
    content = encoded(kind)
    return content[: len(content) // 2]


def _mangled() -> Iterator[tuple[str, bytes]]:
    """Write audio at its limits, and files of every format with some bytes that are others."""
    for rate, channels, kind in product((4_000, 192_000), (1, 8), ("WAV", "FLAC", "CAF")):
        for seconds in (0.0, 1 / rate, 0.01, 1.0):
            samples = np.zeros((round(rate * seconds), channels), np.int16)
            content = BytesIO()
            soundfile.write(content, samples, rate, format=kind)
            name = f"{seconds * rate:.0f} samples of {channels} at {rate} Hz, {kind}"
            yield name, content.getvalue()
    for name, value in (("NaN", np.nan), ("infinity", np.inf), ("1e30", 1e30), ("2", 2.0)):
        content = BytesIO()
        soundfile.write(content, np.full(9000, value), 16_000, format="WAV", subtype="FLOAT")
        yield f"floats of {name}", content.getvalue()
    random = np.random.default_rng(7)
    for kind, number in product((*KINDS, "OPUS"), range(20)):
        more = {"subtype": "OPUS"} if kind == "OPUS" else {}
        spoiled = bytearray(encoded("OGG" if kind == "OPUS" else kind, seconds=0.5, **more))
        head = min(len(spoiled), 120 if number < 15 else len(spoiled))
        for place in random.integers(0, head, 1 + number % 5):
            spoiled[place] = random.integers(256)
        yield f"{kind} spoiled, {number}", bytes(spoiled)


def _write(content: bytes, file: Path) -> None:
    file.write_bytes(content)


KINDS = ("AIFF", "AU", "NIST", "RF64", "W64", "VOC", "CAF", "WAV", "FLAC", "OGG", "MP3", "IRCAM")
CONTENTS: dict[str, bytes] = {
    "three hours in 1 kB": wav(size=16_000 * 2 * 3600 * 3),
    "four gigabytes in 1 kB": wav(size=2**32 - 1),
    "1 Hz": wav(rate=1, size=8000, data=b"\1" * 8000),
    "0 Hz": wav(rate=0),
    "2**31 - 1 Hz": wav(rate=2**31 - 1),
    "65535 channels": wav(channels=65_535),
    "no channels": wav(channels=0),
    "FLAC of unknown length": _with_length(0),
    "FLAC of 2**36 - 1 samples": _with_length(2**36 - 1),
    "FLAC at 1 Hz": encoded("FLAC", rate=1, seconds=20_000.0),
    "no audio": b"hello",
    "nothing": b"",
    "random": os.urandom(5000),
    "an empty wav": wav(size=0, data=b""),
    "zip": b"PK\3\4" + b"\0" * 1000,
    **{f"half of {kind}": _half(kind) for kind in KINDS},
}
# What streams write, which do not know their length when they begin.
HARMLESS = {"FLAC of unknown length", "four gigabytes in 1 kB"}
FILES: dict[str, Callable[[Path], Any]] = {
    **{name: partial(_write, content) for name, content in CONTENTS.items()},
    "a pipe": os.mkfifo,
    "/dev/zero": lambda file: file.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "a link to itself": lambda file: file.symlink_to(file.name),
    "missing": lambda file: None,
}
