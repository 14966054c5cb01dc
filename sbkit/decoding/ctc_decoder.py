"""From the log-probabilities of clips to their text, and their words with times and confidences.

A beam search is Python, of which a process runs one thread at a time, so `DecoderPool` decodes many
clips in several processes.
"""

import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from sbkit.base.errors import SbkitError
from sbkit.decoding.attention import AttentionDecoder
from sbkit.decoding.confidence import WordAligner
from sbkit.decoding.decoder import BeamDecoder
from sbkit.decoding.frames import LogProbs
from sbkit.decoding.greedy import GreedySearch
from sbkit.text.word import Word

if TYPE_CHECKING:
    from loky import ProcessPoolExecutor

MANY_FRAMES = 5000  # 200 s, after which processes are started; each takes half a second for it
MAX_HOTWORD_DECODERS = 8  # that are kept, for the other clips of their requests
MOST_PROCESSES = 16  # each has language models and caches of its own, 0.1 GB of the default run


@dataclass(frozen=True, eq=False, kw_only=True)
class DecoderInput:
    """The output of a model for a clip.

    log_probs: (U, V); samples: of the clip; begin: where it begins in the audio that it is cut
    from, in seconds; attention: its attention decoder, for a search that uses it; phrases: hotwords
    beside those of the search, which only a beam search uses.
    """

    log_probs: LogProbs
    samples: int
    begin: float = 0.0
    attention: AttentionDecoder | None = None
    phrases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recognized:
    """The text of a clip, and its words with times on request."""

    text: str
    words: tuple[Word, ...] = ()


@dataclass(frozen=True)
class CtcDecoder:
    """Decode clips by a search, and align their words.

    It holds nothing of a model, so that it can be sent to other processes.
    """

    search: BeamDecoder | GreedySearch
    aligner: WordAligner

    @classmethod
    def of(cls, search: BeamDecoder | None, aligner: WordAligner) -> "CtcDecoder":
        """Return the decoder of a search, or a greedy one without."""
        vocabulary = aligner.tokenizer.vocabulary
        greedy = GreedySearch(vocab_size=vocabulary.size, blank=vocabulary.blank)
        return cls(search or greedy, aligner)

    @property
    def is_python(self) -> bool:
        """Check whether it searches in Python, and so in one thread alone, without a model."""
        search = self.search
        return isinstance(search, BeamDecoder) and search.kind == "beam" and not search.attention

    def decode(self, clip: DecoderInput, *, times: bool) -> Recognized:
        """Decode a clip; times count from the begin of the audio that it is cut from."""
        search, aligner = self.search, self.aligner
        if clip.phrases and isinstance(search, BeamDecoder) and search.kind == "beam":
            search = _with_hotwords(search, clip.phrases)
            aligner = replace(aligner, unjudged=search.hotwords)
        beam = search.nbest(clip.log_probs, clip.attention)
        tokens = list(beam[0].tokens)
        text = aligner.tokenizer.decode(tokens)
        if not times:
            return Recognized(text)
        words = aligner.align(clip.log_probs, tokens, beam, samples=clip.samples)
        return Recognized(text, tuple(word.later(clip.begin) for word in words))


@lru_cache(MAX_HOTWORD_DECODERS)
def _with_hotwords(search: BeamDecoder, phrases: tuple[str, ...]) -> BeamDecoder:
    return search.with_hotwords([*search.phrases, *phrases])


_own: CtcDecoder  # of a process of the pool


class DecoderPool:
    """Decode clips as one decoder does; processes are started once there are many frames."""

    def __init__(self, decoder: CtcDecoder, *, processes: int) -> None:
        """Take a decoder, and the number of processes that there may be."""
        self.decoder, self._count = decoder, min(processes, MOST_PROCESSES)
        self._starting = threading.Lock()
        self._processes: ProcessPoolExecutor | None = None
        self._frames = 0

    def decode(self, clips: Sequence[DecoderInput], *, times: bool) -> list[Recognized]:
        """Return the text of each clip; ``times``: of its words, too.

        Raises SbkitError where a clip cannot be decoded, or a process is killed.
        """
        self._frames += sum(len(clip.log_probs) for clip in clips)
        if self._count < 2 or self._frames < MANY_FRAMES or not self.decoder.is_python:
            return [self.decoder.decode(clip, times=times) for clip in clips]
        from loky.process_executor import BrokenProcessPool

        try:
            return list(self._started().map(partial(_decode, times), clips))
        except BrokenProcessPool as error:
            self.close()
            raise SbkitError(
                f"The {self._count} processes that decode must run to their end, but one was "
                "killed, perhaps for its memory. Pass --decoder greedy, or free memory."
            ) from error

    def close(self) -> None:
        """End the processes."""
        with self._starting:
            if self._processes is not None:
                self._end()
                self._processes = None

    def _started(self) -> "ProcessPoolExecutor":
        # multiprocessing's own would import the main module of the program again, which may lack
        # a guard for that; and a fork copies locks that threads hold.
        from loky import ProcessPoolExecutor

        with self._starting:
            if self._processes is None:
                made = ProcessPoolExecutor(self._count, initializer=_keep, initargs=(self.decoder,))
                # Also for a program that never closes it: loky's own exit handler fails loudly.
                self._end = weakref.finalize(self, _end, made, os.getpid())
                self._processes = made
            return self._processes


def _end(processes: "ProcessPoolExecutor", owner: int) -> None:
    """End the processes, but not from a fork of the process that owns them."""
    if os.getpid() == owner:
        processes.shutdown(kill_workers=True)


def _keep(decoder: CtcDecoder) -> None:
    global _own
    _own = decoder


def _decode(times: bool, clip: DecoderInput) -> Recognized:
    return _own.decode(clip, times=times)
