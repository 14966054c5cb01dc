"""Decode clips to texts, and to words with times and confidences, in one process or several.

Beam search is written in Python, which runs one thread at a time, so `DecoderPool` decodes many
clips in several processes.

Legend: U frames, V vocabulary.
"""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain, islice, starmap
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

import numpy as np

from sbkit.base.arrays import LogProbs
from sbkit.base.errors import SbkitError
from sbkit.base.units import samples_to_seconds
from sbkit.base.workers import begin_work, start_anew_in_forks, start_processes
from sbkit.decoding.attention import AttentionScorer
from sbkit.decoding.beam import BeamDecoder
from sbkit.decoding.decoder import Decoder
from sbkit.decoding.greedy import GreedyDecoder, Hypothesis
from sbkit.decoding.word_times import WordAligner
from sbkit.lm.language_models import LanguageModels
from sbkit.text.normalization import join_segments
from sbkit.text.recognized_word import Word

if TYPE_CHECKING:
    from loky import ProcessPoolExecutor

MIN_FRAMES_FOR_POOL = 5000  # 200 s of audio: starting a process takes half a second
MAX_HOTWORD_DECODERS = 8  # cached, because the clips of a request share their hotwords
MAX_DECODING_PROCESSES = 16  # each has its own language models and caches: by default 0.1 GB


@dataclass(frozen=True, eq=False, kw_only=True)
class DecoderInput:
    """The output of a model for a clip, which a decoder turns into text.

    log_probs: (U, V).
    start: where the clip begins in its recording, in seconds.
    attention: for a decoder that rescores.
    phrases: hotwords of this clip, added to the decoder's; only beam search uses them.
    nbest: how many of the most probable texts are returned.
    """

    log_probs: LogProbs
    samples: int
    start: float = 0.0
    attention: AttentionScorer | None = None
    phrases: tuple[str, ...] = ()
    nbest: int = 0


@dataclass(frozen=True)
class Alternative:
    """A possible text, and the natural logarithm of its share of the beam's probability."""

    text: str
    log_prob: float


@dataclass(frozen=True)
class RecognizedClip:
    """The text of a clip; on request its words with times, and the most probable texts.

    start, seconds: where the clip begins in its recording, and its length; set if words are.
    greedy: the greedy result, if ``text`` is from a beam.
    """

    text: str
    words: tuple[Word, ...] = ()
    start: float = 0.0
    seconds: float = 0.0
    nbest: tuple[Alternative, ...] = ()
    greedy: "RecognizedClip | None" = None

    def later(self, seconds: float) -> "RecognizedClip":
        words = tuple(word.later(seconds) for word in self.words)
        return replace(self, words=words, start=self.start + seconds)


def join_recognitions(segments: Sequence[RecognizedClip], *, spaces: bool) -> RecognizedClip:
    """Join the texts, as `join_segments` does, and the words of consecutive segments."""
    text = join_segments((segment.text for segment in segments), spaces=spaces)
    words = chain.from_iterable(segment.words for segment in segments)
    seconds = sum(segment.seconds for segment in segments)
    greedy = [segment.greedy for segment in segments if segment.greedy is not None]
    return RecognizedClip(
        text,
        tuple(words),
        start=segments[0].start,
        seconds=seconds,
        greedy=join_recognitions(greedy, spaces=spaces) if len(greedy) == len(segments) else None,
    )


