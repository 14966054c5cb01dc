"""A TTS model that is ready to run: text to audio, a sentence at a time.

Legend: S samples.
"""

import logging
import math
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from sbkit.audio.io import STANDARD, to_int16, write_wav
from sbkit.audio.resample import Signal
from sbkit.base.errors import ConfigError, DataError
from sbkit.base.files import read_regular, require_writable
from sbkit.base.messages import listed, printable
from sbkit.bundle.protocols import Speech
from sbkit.runtime.runtimes import GraphModel
from sbkit.text.languages import check_language
from sbkit.text.symbols import to_symbols, transcribe_phonemes
from sbkit.text.verbalize import MARKS, spell_out, split_sentences

logger = logging.getLogger(__name__)

MAX_TEXT_CHARACTERS = 20_000  # about half an hour of speech
MAX_SENTENCE_CHARACTERS = 300  # longer sentences are split
MIN_FRAMES = 2  # a graph may treat one frame as a special case
SYMBOLS_PER_SECOND = 13  # in the English default corpus, with punctuation and spaces
PAUSE_SECONDS = 0.25  # between two sentences
MIN_SPEED, MAX_SPEED = 0.25, 4.0


class Synthesizer(GraphModel):
    """A TTS model, opened from a bundle; language: the language tag of the texts it reads."""

    command: ClassVar[str] = "speak"

    def __init__(self, folder: Path | str, **options: Any) -> None:
        super().__init__(folder, **options)
        self._labels = self.bundle.labels
        self.language = check_language(self.bundle.config.language or "und")  # passed to espeak-ng
        self._symbol_type = str(self.settings["symbol_type"])
        self._symbols = set(self._labels.names)

    def stream(self, text: str, speed: float = 1.0, *, max_seconds: float = math.inf) -> Speech:
        """Check a text, and return its speech, which is synthesized a sentence at a time.

        max_seconds: the longest speech, as estimated from the spelled-out text.

        Raises:
            DataError: the text is empty, too long or unreadable, or the speed is out of range.
        """
        if not MIN_SPEED <= speed <= MAX_SPEED:
            raise DataError(
                f"`speed` must be from {MIN_SPEED:g} to {MAX_SPEED:g}, but is {speed:g}."
            )
        sentences, notes = self._read(text)
        seconds = sum(map(len, sentences)) / SYMBOLS_PER_SECOND / speed
        if seconds > max_seconds:
            raise DataError(
                f"Speech must be at most {max_seconds:g} s long, but this text takes about "
                f"{seconds:.0f} s. Send it in parts."
            )
        return Speech(self._speak(sentences, speed), notes)

    def speak(self, text: str, speed: float = 1.0) -> Signal:
        """Return the audio of a text (S,); raises DataError as `stream`."""
        return np.concatenate([*self.stream(text, speed)])

    def _read(self, text: str) -> tuple[list[list[int]], tuple[str, ...]]:
        """Return the symbol ids of each sentence of a text, and notes on how it is read."""
        if not text.strip():
            raise DataError("The text is empty. Write the text to speak.")
        if len(text) > MAX_TEXT_CHARACTERS:
            raise DataError(
                f"The text has {len(text)} characters, more than {MAX_TEXT_CHARACTERS}. Speak it "
                "in parts."
            )
        for char in text:
            if not (char.isprintable() or char.isspace()):
                raise DataError(f"The text has the control character {char!r}. Remove it.")
        spoken = spell_out(text, self.language)
        texts = split_sentences(spoken.text, MAX_SENTENCE_CHARACTERS)
        sentences: list[list[int]] = []
        unknown: dict[str, None] = {}
        for sentence in transcribe_phonemes(texts, self.language, self._symbol_type):
            symbols = to_symbols(sentence)
            if symbols and symbols[-1] not in MARKS:
                symbols.append(".")
            known = [symbol for symbol in symbols if symbol in self._symbols]
            unknown |= dict.fromkeys(s for s in symbols if not (s in self._symbols or s in MARKS))
            if not {*known} <= {*MARKS, " "}:
                sentences.append([self._labels.encode(symbol) for symbol in known])
        if not sentences:
            raise DataError(
                f"{printable(text[:40])!r} has no words that this voice can read. Write words of "
                f"its language, {self.language}."
            )
        omitted = f"No training clip of this voice has {listed(unknown)}, which is omitted."
        return sentences, (*spoken.notes, *([omitted] if unknown else []))

    def _speak(self, sentences: list[list[int]], speed: float) -> Iterator[Signal]:
        pause = np.zeros(round(PAUSE_SECONDS / speed * self.sample_rate), np.float32)
        for number, ids in enumerate(sentences, 1):
            states, durations = self.run("encode", np.array([ids]))
            ends = np.rint(np.cumsum(durations[0] / speed)).astype(np.int64)
            frames = np.arange(max(MIN_FRAMES, ends[-1]))
            index = np.searchsorted(ends, frames, side="right").clip(max=len(ends) - 1)
            (audio,) = self.run("decode", states, index[None])
            yield audio[0] if number == len(sentences) else np.concatenate([audio[0], pause])


def speak(options: Namespace) -> int:
    """Run `sbkit speak`: write the audio of a text as WAV."""
    if options.out != STANDARD:
        require_writable(options.out.parent, option="--out")
    if (options.text is None) == (options.file is None):
        raise ConfigError("`sbkit speak` needs either a text or --file. Pass one of them.")
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
        content = read_regular(file, max_bytes=8 * MAX_TEXT_CHARACTERS, subject="A text")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 ({error}). Convert it.") from error
