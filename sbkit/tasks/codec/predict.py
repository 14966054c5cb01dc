"""A codec that is ready to run: audio to codes and back, whole or as a stream.

Audio is cut into the same windows either way: a step, with the context that the network sees before
and after it. So a stream has bit for bit the codes of whole audio, and long audio needs no more
memory. Every code is checked before it reaches the network.

Legend: S samples, U frames of codes, G codebooks.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from sbkit.audio.io import FULL_SCALE, AudioLike, Samples, stream_input, to_int16, to_samples
from sbkit.base.arrays import Array
from sbkit.base.checksums import read_checksums
from sbkit.bundle.config import WEIGHTS_FILE
from sbkit.runtime.runtimes import GraphRunner
from sbkit.tasks.codec.codes import Codes, CodeSpace, EncodedAudio


class Codec(GraphRunner):
    """A codec, opened from a bundle: encodes audio, and decodes codes.

    frame: the number of samples of a frame.
    fingerprint: identifies the codec in the header of files of codes.

    >>> codec = Codec("my-codec", device="cpu")  # doctest: +SKIP
    >>> codec.decode(codec.encode("talk.wav"))  # doctest: +SKIP
    array([0, 1, -2, ...], dtype=int16)
    """

    command = "encode"
    prediction = "codes"

    def __init__(self, folder: Path | str, *, step_seconds: float = 5.0, **options: Any) -> None:
        """Open a bundle.

        step_seconds: the audio of a step, without its context.
        options: `device`, `runtime` and `precision`, as for `load_bundle`.
        """
        super().__init__(folder, **options)
        settings, rate = self.settings, self.sample_rate
        self.space = CodeSpace(settings["groups"], tuple(settings["levels"]))
        self.frame: int = settings["frame"]
        self._contexts = (settings["encoder_context"], settings["decoder_context"])
        self._step = max(1, round(step_seconds * rate / self.frame))
        weights = read_checksums(Path(folder))[WEIGHTS_FILE]
        codec = {"sample_rate": rate, "frame": self.frame, "weights": weights}
        self.fingerprint = self.space.fingerprint(**codec)

    def encode(self, audio: AudioLike, sample_rate: float | None = None) -> EncodedAudio:
        """Encode audio, which `stream_input` reads or converts."""
        samples = np.concatenate([*stream_input(audio, sample_rate, self.sample_rate)])
        return EncodedAudio(np.concatenate([*self.encode_stream([samples])]), len(samples))

    def encode_stream(self, blocks: Iterable[Samples]) -> Iterator[Codes]:
        """Yield the codes (U, G) of blocks at the codec's rate, which `to_samples` converts."""
        samples = map(partial(to_samples, is_live=True), blocks)
        for window, first, end in windows(samples, self.frame, self._step, self._contexts[0]):
            audio = (window.astype(np.float32) / np.float32(FULL_SCALE))[None]
            codes, _ = self.run("encode", audio, np.array([len(window)]))
            yield self.space.check(codes[0], subject="the output of the model")[first:end]

    def decode(self, coded: EncodedAudio) -> Samples:
        """Return the audio of codes, (S,) int16; raises DataError for codes out of range."""
        return np.concatenate([*self.decode_stream([coded.codes])])[: coded.samples]

    def decode_stream(self, blocks: Iterable[Codes]) -> Iterator[Samples]:
        """Yield the audio of blocks of codes (U, G); raises DataError as `decode`."""
        checked = (self.space.check(block, subject="a block of codes") for block in blocks)
        for window, first, end in windows(checked, 1, self._step, self._contexts[1]):
            (audio,) = self.run("decode", window[None])
            yield to_int16(audio[0, first * self.frame : end * self.frame])


def windows(
    blocks: Iterable[Array], unit: int, step: int, context: int
) -> Iterator[tuple[Array, int, int]]:
    """Cut a stream of blocks into windows of ``step`` units, with ``context`` units on each side.

    Yield each window with the first and the end unit of its step.

    unit: the length of a unit in the arrays.

    >>> [(window.tolist(), first, end) for window, first, end in windows([np.arange(5)], 1, 3, 1)]
    [([0, 1, 2, 3], 0, 3), ([2, 3, 4], 1, 4)]
    """
    buffer: Array = np.empty(0)
    before = 0  # units at the start of the buffer that are only context
    for block in chain(blocks, [None]):
        if block is not None:
            buffer = np.concatenate([buffer, block]) if len(buffer) else block
        needed = 1 if block is None else unit * (step + context)
        while len(buffer) - unit * before >= needed:
            yield buffer[: unit * (before + step + context)], before, before + step
            unused = max(0, before + step - context)
            buffer = buffer[unit * unused :]
            before = before + step - unused
