"""From the log-probabilities of clips to their text, and their words with times and confidences.

Beam search is written in Python, which runs one thread at a time, so `DecoderPool` decodes many
clips in several processes.
"""

import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from sbkit.base.arrays import LogProbs
from sbkit.base.errors import SbkitError
from sbkit.decoding.attention import AttentionDecoder
from sbkit.decoding.confidence import WordAligner
from sbkit.decoding.decoder import BeamDecoder
from sbkit.decoding.greedy import GreedyDecoder
from sbkit.text.word import Word

if TYPE_CHECKING:
    from loky import ProcessPoolExecutor

MIN_FRAMES_FOR_POOL = 5000  # 200 s of audio; to start a process takes half a second
MAX_HOTWORD_DECODERS = 8  # cached for the other clips of their requests
MAX_PROCESSES = 16  # each has its own language models and caches: 0.1 GB in the default run


@dataclass(frozen=True, eq=False, kw_only=True)
class DecoderInput:
    """The output of a model for a clip.

    Attributes:
        log_probs: (U, V).
        samples: the length of the clip.
        start: of the clip in the audio that it is cut from, in seconds.
        attention: its attention decoder, for a decoder that rescores.
        phrases: hotwords besides those of the decoder, which only beam search uses.
    """

    log_probs: LogProbs
    samples: int
    start: float = 0.0
    attention: AttentionDecoder | None = None
    phrases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recognized:
    """The text of a clip, and on request its words with times."""

    text: str
    words: tuple[Word, ...] = ()


@dataclass(frozen=True)
class CtcDecoder:
    """Decode clips, and align their words.

    It holds no model, so that it can be sent to other processes.
    """

    decoder: BeamDecoder | GreedyDecoder
    aligner: WordAligner

    @classmethod
    def of(cls, decoder: BeamDecoder | None, aligner: WordAligner) -> "CtcDecoder":
        """Wrap a beam decoder, or the greedy decoder if there is none."""
        vocabulary = aligner.tokenizer.vocabulary
        greedy = GreedyDecoder(vocab_size=vocabulary.size, blank=vocabulary.blank)
        return cls(decoder or greedy, aligner)

    @property
    def is_python(self) -> bool:
        """Whether decoding runs Python code without a model, and so holds the interpreter."""
        decoder = self.decoder
        return (
            isinstance(decoder, BeamDecoder)
            and decoder.decoder_type == "beam"
            and not decoder.attention_rescoring
        )

    def decode(self, clip: DecoderInput, *, times: bool) -> Recognized:
        """Decode a clip; times count from the start of the audio that it is cut from."""
        decoder, aligner = self.decoder, self.aligner
        if clip.phrases and isinstance(decoder, BeamDecoder) and decoder.decoder_type == "beam":
            decoder = _with_hotwords(decoder, clip.phrases)
            aligner = replace(aligner, unjudged=decoder.hotwords)
        beam = decoder.nbest(clip.log_probs, clip.attention)
        tokens = list(beam[0].tokens)
        text = aligner.tokenizer.decode(tokens)
        if not times:
            return Recognized(text)
        words = aligner.align(clip.log_probs, tokens, beam, samples=clip.samples)
        return Recognized(text, tuple(word.later(clip.start) for word in words))


@lru_cache(MAX_HOTWORD_DECODERS)
def _with_hotwords(decoder: BeamDecoder, phrases: tuple[str, ...]) -> BeamDecoder:
    return decoder.with_hotwords([*decoder.phrases, *phrases])


_decoder_of_process: CtcDecoder  # in each process of the pool


class DecoderPool:
    """Decode clips, in several processes once there are many frames.

    processes: their maximum number.
    """

    def __init__(self, decoder: CtcDecoder, *, processes: int) -> None:
        self.decoder, self._num_processes = decoder, min(processes, MAX_PROCESSES)
        self._starting = threading.Lock()
        self._processes: ProcessPoolExecutor | None = None
        self._num_frames = 0

    def decode(self, clips: Sequence[DecoderInput], *, times: bool) -> list[Recognized]:
        """Return the text of each clip, and with ``times`` its timed words.

        Raises SbkitError if a clip cannot be decoded, or a process is killed.
        """
        self._num_frames += sum(len(clip.log_probs) for clip in clips)
        is_worth_it = self._num_processes > 1 and self._num_frames >= MIN_FRAMES_FOR_POOL
        if not (is_worth_it and self.decoder.is_python):
            return [self.decoder.decode(clip, times=times) for clip in clips]
        from loky.process_executor import BrokenProcessPool

        try:
            return list(self._started().map(partial(_decode, times), clips))
        except BrokenProcessPool as error:
            self.close()
            raise SbkitError(
                f"One of the {self._num_processes} decoding processes was killed, perhaps because "
                "memory ran out. Free memory, or pass --decoder greedy."
            ) from error

    def close(self) -> None:
        with self._starting:
            if self._processes is not None:
                self._end()
                self._processes = None

    def _started(self) -> "ProcessPoolExecutor":
        # multiprocessing's pool would import the main module of the program again, which may lack
        # a guard for that, and a fork copies locks that threads hold.
        from loky import ProcessPoolExecutor

        with self._starting:
            if self._processes is None:
                processes = ProcessPoolExecutor(
                    self._num_processes, initializer=_keep_decoder, initargs=(self.decoder,)
                )
                # Also for a program that never closes the pool: loky's exit handler fails loudly.
                self._end = weakref.finalize(self, _end, processes, os.getpid())
                self._processes = processes
            return self._processes


def _end(processes: "ProcessPoolExecutor", owner: int) -> None:
    """End the processes, unless called from a fork of the process that owns them."""
    if os.getpid() == owner:
        processes.shutdown(kill_workers=True)


def _keep_decoder(decoder: CtcDecoder) -> None:
    global _decoder_of_process
    _decoder_of_process = decoder


def _decode(times: bool, clip: DecoderInput) -> Recognized:
    return _decoder_of_process.decode(clip, times=times)
