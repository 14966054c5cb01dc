"""A voice that is ready to speak: text to audio, a sentence at a time.

Legend: S samples, L symbols, U frames.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from recipes.synthesis.symbols import read_texts, to_symbols
from sbkit.audio.io import STANDARD, to_int16, write_wav
from sbkit.base.errors import SbkitError
from sbkit.base.files import read_regular, require_writable
from sbkit.base.text import listed, printable
from sbkit.inference.runtime.graph_model import GraphModel
from sbkit.text.languages import check_language
from sbkit.text.spoken import MARKS, spell_out, split_sentences

LONGEST_TEXT = 20_000  # characters; half an hour
LONGEST_SENTENCE = 300  # characters that are synthesized at once
SHORTEST = 2  # frames, of which no graph is a special case
PAUSE = 0.25  # seconds between two sentences
SLOWEST, FASTEST = 0.25, 4.0

Sound = npt.NDArray[np.float32]  # (S,) between -1 and 1


class Sentence(NamedTuple):
    """The ids of the symbols of a sentence, and notes on what is read otherwise, or dropped."""

    ids: list[int]
    notes: list[str]


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
        self._kind, self._known = str(self.settings["kind"]), set(self._labels.names)

    def stream(self, text: str, speed: float = 1.0) -> Iterator[Sound]:
        """Yield the audio of each sentence, and a pause after all but the last.

        Raises:
            SbkitError: there is nothing to say, too much, what is no text, or no such speed; at
                the call, before the first sentence.
        """
        if not SLOWEST <= speed <= FASTEST:
            raise SbkitError(
                f"`speed` must be from {SLOWEST:g} to {FASTEST:g}, but is {speed:g}. Correct it."
            )
        return self._speak(self.read(text), speed)

    def speak(self, text: str, speed: float = 1.0) -> Sound:
        """Return the audio of a text; raises SbkitError as `stream`."""
        return np.concatenate([*self.stream(text, speed)])

    def read(self, text: str) -> list[Sentence]:
        """Return the sentences of a text as symbols; raises SbkitError as `stream`."""
        _check(text)
        found = [self._read(each) for each in split_sentences(text, LONGEST_SENTENCE)]
        sentences = [each for each in found if each.ids]
        if not sentences:
            raise SbkitError(
                f"Text must have words that this voice can read, which knows {self.language}, but "
                f"{printable(text[:40])!r} has none. Write words of that language."
            )
        return sentences

    def _read(self, text: str) -> Sentence:
        notes = [*spell_out(text, self.language).notes]
        symbols = to_symbols(read_texts([text], self.language, self._kind)[0])
        if symbols and symbols[-1] not in MARKS:
            symbols.append(".")
        unknown = dict.fromkeys(each for each in symbols if each not in self._known)
        if left := [each for each in unknown if each not in MARKS]:
            notes.append(f"No clip of this voice has {listed(left)}, which is left out.")
        ids = [self._labels.encode(each) for each in symbols if each in self._known]
        has_words = any(each in self._known and each not in {*MARKS, " "} for each in symbols)
        return Sentence(ids if has_words else [], notes)

    def _speak(self, sentences: list[Sentence], speed: float) -> Iterator[Sound]:
        pause = np.zeros(round(PAUSE / speed * self.sample_rate), np.float32)
        for place, sentence in enumerate(sentences, 1):
            states, durations = self.run("encode", np.array([sentence.ids]))
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
    with Synthesizer.named_by(options) as voice:
        notes = dict.fromkeys(note for each in voice.read(text) for note in each.notes)
        print(*(f"note: {printable(note)}" for note in notes), sep="\n", file=sys.stderr)
        audio = to_int16(voice.speak(text, options.speed))
        write_wav(options.out, audio, voice.sample_rate)
    return 0


def _read_text(file: Path) -> str:
    if file == STANDARD:
        content = sys.stdin.buffer.read()
    else:
        content = read_regular(file, largest=8 * LONGEST_TEXT, what="A text")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise SbkitError(f"{file} must be UTF-8, but is not ({error}). Convert it.") from error
