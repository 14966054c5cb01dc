"""Decode the log-probabilities of clips to texts, and to words with times.

`BeamDecoder` uses a prefix beam search with language models and hotwords, whose hypotheses the
attention decoder of the model may rescore, or a decoding graph. `ClipDecoder` decodes a clip with a
beam decoder, or greedily, and times the words. Beam search is written in Python, which runs one
thread at a time, so `DecoderPool` decodes many clips in several processes.

Legend: U frames, V vocabulary, N sequences, L tokens.
"""

import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from sbkit.base.arrays import Counts, Float64s, LogProbs
from sbkit.base.errors import ConfigError, SbkitError
from sbkit.base.imports import require_package
from sbkit.base.units import samples_to_seconds
from sbkit.base.worker import begin_work
from sbkit.config.ranges import Range, require_in_range
from sbkit.decoding.decoding_graph import PACKAGES, GraphDecoder, make_graph
from sbkit.decoding.greedy import GreedyDecoder, Hypothesis
from sbkit.decoding.hotwords import HotwordScorer, reward_phrases
from sbkit.decoding.prefix_beam import (
    BeamSettings,
    BeamState,
    PrefixBeamSearch,
    PrefixScorer,
    TokenScorer,
    WordScorer,
    make_lexicon,
)
from sbkit.decoding.utterances import UtteranceConfidence
from sbkit.decoding.words import WordAligner
from sbkit.lm.language_models import LanguageModels, load_language_models
from sbkit.text.tokenizer import Tokenizer
from sbkit.text.word import Word

if TYPE_CHECKING:
    from loky import ProcessPoolExecutor

DECODER_TYPES = ("beam", "graph")
BEAM_SIZE = 32
MAX_BEAM_SIZE = 4096  # each hypothesis takes memory, and a downloaded bundle may ask for more
MAX_WEIGHT = 1e3
TOKEN_THRESHOLD = -6.0  # a frame tries only tokens with a higher log-probability
BLANK_THRESHOLD = -0.02  # a blank of 0.98 is certain: skipping its frame saves 7 % of the time
MAX_CANDIDATES = 12  # tokens that a frame tries: many are likely if a model has learned little
DECODER_FILE = "decoder.json"  # in a run
LANGUAGE_MODELS_FILE = "lm.safetensors"  # in a run and in a bundle
MIN_FRAMES_FOR_POOL = 5000  # 200 s of audio: starting a process takes half a second
MAX_HOTWORD_DECODERS = 8  # cached, because the clips of a request share their hotwords
MAX_PROCESSES = 16  # each has its own language models and caches: 0.1 GB in the default run

Tokens = tuple[int, ...]
BeamStates = tuple[BeamState, ...]  # of the unbiased search and, with hotwords, of the biased one


# ---- rescoring


class AttentionScorer:
    """Score token sequences of one utterance with an attention decoder, each sequence once.

    log_probs: computes ln p of every token after each prefix of the sequences,
        (N, L) -> (N, L + 1, V).
    eos: the token that ends a sequence.

    >>> def uniform(tokens):
    ...     return np.log(np.full((len(tokens), tokens.shape[1] + 1, 4), 0.25))
    >>> decoder = AttentionScorer(log_probs=uniform, eos=3)
    >>> round(decoder.score([(1, 2)])[0], 2)  # 3 ln 0.25: two tokens and the end
    -4.16
    """

    def __init__(self, *, log_probs: Callable[[Counts], Float64s], eos: int) -> None:
        self._log_probs = log_probs
        self._eos = eos
        self._scores: dict[Tokens, float] = {}

    def score(self, sequences: Sequence[Tokens]) -> list[float]:
        """Return ln p(tokens, eos | audio) of each sequence."""
        unscored = [tokens for tokens in dict.fromkeys(sequences) if tokens not in self._scores]
        if unscored:
            self._scores |= zip(unscored, self._compute(unscored), strict=True)
        return [self._scores[tokens] for tokens in sequences]

    def _compute(self, sequences: Sequence[Tokens]) -> list[float]:
        lengths = np.array([len(tokens) for tokens in sequences])
        padded = np.full((len(sequences), lengths.max() + 1), self._eos)  # (N, L + 1)
        for row, tokens in zip(padded, sequences, strict=True):
            row[: len(tokens)] = tokens
        log_probs = self._log_probs(padded[:, :-1])  # (N, L + 1, V)
        token_scores = np.take_along_axis(log_probs, padded[:, :, None], axis=2).squeeze(2)
        is_counted = np.arange(padded.shape[1]) <= lengths[:, None]  # the tokens and the first eos
        scores: list[float] = np.where(is_counted, token_scores, 0.0).sum(1).tolist()
        return scores


