"""A voice that is ready to speak: text to audio, a sentence at a time.

Legend: S samples, L symbols, U frames.
"""

import argparse
import logging
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from sbkit.audio.io import STANDARD, to_int16, write_wav
from sbkit.base.errors import SbkitError
from sbkit.base.files import read_regular, require_writable
from sbkit.base.messages import listed, printable
from sbkit.runtime.runtimes import GraphModel
from sbkit.text.languages import check_language
from sbkit.text.symbols import to_symbols, transcribe_phonemes
from sbkit.text.verbalize import MARKS, spell_out, split_sentences

logger = logging.getLogger(__name__)

LONGEST_TEXT = 20_000  # characters; half an hour
LONGEST_SENTENCE = 300  # characters that are synthesized at once
SHORTEST = 2  # frames, of which no graph is a special case
SYMBOLS_PER_SECOND = 13  # of the default corpus in English, with its marks and spaces
PAUSE = 0.25  # seconds between two sentences
SLOWEST, FASTEST = 0.25, 4.0

Sound = npt.NDArray[np.float32]  # (S,) between -1 and 1


@dataclass(frozen=True)
class Speech:
    """The audio of a text, synthesized as it is taken, and the notes of its reading."""

    audio: Iterator[Sound]
    notes: tuple[str, ...]

    def __iter__(self) -> Iterator[Sound]:
        """Yield the audio of each sentence, and a pause after all but the last."""
        return self.audio


class Synthesizer(GraphModel):
    """Speak text.

    Attributes:
        language: the tag of what it reads.
    """

    command: ClassVar[str] = "speak"

    def __init__(self, folder: Path | str, **options: Any) -> None:
        """Open a bundle as `GraphModel` does."""
        super().__init__(folder, **options)
        self._labels = self.bundle.labels
        self.language = check_language(self.bundle.config.language or "und")  # espeak-ng gets it
        self._kind, self._known = str(self.settings["symbol_type"]), set(self._labels.names)

    def stream(self, text: str, speed: float = 1.0, *, max_seconds: float = math.inf) -> Speech:
        """Read a text; its audio is made a sentence at a time.

        max_seconds: of speech, estimated from the written-out text.

        Raises:
            SbkitError: there is nothing to say, too much, what is no text, or no such speed; at
                the call, before the first sentence.
        """
        if not SLOWEST <= speed <= FASTEST:
            raise SbkitError(
                f"`speed` must be from {SLOWEST:g} to {FASTEST:g}, but is {speed:g}. Correct it."
            )
        sentences, notes = self._read(text)
        seconds = sum(map(len, sentences)) / SYMBOLS_PER_SECOND / speed
        if seconds > max_seconds:
            raise SbkitError(
                f"Speech must be at most {max_seconds:g} s long, but this text takes about "
                f"{seconds:.0f} s. Send it in parts."
            )
        return Speech(self._speak(sentences, speed), notes)

    def speak(self, text: str, speed: float = 1.0) -> Sound:
        """Return the audio of a text; raises SbkitError as `stream`."""
        return np.concatenate([*self.stream(text, speed)])

    def _read(self, text: str) -> tuple[list[list[int]], tuple[str, ...]]:
        """Return the symbol ids of the sentences of a text, and notes on how it is read."""
        _check(text)
        spoken = spell_out(text, self.language)
        parts = split_sentences(spoken.text, LONGEST_SENTENCE)
        sentences, unknown = list[list[int]](), dict[str, None]()
        for part in transcribe_phonemes(parts, self.language, self._kind):
            symbols = to_symbols(part)
            if symbols and symbols[-1] not in MARKS:
                symbols.append(".")
            known = [symbol for symbol in symbols if symbol in self._known]
            unknown |= dict.fromkeys(s for s in symbols if s not in self._known and s not in MARKS)
            if not {*known} <= {*MARKS, " "}:
                sentences.append([self._labels.encode(symbol) for symbol in known])
        if not sentences:
            raise SbkitError(
                f"Text must have words that this voice can read, which knows {self.language}, but "
                f"{printable(text[:40])!r} has none. Write words of that language."
            )
        left_out = f"No clip of this voice has {listed(unknown)}, which is left out."
        return sentences, (*spoken.notes, *([left_out] if unknown else []))

    def _speak(self, sentences: list[list[int]], speed: float) -> Iterator[Sound]:
        pause = np.zeros(round(PAUSE / speed * self.sample_rate), np.float32)
        for place, ids in enumerate(sentences, 1):
            states, durations = self.run("encode", np.array([ids]))
            ends = np.rint(np.cumsum(durations[0] / speed)).astype(np.int64)
            frames = np.arange(max(SHORTEST, ends[-1]))
            index = np.searchsorted(ends, frames, side="right").clip(max=len(ends) - 1)
            (audio,) = self.run("decode", states, index[None])
            yield audio[0] if place == len(sentences) else np.concatenate([audio[0], pause])


def _check(text: str) -> None:
    """Raise SbkitError for a text that no voice reads."""
    strange = next((each for each in text if not (each.isprintable() or each.isspace())), None)
    for is_wrong, has, fix in (
        (not text.strip(), "is empty", "Write what is to be said"),
        (len(text) > LONGEST_TEXT, f"has {len(text)}", "Speak it in parts"),
        (strange is not None, f"has the character {strange!r}", "Take it out"),
    ):
        if is_wrong:
            raise SbkitError(
                f"Text must have from 1 to {LONGEST_TEXT} characters, without control characters, "
                f"but {has}. {fix}."
            )


def speak(options: argparse.Namespace) -> int:
    """Run `sbkit speak`: write the audio of a text as WAV."""
    if options.out != STANDARD:
        require_writable(options.out.parent, option="--out")
    if (options.text is None) == (options.file is None):
        raise SbkitError("`sbkit speak` must have a text or --file, one of them. Correct that.")
    text = options.text if options.file is None else _read_text(options.file)
    with Synthesizer.from_options(options) as voice:
        speech = voice.stream(text, options.speed)
        for note in speech.notes:
            logger.warning(f"note: {note}")
        write_wav(options.out, to_int16(np.concatenate([*speech])), voice.sample_rate)
    return 0


def _read_text(file: Path) -> str:
    if file == STANDARD:
        content = sys.stdin.buffer.read()
    else:
        content = read_regular(file, max_bytes=8 * LONGEST_TEXT, subject="A text")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise SbkitError(f"{file} must be UTF-8, but is not ({error}). Convert it.") from error
