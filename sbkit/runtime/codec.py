"""A codec that is ready to run: audio to codes and back, whole or as it comes.

The same windows are run however the audio comes: each a step, with as much before and after it as
the network sees. So what comes block by block is, bit for bit, what comes of the whole, and long
audio takes no more memory. Every index is checked before the network gets it.

Legend: S samples, U frames of codes, G codebooks.
"""

import argparse
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from sbkit.audio.io import (
    FULL_SCALE,
    Samples,
    convert_array,
    read_audio,
    to_int16,
    to_samples,
    write_wav,
)
from sbkit.base.checksums import listed_checksums
from sbkit.base.files import require_writable
from sbkit.bundle.config import WEIGHTS_FILE
from sbkit.models.code_space import Coded, Codes, CodeSpace, read_codes, write_codes
from sbkit.runtime.runtimes import GraphModel

STEP_SECONDS = 5.0
Array = npt.NDArray[Any]


class Codec(GraphModel):
    """Code audio, and decode codes.

    Attributes:
        space: of the codes.
        frame: samples of one.
        fingerprint: that files of its codes begin with.
    """

    command: ClassVar[str] = "encode"

    def __init__(
        self, folder: Path | str, *, step_seconds: float = STEP_SECONDS, **options: Any
    ) -> None:
        """Open a bundle as `GraphModel` does.

        step_seconds: how much is coded at a time, beside what the network sees before and after.
        """
        super().__init__(folder, **options)
        settings = self.settings
        self.space = CodeSpace(settings["groups"], tuple(settings["levels"]))
        self.frame: int = settings["frame"]
        self._contexts = (settings["encoder_context"], settings["decoder_context"])
        self._step = max(1, round(step_seconds * self.sample_rate / self.frame))
        rates = {"sample_rate": self.sample_rate, "frame": self.frame}
        weights = listed_checksums(Path(folder))[WEIGHTS_FILE]
        self.fingerprint = self.space.fingerprint(**rates, weights=weights)

    def encode(self, audio: Path | str | Array, sample_rate: int | None = None) -> Coded:
        """Code a file, or an array at ``sample_rate``, as `to_samples` takes it.

        Raises SbkitError: the file is no audio, or the array no finite samples.
        """
        if isinstance(audio, Path | str):
            samples = read_audio(audio, self.sample_rate)
        else:
            samples = np.concatenate([*convert_array(audio, sample_rate, self.sample_rate)])
        return Coded(np.concatenate([*self.encode_stream([samples])]), len(samples))

    def encode_stream(self, blocks: Iterable[Samples]) -> Iterator[Codes]:
        """Yield the codes (U, G) of blocks at the codec's rate, as `to_samples` takes them."""
        samples = map(to_samples, blocks)
        for window, first, end in windows(samples, self.frame, self._step, self._contexts[0]):
            audio = (window.astype(np.float32) / np.float32(FULL_SCALE))[None]
            codes, _ = self.run("encode", audio, np.array([len(window)]))
            yield self.space.check(codes[0], of="what the model encodes")[first:end]

    def decode(self, coded: Coded) -> Samples:
        """Return the audio of codes, (S,) int16; raises SbkitError for indices out of range."""
        codes = self.space.check(coded.codes, of="`codes`")
        return np.concatenate([*self.decode_stream([codes])])[: coded.samples]

    def decode_stream(self, blocks: Iterable[Codes]) -> Iterator[Samples]:
        """Yield the audio of blocks of codes (U, G), as soon as it is known; raises SbkitError."""
        checked = (self.space.check(each, of="a block of codes") for each in blocks)
        for window, first, end in windows(checked, 1, self._step, self._contexts[1]):
            (audio,) = self.run("decode", window[None])
            yield to_int16(audio[0, first * self.frame : end * self.frame])


def windows(
    blocks: Iterable[Array], unit: int, step: int, context: int
) -> Iterator[tuple[Array, int, int]]:
    """Cut what comes into windows of ``step`` units, with ``context`` units to each side.

    Yield each with the first unit that is its own, and the one past the last.
    """
    waiting: Array = np.empty(0)
    before = 0  # units that wait, and that the last window had
    for block in chain(blocks, [None]):
        if block is not None:
            waiting = np.concatenate([waiting, block]) if len(waiting) else block
        fewest = 1 if block is None else unit * (step + context)
        while len(waiting) - unit * before >= fewest:
            yield waiting[: unit * (before + step + context)], before, before + step
            gone = max(0, before + step - context)
            waiting, before = waiting[unit * gone :], before + step - gone


def encode_file(options: argparse.Namespace) -> int:
    """Run `sbkit encode`: write the codes of an audio file."""
    require_writable(options.out.parent, option="--out")
    with Codec.from_options(options) as codec:
        write_codes(options.out, codec.encode(options.file), codec.space, codec.fingerprint)
    return 0


def decode_file(options: argparse.Namespace) -> int:
    """Run `sbkit decode`: write the audio of a file of codes, as WAV."""
    require_writable(options.out.parent, option="--out")
    with Codec.from_options(options) as codec:
        coded = read_codes(options.file, codec.space, codec.fingerprint, frame=codec.frame)
        write_wav(options.out, codec.decode(coded), codec.sample_rate)
    return 0