def rescore(
    hypotheses: Sequence[Hypothesis], attention: AttentionScorer, weight: float
) -> list[Hypothesis]:
    """Add the attention decoder's weighted scores, and return the best hypothesis first."""
    scores = attention.score([hypothesis.tokens for hypothesis in hypotheses])
    rescored: list[Hypothesis] = []
    for hypothesis, score in zip(hypotheses, scores, strict=True):
        added = weight * score
        total = hypothesis.score + added
        rescored.append(replace(hypothesis, score=total, attention_score=added))
    return sorted(rescored, key=lambda hypothesis: hypothesis.score, reverse=True)


# ---- beam search and decoding graph


@dataclass(frozen=True, kw_only=True)
class DecoderWeights:
    """The weights of the language models and of the attention decoder, relative to CTC.

    Attributes:
        word, token: factors of the log-probabilities of words and of tokens.
        word_bonus, token_bonus: added for each word and each token.
        unknown_word: added for each word that the model of words does not know.
        attention: factor of the attention decoder's log-probabilities when it rescores.
    """

    word: float = 0.6
    word_bonus: float = 1.0
    unknown_word: float = -5.0
    token: float = 0.3
    token_bonus: float = 0.5
    attention: float = 1.0

    @classmethod
    def from_plain(cls, values: Mapping[str, float]) -> Self:
        """Read weights by name; raise ConfigError for other names, and for unusable values."""
        names = [field.name for field in fields(cls)]
        is_valid = isinstance(values, Mapping) and all(
            name in names and isinstance(value, int | float) and abs(value) < MAX_WEIGHT
            for name, value in values.items()
        )
        if not is_valid:
            raise ConfigError(
                f"The weights of a decoder are {', '.join(names)}, each a number between "
                f"-{MAX_WEIGHT:g} and {MAX_WEIGHT:g}; got {str(values)[:100]}. Correct them, or "
                "write null to have them fitted."
            )
        return cls(**values)

    def plain(self) -> dict[str, float]:
        return asdict(self)