class ClipDecoder:
    """Decode clips with a decoder, greedily without one, and time their words.

    It holds no acoustic model, so it can be sent to other processes.
    """

    def __init__(self, decoder: BeamDecoder | None, aligner: WordAligner) -> None:
        self.decoder: Decoder = decoder or GreedyDecoder(aligner.tokenizer.vocabulary)
        self.aligner = aligner

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the cache of decoders with hotwords."""
        return {"decoder": self.decoder, "aligner": self.aligner}

    @property
    def holds_gil(self) -> bool:
        """Whether decoding is pure Python; rescoring needs the model, which a pool lacks."""
        return isinstance(self.decoder, BeamDecoder) and not self.decoder.attention_rescoring

    def decode(self, clip: DecoderInput, *, with_times: bool) -> RecognizedClip:
        """Decode a clip; the times of its words count from the start of its recording."""
        decoder = self.decoder
        aligner = self.aligner
        if clip.phrases and isinstance(decoder, BeamDecoder):
            decoder = self._with_phrases(clip.phrases)
            aligner = replace(aligner, hotwords=decoder.hotwords)
        if clip.nbest and isinstance(decoder, GreedyDecoder):  # it finds one text only
            decoder = self._search_without_models
        beam = decoder.nbest(clip.log_probs, clip.attention)
        nbest = self._alternatives(beam, clip.nbest)
        tokens = list(beam[0].tokens)
        text = aligner.tokenizer.decode(tokens)
        if not with_times:
            return RecognizedClip(text, nbest=nbest)
        words = aligner.align(clip.log_probs, tokens, samples=clip.samples, is_decoded=True)
        return RecognizedClip(
            text,
            tuple(word.later(clip.start) for word in words),
            start=clip.start,
            seconds=samples_to_seconds(clip.samples, aligner.sample_rate),
            nbest=nbest,
        )

    def _alternatives(self, beam: Sequence[Hypothesis], count: int) -> tuple[Alternative, ...]:
        """Return the first ``count`` texts of a beam; some hypotheses differ only in spaces."""
        total = float(np.logaddexp.reduce([hypothesis.score for hypothesis in beam]))
        log_probs: dict[str, float] = {}
        for hypothesis in beam:
            text = self.aligner.tokenizer.decode(list(hypothesis.tokens))
            log_probs.setdefault(text, hypothesis.score - total)
        return tuple(starmap(Alternative, islice(log_probs.items(), count)))

    @cached_property
    def _search_without_models(self) -> BeamDecoder:
        models = LanguageModels(words=None, tokens=None)
        return BeamDecoder(tokenizer=self.aligner.tokenizer, language_models=models)

    @cached_property
    def _with_phrases(self) -> Callable[[tuple[str, ...]], BeamDecoder]:
        decoder = self.decoder
        assert isinstance(decoder, BeamDecoder)
        return lru_cache(MAX_HOTWORD_DECODERS)(
            lambda phrases: decoder.with_hotwords([*decoder.phrases, *phrases])
        )


_decoder_of_process: ClipDecoder  # one in each process of the pool


class DecoderPool:
    """Decode clips in up to ``processes`` processes, once this one has decoded many frames."""

    def __init__(self, decoder: ClipDecoder, *, processes: int) -> None:
        self.decoder = decoder
        self._num_processes = min(processes, MAX_DECODING_PROCESSES)
        self._lock = threading.Lock()
        self._executor: ProcessPoolExecutor | None = None
        self._num_frames = 0
        start_anew_in_forks(self)

    def start_anew(self) -> None:
        if self._executor is not None:
            self._executor = None
            self._finalizer.cancel()  # its processes are the parent's
        self._lock = threading.Lock()

    def decode(self, clips: Sequence[DecoderInput], *, with_times: bool) -> list[RecognizedClip]:
        """Return the text of each clip, and ``with_times`` its timed words."""
        self._num_frames += sum(len(clip.log_probs) for clip in clips)
        is_pooled = self._num_processes > 1 and self._num_frames >= MIN_FRAMES_FOR_POOL
        executor = self._start_executor() if is_pooled and self.decoder.holds_gil else None
        if executor is None:
            return [self.decoder.decode(clip, with_times=with_times) for clip in clips]
        from loky.process_executor import BrokenProcessPool, ShutdownExecutorError

        try:
            return list(executor.map(partial(_decode_in_worker, with_times), clips))
        # Of several threads, one learns that a process was killed, and ends the executor of all.
        except (BrokenProcessPool, ShutdownExecutorError) as error:
            self._shut_down(executor)
            raise SbkitError(
                f"One of the {self._num_processes} decoding processes was killed, perhaps because "
                "memory ran out."
            ) from error

    def close(self) -> None:
        if (executor := self._executor) is not None:
            self._shut_down(executor)

    def _start_executor(self) -> "ProcessPoolExecutor | None":
        with self._lock:
            if self._executor is None:
                self._executor = start_processes("decoding texts", self._make_executor)
                if self._executor is None:
                    self._num_frames = 0  # the next attempt is not soon
                else:
                    # A program may never close the pool, and loky's own exit handler then raises.
                    # A process of multiprocessing calls no others, but waits for its children.
                    self._finalizer = Finalize(
                        self, self._executor.shutdown, kwargs={"kill_workers": True}, exitpriority=0
                    )
            return self._executor

    def _make_executor(self) -> "ProcessPoolExecutor":
        # multiprocessing's pool would import the main module of the program again, which may lack
        # a guard for that, and a fork copies locks that threads hold.
        from loky import ProcessPoolExecutor

        arguments = (self.decoder, os.getpid())
        return ProcessPoolExecutor(
            self._num_processes, initializer=_set_decoder, initargs=arguments
        )

    def _shut_down(self, executor: "ProcessPoolExecutor") -> None:
        """End an executor, unless another thread has ended it and perhaps started the next."""
        with self._lock:
            if self._executor is executor:
                self._executor = None
                self._finalizer()


def _set_decoder(decoder: ClipDecoder, parent: int) -> None:
    begin_work(parent)
    global _decoder_of_process
    _decoder_of_process = decoder


def _decode_in_worker(with_times: bool, clip: DecoderInput) -> RecognizedClip:
    return _decoder_of_process.decode(clip, with_times=with_times)
