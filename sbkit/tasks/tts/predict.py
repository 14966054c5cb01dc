"""A TTS model that is ready to run: text to audio, a sentence at a time.

Legend: S samples.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sbkit.audio.decode import Signal
from sbkit.base.arrays import Counts
from sbkit.base.errors import DataError
from sbkit.base.messages import listed, printable
from sbkit.base.units import seconds_to_samples
from sbkit.runtime.batch_shapes import BatchShapes
from sbkit.runtime.runtimes import GraphRunner
from sbkit.tasks.tts.symbols import PADDING, to_symbols, transcribe_phonemes
from sbkit.text.languages import parse_language
from sbkit.text.verbalize import MARKS, spell_out, split_sentences, without_ssml

MAX_SPOKEN_CHARACTERS = 20_000  # about half an hour of speech
MAX_SENTENCE_CHARACTERS = 300  # longer sentences are split
MIN_FRAMES = 2  # a graph may treat one frame as a special case
SYMBOLS_PER_SECOND = 13  # in the English default corpus, with punctuation and spaces
PAUSE_SECONDS = 0.25  # between two sentences
MIN_SPEED, MAX_SPEED = 0.25, 4.0
# In one thread, batches of 50 s are 1.5 times as fast as single sentences with torch, and batches
# of 200 s are slower again; onnxruntime gains nothing. A GPU has more to do at a time.
CPU_BATCH_SECONDS, GPU_BATCH_SECONDS = 50, 500


class Reading(NamedTuple):
    """A text as a voice reads it."""

    sentences: list[list[int]]  # the symbol ids of each
    notes: tuple[str, ...]  # on rewritten and omitted parts
    omitted: tuple[str, ...]  # the symbols that the voice does not have


@dataclass(frozen=True)
class Speech:
    """The speech of a text; iterating over the audio synthesizes it sentence by sentence."""

    audio: Iterator[Signal]  # (S,) between -1 and 1: sentences, and pauses between them
    notes: Sequence[str]  # remarks for the caller, such as which characters were omitted

    def __iter__(self) -> Iterator[Signal]:
        return self.audio


class Synthesizer(GraphRunner):
    """A TTS model, opened from a bundle; language: the language tag of the texts it reads.

    options: `device`, `runtime` and `precision`, as for `load_bundle`.

    >>> voice = Synthesizer("my-voice", device="cpu")  # doctest: +SKIP
    >>> write_wav("hello.wav", voice.speak("Good morning."), voice.sample_rate)  # doctest: +SKIP
    """

    command = "speak"
    prediction = "audio"

    def __init__(self, folder: Path | str, **options: Any) -> None:
        super().__init__(folder, **options)
        self._labels = self.bundle.labels
        self.language = parse_language(self.bundle.config.language or "und")  # passed to espeak-ng
        self._symbol_type = str(self.settings["symbol_type"])
        self._symbols = set(self._labels.names)
        seconds = CPU_BATCH_SECONDS if self.runs_on.device == "cpu" else GPU_BATCH_SECONDS
        self._shapes = BatchShapes(max_samples=seconds * SYMBOLS_PER_SECOND)  # counts symbols

    def stream(self, text: str, speed: float = 1.0, *, max_seconds: float = math.inf) -> Speech:
        """Check a text, and return its speech, which is synthesized a sentence at a time.

        text: tags of SSML are left out.
        max_seconds: the longest speech, as estimated from the spelled-out text.
        """
        if not MIN_SPEED <= speed <= MAX_SPEED:
            raise DataError(f"`speed` must be from {MIN_SPEED:g} to {MAX_SPEED:g}, not {speed:g}.")
        plain = without_ssml(text)
        reading = self.read(plain.text)
        seconds = sum(map(len, reading.sentences)) / SYMBOLS_PER_SECOND / speed
        if seconds > max_seconds:
            raise DataError(
                f"Speech must be at most {max_seconds:g} s long, but takes about {seconds:.0f} s."
            )
        audio = (self._run_batch([(ids, speed)])[0] for ids in reading.sentences)
        notes = (*plain.notes, *reading.notes)
        return Speech(self._with_pauses(audio, len(reading.sentences), speed), notes)

    def speak(self, text: str, speed: float = 1.0) -> Signal:
        """Return the audio of a text (S,)."""
        return np.concatenate([*self.stream(text, speed)])

    def synthesize(self, texts: Sequence[Reading], speeds: Sequence[float]) -> list[Signal]:
        """Return the audio (S,) of each text; sentences of similar length share a batch.

        Up to rounding, the audio is what `speak` returns.
        """
        pairs = zip(texts, speeds, strict=True)
        sentences = [(ids, speed) for text, speed in pairs for ids in text.sentences]
        lengths = [math.ceil(len(ids) / speed) for ids, speed in sentences]
        signals: dict[int, Signal] = {}
        for batch in self._shapes.batches(lengths):
            batch_signals = self._run_batch([sentences[index] for index in batch])
            signals.update(zip(batch, batch_signals, strict=True))
        in_order = iter([signals[index] for index in range(len(sentences))])
        return [
            np.concatenate([*self._with_pauses(in_order, len(text.sentences), speed)])
            for text, speed in zip(texts, speeds, strict=True)
        ]

    def read(self, text: str) -> Reading:
        """Turn a text into symbols; raises DataError if it is empty, too long or unreadable."""
        if not text.strip():
            raise DataError("The text is empty.")
        if len(text) > MAX_SPOKEN_CHARACTERS:
            raise DataError(f"The text has more than {MAX_SPOKEN_CHARACTERS} characters.")
        spoken = spell_out(text, self.language)
        texts = split_sentences(spoken.text, MAX_SENTENCE_CHARACTERS)
        sentences: list[list[int]] = []
        unknown: dict[str, None] = {}
        for sentence in transcribe_phonemes(texts, self.language, self._symbol_type):
            symbols = to_symbols(sentence)
            if symbols and symbols[-1] not in MARKS:
                symbols.append(".")
            readable = [symbol for symbol in symbols if symbol in self._symbols]
            unknown |= dict.fromkeys(s for s in symbols if not (s in self._symbols or s in MARKS))
            if not {*readable} <= {*MARKS, " "}:
                sentences.append([self._labels.encode(symbol) for symbol in readable])
        if not sentences:
            raise DataError(
                f"{printable(text[:40])!r} has no words of this voice's language, {self.language}."
            )
        omitted = f"No training clip of this voice has {listed(unknown)}, which is omitted."
        notes = (*spoken.notes, *([omitted] if unknown else []))
        return Reading(sentences, notes, tuple(unknown))

    def _with_pauses(self, audio: Iterator[Signal], count: int, speed: float) -> Iterator[Signal]:
        """Yield the next ``count`` sentences, each but the last with the pause after it."""
        num_samples = seconds_to_samples(PAUSE_SECONDS / speed, self.sample_rate)
        pause = np.zeros(num_samples, np.float32)
        for number, sentence in enumerate(islice(audio, count), 1):
            yield sentence if number == count else np.concatenate([sentence, pause])

    def _run_batch(self, sentences: Sequence[tuple[list[int], float]]) -> list[Signal]:
        """Synthesize sentences, each of symbol ids and a speed, together: -> (S,) each."""
        states, durations = self.run("encode", _pad([ids for ids, _ in sentences]))
        indices: list[Counts] = []
        for (ids, speed), row in zip(sentences, durations, strict=True):
            ends = np.rint(np.cumsum(row[: len(ids)] / speed)).astype(np.int64)
            frames = np.arange(max(MIN_FRAMES, ends[-1]))
            indices.append(np.searchsorted(ends, frames, side="right").clip(max=len(ids) - 1))
        (audio,) = self.run("decode", states, _pad(indices))
        samples = [len(index) * self.settings["frame"] for index in indices]
        return [row[:count] for row, count in zip(audio, samples, strict=True)]


def _pad(rows: Sequence[Sequence[int] | Counts]) -> Counts:
    """Pad rows of symbol ids or indices to one length: -> (B, L)."""
    padded = np.full((len(rows), max(map(len, rows))), PADDING, np.int64)
    for padded_row, row in zip(padded, rows, strict=True):
        padded_row[: len(row)] = row
    return padded