class BeamDecoder:
    """Decode CTC log-probabilities with language models, hotwords and an attention decoder.

    >>> import numpy as np, tempfile
    >>> from sbkit.text.tokenizer import ensure_tokenizer
    >>> options = {"kind": "char", "vocab_size": None, "texts": lambda: ["ab ba"] * 9}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tokenizer = ensure_tokenizer(model_file=Path(folder, "tokenizer.model"), **options)
    >>> decoder = BeamDecoder(tokenizer=tokenizer, language_models=LanguageModels(None, None))
    >>> log_probs = np.log(np.eye(tokenizer.vocab_size)[tokenizer.encode("ba")] + 1e-9)
    >>> tokenizer.decode(decoder.nbest(log_probs)[0].tokens)
    'ba'

    Args:
        language_models: the models, or their file, which is loaded when it is first needed.
        weights: None to have them fitted to the validation sets at the end of training.
        attention_rescoring: whether the attention decoder's score is added to the hypotheses.
        decoder_type: "beam" for prefix beam search; "graph" for the best path through a decoding
            graph, which is built when it is first needed. A graph has its own pruning and uses no
            model of tokens, no hotwords and no attention decoder.
        phrases: hotwords, as `with_hotwords` sets them; a bundle does not store them.

    Raises:
        ConfigError: an argument is invalid.
    """

    RANGES: ClassVar = {
        "beam_size": Range(low=1, high=MAX_BEAM_SIZE, integer=True, advice=f"{BEAM_SIZE} is usual.")
    }

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        language_models: str | Path | LanguageModels,
        beam_size: int = BEAM_SIZE,
        weights: Mapping[str, float] | DecoderWeights | None = None,
        attention_rescoring: bool = False,
        decoder_type: str = DECODER_TYPES[0],
        phrases: Sequence[str] = (),
    ) -> None:
        if decoder_type not in DECODER_TYPES:
            raise ConfigError(
                f"`decoder_type` must be {' or '.join(DECODER_TYPES)}; got {decoder_type}."
            )
        if not isinstance(attention_rescoring, bool):
            raise ConfigError(
                f"`attention_rescoring` must be True or False; got {attention_rescoring}."
            )
        require_in_range({"beam_size": beam_size}, self.RANGES)
        self.tokenizer = tokenizer
        self._language_models_source = language_models
        self.beam_size = beam_size
        self.needs_tuning = weights is None
        if weights is None:
            self.weights = DecoderWeights()
        elif isinstance(weights, DecoderWeights):
            self.weights = weights
        else:
            self.weights = DecoderWeights.from_plain(weights)
        self.attention_rescoring = attention_rescoring
        self.decoder_type = decoder_type
        self.phrases = tuple(phrases)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the searches and the graph: the trees of a search are too deep for pickle."""
        built = {"_unbiased_search", "_biased_search", "_hotword_scorer", "graph_decoder"}
        return {name: value for name, value in vars(self).items() if name not in built}

    def plain(self) -> dict[str, Any]:
        """Return the keys of `decoder.json` and of a bundle's decoder."""
        return {
            "decoder_type": self.decoder_type,
            "beam_size": self.beam_size,
            "attention_rescoring": self.attention_rescoring,
            "weights": self.weights.plain(),
        }

    @property
    def hotwords(self) -> frozenset[str]:
        """Return the words of all phrases."""
        return frozenset(word for phrase in self.phrases for word in phrase.split())

    @property
    def takes_hotwords(self) -> bool:
        return self.decoder_type == "beam"

    @cached_property
    def language_models(self) -> LanguageModels:
        if isinstance(self._language_models_source, LanguageModels):
            return self._language_models_source
        return load_language_models(Path(self._language_models_source), self.tokenizer)

    # -- copies with changes

    def copy_with(self, **changes: Any) -> "BeamDecoder":
        """Return a decoder with other arguments; its searches and its graph are built anew."""
        arguments: dict[str, Any] = {
            "tokenizer": self.tokenizer,
            "language_models": self._language_models_source,
            "beam_size": self.beam_size,
            "weights": None if self.needs_tuning else self.weights,
            "attention_rescoring": self.attention_rescoring,
            "decoder_type": self.decoder_type,
            "phrases": self.phrases,
        }
        return BeamDecoder(**(arguments | changes))

    def with_weights(self, weights: DecoderWeights) -> "BeamDecoder":
        """Return a copy with other weights, which shares the loaded language models."""
        return self.copy_with(weights=weights, language_models=self.language_models)

    def with_hotwords(self, phrases: Iterable[str]) -> "BeamDecoder":
        """Return a copy with other hotwords, which the tokenizer must be able to spell.

        The transcript changes only if the biased search finds one of the phrases. A repeated phrase
        counts once, because rewards shrink with the length of the list.
        """
        if not self.takes_hotwords:
            raise ConfigError(
                "Hotwords need the beam decoder, but this model decodes with a graph. Leave the "
                "hotwords out, or fit another decoder: sbkit tune RUN --decoder beam"
            )
        unique = tuple(dict.fromkeys(phrases))
        decoder = self.copy_with(phrases=unique, language_models=self.language_models)
        # Without hotwords the search is the same, so the copy shares it, with its cached states.
        decoder._unbiased_search = self._unbiased_search
        return decoder

    # -- the searches, built when they are needed

    def check_graph(self) -> None:
        """Raise an error if a graph cannot run: its packages are missing, or it should rescore."""
        if self.decoder_type != "graph":
            return
        for name in PACKAGES:
            require_package(name, extra="graph")
        if self.attention_rescoring:
            raise ConfigError(
                "`decoder_type: graph` finds a single hypothesis, so the attention decoder cannot "
                "rescore. Pass --attention_rescoring=False (tune: --no-attention-rescoring), or "
                "--decoder_type=beam."
            )

    @cached_property
    def graph_decoder(self) -> GraphDecoder:
        self.check_graph()
        word_lm = self.language_models.words
        if word_lm is None:
            raise ConfigError(
                "`decoder_type: graph` needs a language model of words, but there is none. Pass "
                "--word_lm_order=3, or --decoder_type=beam."
            )
        if word_lm.table is not None:
            raise ConfigError(
                "`decoder_type: graph` writes the words of its language model, but those of this "
                "model have neither case nor punctuation. Train another: sbkit tune RUN --decoder "
                f"graph --word-lm-order {word_lm.order}"
            )
        graph = make_graph(
            word_lm=word_lm,
            tokenizer=self.tokenizer,
            lm_weight=self.weights.word,
            word_bonus=self.weights.word_bonus,
            unknown_word_score=self.weights.unknown_word,
        )
        return GraphDecoder(graph=graph, tokenizer=self.tokenizer)

    @cached_property
    def _unbiased_search(self) -> PrefixBeamSearch:
        return self._make_search(self._make_scorers())

    @cached_property
    def _biased_search(self) -> PrefixBeamSearch:
        return self._make_search([*self._make_scorers(self.hotwords), self._hotword_scorer])

    @cached_property
    def _hotword_scorer(self) -> HotwordScorer:
        rewards = reward_phrases(self.phrases, self.tokenizer)
        return HotwordScorer(rewards=rewards, tokenizer=self.tokenizer)

    def _make_search(self, scorers: Sequence[PrefixScorer]) -> PrefixBeamSearch:
        vocabulary = self.tokenizer.vocabulary
        settings = BeamSettings(
            vocab_size=vocabulary.size,
            blank=vocabulary.blank,
            beam_size=self.beam_size,
            token_threshold=TOKEN_THRESHOLD,
            max_candidates=MAX_CANDIDATES,
            excluded=(vocabulary.unk, vocabulary.bos, vocabulary.eos),
            silent=self.tokenizer.silent,
            blank_threshold=BLANK_THRESHOLD,
        )
        return PrefixBeamSearch(settings=settings, scorers=scorers)

    def _make_scorers(self, added_words: Collection[str] = ()) -> list[PrefixScorer]:
        """Return the language models as scorers; ``added_words`` count as known words."""
        models, weights = self.language_models, self.weights
        scorers: list[PrefixScorer] = []
        if models.words is not None and weights.word:
            scorers.append(
                WordScorer(
                    lm=models.words,
                    lexicon=make_lexicon(models.words, self.tokenizer),
                    tokenizer=self.tokenizer,
                    lm_weight=weights.word,
                    word_bonus=weights.word_bonus,
                    unknown_word_score=weights.unknown_word,
                    added_words=[word for word in added_words if word not in models.words],
                )
            )
        if models.tokens is not None and weights.token:
            scorers.append(
                TokenScorer(
                    lm=models.tokens,
                    pieces=self.tokenizer.pieces(),
                    lm_weight=weights.token,
                    token_bonus=weights.token_bonus,
                )
            )
        return scorers

    # -- decoding

    def nbest(
        self, log_probs: LogProbs, attention: AttentionScorer | None = None
    ) -> list[Hypothesis]:
        """Return the hypotheses of a whole clip, (U, V), the best first; there is at least one.

        attention: the attention decoder of the utterance, which rescoring needs.
        """
        if self.decoder_type == "graph":
            return self.graph_decoder.decode(log_probs)
        return self.finish(self.advance(self.start(), log_probs), attention)

    def start(self) -> BeamStates:
        """Begin a stream; raise ConfigError for a decoding graph, which takes only whole clips."""
        return tuple(search.start() for search in self._searches())

    def advance(self, states: BeamStates, log_probs: LogProbs) -> BeamStates:
        """Return the states after more frames, (U, V). The earlier states are no longer valid."""
        pairs = zip(self._searches(), states, strict=True)
        return tuple(search.advance(state, log_probs) for search, state in pairs)

    def copy(self, states: BeamStates) -> BeamStates:
        return tuple(state.copy() for state in states)

    def finish(
        self, states: BeamStates, attention: AttentionScorer | None = None
    ) -> list[Hypothesis]:
        """Return the hypotheses of a clip that ends here, the best first; there is at least one.

        attention: the attention decoder of the utterance, which rescoring needs.
        """
        if not self.attention_rescoring:
            attention = None
        elif attention is None:
            raise TypeError("attention rescoring needs the attention decoder of the utterance")
        beams: list[list[Hypothesis]] = []
        for search, state in zip(self._searches(), states, strict=True):
            # The beam is empty if no sequence of ordinary tokens is possible.
            beam = search.finish(state) or [Hypothesis(tokens=(), score=0.0, ctc_score=0.0)]
            if attention is not None:
                beam = rescore(beam, attention, self.weights.attention)
            beams.append(beam)
        return self._hotword_scorer.choose(*beams) if self.phrases else beams[0]

    def _searches(self) -> list[PrefixBeamSearch]:
        """Return the unbiased search and, with hotwords, the biased one."""
        if self.decoder_type == "graph":
            raise ConfigError(
                "Streaming needs the greedy or the beam decoder, but this model decodes with a "
                "graph. Pass --decoder greedy, or fit another: sbkit tune RUN --decoder beam"
            )
        if self.phrases:
            return [self._unbiased_search, self._biased_search]
        return [self._unbiased_search]


# ---- clips


@dataclass(frozen=True, eq=False, kw_only=True)
class DecoderInput:
    """The output of a model for a clip, which a decoder turns into text.

    Attributes:
        log_probs: (U, V).
        samples: the length of the clip.
        start: where the clip begins in its recording, in seconds.
        attention: the attention decoder of the clip, for a decoder that rescores.
        phrases: hotwords of this clip, added to the decoder's; only beam search uses them.
    """

    log_probs: LogProbs
    samples: int
    start: float = 0.0
    attention: AttentionScorer | None = None
    phrases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recognition:
    """The text of a clip, and on request its words with times.

    Attributes:
        start, seconds: where the clip begins in its recording, and its length; with the words.
        confidence: the probability that the whole text is right; None if it is not known.
        expected_errors: edits between the text and what was said, in words, or in characters for a
            language without spaces.
    """

    text: str
    words: tuple[Word, ...] = ()
    start: float = 0.0
    seconds: float = 0.0
    confidence: float | None = None
    expected_errors: float | None = None


class ClipDecoder:
    """Decode clips with a beam decoder, or greedily without one, and time their words.

    It holds no acoustic model, so it can be sent to other processes.
    """

    def __init__(
        self,
        decoder: BeamDecoder | None,
        aligner: WordAligner,
        utterance_confidence: UtteranceConfidence | None = None,
    ) -> None:
        vocabulary = aligner.tokenizer.vocabulary
        greedy = GreedyDecoder(vocab_size=vocabulary.size, blank=vocabulary.blank)
        self.decoder: BeamDecoder | GreedyDecoder = decoder or greedy
        self.aligner = aligner
        self.utterance_confidence = utterance_confidence

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the cache of decoders with hotwords."""
        names = ("decoder", "aligner", "utterance_confidence")
        return {name: getattr(self, name) for name in names}

    @property
    def holds_gil(self) -> bool:
        """Whether decoding is pure Python: other threads of the process wait for it.

        Rescoring needs the model, which is only in this process.
        """
        decoder = self.decoder
        return (
            isinstance(decoder, BeamDecoder)
            and decoder.decoder_type == "beam"
            and not decoder.attention_rescoring
        )

    def decode(self, clip: DecoderInput, *, with_times: bool) -> Recognition:
        """Decode a clip; the times of its words count from the start of its recording."""
        decoder = self.decoder
        aligner = self.aligner
        if clip.phrases and isinstance(decoder, BeamDecoder) and decoder.takes_hotwords:
            decoder = self._cached_with_phrases(clip.phrases)
            aligner = replace(aligner, hotwords=decoder.hotwords)
        beam = decoder.nbest(clip.log_probs, clip.attention)
        tokens = list(beam[0].tokens)
        text = aligner.tokenizer.decode(tokens)
        if not with_times:
            return Recognition(text)
        words = aligner.align(clip.log_probs, tokens, beam, samples=clip.samples)
        confidences = [word.confidence for word in words if word.confidence is not None]
        confidence = expected_errors = None
        if self.utterance_confidence is not None and words and len(confidences) == len(words):
            confidence, expected_errors = self.utterance_confidence(
                confidences, beam, aligner.tokenizer
            )
        return Recognition(
            text,
            tuple(word.later(clip.start) for word in words),
            start=clip.start,
            seconds=samples_to_seconds(clip.samples, aligner.sample_rate),
            confidence=confidence,
            expected_errors=expected_errors,
        )

    @cached_property
    def _cached_with_phrases(self) -> Callable[[tuple[str, ...]], BeamDecoder]:
        """A cache that ends with this decoder."""
        return lru_cache(MAX_HOTWORD_DECODERS)(self._with_phrases)

    def _with_phrases(self, phrases: tuple[str, ...]) -> BeamDecoder:
        assert isinstance(self.decoder, BeamDecoder)
        return self.decoder.with_hotwords([*self.decoder.phrases, *phrases])


_decoder_of_process: ClipDecoder  # in each process of the pool


class DecoderPool:
    """Decode clips in several processes, once many frames have been decoded in this one.

    processes: the largest number of processes.
    """

    def __init__(self, decoder: ClipDecoder, *, processes: int) -> None:
        self.decoder = decoder
        self._num_processes = min(processes, MAX_PROCESSES)
        self._lock = threading.Lock()
        self._executor: ProcessPoolExecutor | None = None
        self._num_frames = 0

    def decode(self, clips: Sequence[DecoderInput], *, with_times: bool) -> list[Recognition]:
        """Return the text of each clip, and ``with_times`` its timed words.

        Raises:
            SbkitError: a clip cannot be decoded, a process was killed, or the pool was closed.
        """
        self._num_frames += sum(len(clip.log_probs) for clip in clips)
        is_pooled = self._num_processes > 1 and self._num_frames >= MIN_FRAMES_FOR_POOL
        if not (is_pooled and self.decoder.holds_gil):
            return [self.decoder.decode(clip, with_times=with_times) for clip in clips]
        from loky.process_executor import BrokenProcessPool, ShutdownExecutorError

        executor = self._start_executor()
        try:
            return list(executor.map(partial(_decode_in_worker, with_times), clips))
        except BrokenProcessPool as error:
            self._shut_down(executor)
            raise SbkitError(
                f"One of the {self._num_processes} decoding processes was killed, perhaps because "
                "memory ran out. Free memory, or pass --decoder greedy."
            ) from error
        except ShutdownExecutorError as error:
            raise SbkitError(
                "The decoding processes were ended, because the pool was closed or another thread "
                "found one of them killed. Decode again."
            ) from error

    def close(self) -> None:
        executor = self._executor
        if executor is not None:
            self._shut_down(executor)

    def _start_executor(self) -> "ProcessPoolExecutor":
        """Return the running executor; start it if there is none."""
        # multiprocessing's pool would import the main module of the program again, which may lack
        # a guard for that, and a fork copies locks that threads hold.
        from loky import ProcessPoolExecutor

        with self._lock:
            if self._executor is None:
                self._executor = ProcessPoolExecutor(
                    self._num_processes,
                    initializer=_set_decoder,
                    initargs=(self.decoder, os.getpid()),
                )
                # A program may never close the pool, and loky's own exit handler then raises.
                self._finalizer = weakref.finalize(self, _kill_workers, self._executor, os.getpid())
            return self._executor

    def _shut_down(self, executor: "ProcessPoolExecutor") -> None:
        """End an executor, unless another thread has ended it and perhaps started the next."""
        with self._lock:
            if self._executor is executor:
                self._executor = None
                self._finalizer()


def _kill_workers(executor: "ProcessPoolExecutor", owner_pid: int) -> None:
    """Kill the processes, unless this process is a fork of the one that owns them."""
    if os.getpid() == owner_pid:
        executor.shutdown(kill_workers=True)


def _set_decoder(decoder: ClipDecoder, parent: int) -> None:
    begin_work(parent)
    global _decoder_of_process
    _decoder_of_process = decoder


def _decode_in_worker(with_times: bool, clip: DecoderInput) -> Recognition:
    return _decoder_of_process.decode(clip, with_times=with_times)
