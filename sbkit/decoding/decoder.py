"""The decoder of a run or a bundle: log-probabilities of clips to texts, and words with times.

`BeamDecoder` is a prefix beam search or a decoding graph, with language models and hotwords. The
attention decoder of a model may rescore its hypotheses. `CtcDecoder` also aligns the words of a
text. Beam search is written in Python, which runs one thread at a time, so `DecoderPool` decodes
many clips in several processes.

Legend: U frames of 40 ms, V vocabulary, N sequences, L tokens.
"""

import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeGuard

import numpy as np

from sbkit.base.arrays import Counts, Float64s, LogProbs
from sbkit.base.errors import ConfigError, SbkitError
from sbkit.base.imports import require_package
from sbkit.config.ranges import Range
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
TOKEN_THRESHOLD = -6.0  # log-probability above which a token is tried at a frame
MAX_CANDIDATES = 12  # tokens tried at a frame; a model that has learned little has many likely ones
DECODER_FILE, LANGUAGE_MODELS = "decoder.json", "lm.safetensors"  # in a run and in a bundle
MIN_FRAMES_FOR_POOL = 5000  # 200 s of audio; to start a process takes half a second
MAX_HOTWORD_DECODERS = 8  # cached for the other clips of their requests
MAX_PROCESSES = 16  # each has its own language models and caches: 0.1 GB in the default run

Tokens = tuple[int, ...]
BeamStates = tuple[BeamState, ...]  # of the plain search and, with hotwords, of the biased one


# ---- rescoring


class AttentionDecoder:
    """Score token sequences of one utterance, each sequence once.

    log_probs: computes ln p of every token after each prefix of a sequence,
    (N, L) -> (N, L + 1, V); eos: the token that ends a sequence.

    >>> def uniform(tokens):
    ...     return np.log(np.full((len(tokens), tokens.shape[1] + 1, 4), 0.25))
    >>> decoder = AttentionDecoder(log_probs=uniform, eos=3)
    >>> round(decoder.score([(1, 2)])[0], 2)  # 3 ln 0.25: two tokens and the end
    -4.16
    """

    def __init__(self, *, log_probs: Callable[[Counts], Float64s], eos: int) -> None:
        self._log_probs, self._eos = log_probs, eos
        self._scores: dict[Tokens, float] = {}

    def score(self, sequences: Sequence[Tokens]) -> list[float]:
        """Return ln p(tokens and their end | audio) of each sequence."""
        unscored = [tokens for tokens in dict.fromkeys(sequences) if tokens not in self._scores]
        if unscored:
            self._scores |= zip(unscored, self._compute(unscored), strict=True)
        return [self._scores[tokens] for tokens in sequences]

    def _compute(self, sequences: Sequence[Tokens]) -> list[float]:
        lengths = np.array([len(tokens) for tokens in sequences])
        padded = np.full((len(sequences), lengths.max() + 1), self._eos)  # (N, L + 1)
        for row, tokens in zip(padded, sequences, strict=True):
            row[: len(tokens)] = tokens
        log_probs = self._log_probs(padded[:, :-1])
        token_scores = np.take_along_axis(log_probs, padded[..., None], axis=2)[..., 0]
        is_counted = np.arange(padded.shape[1]) <= lengths[:, None]  # the tokens and one end
        return [float(score) for score in np.where(is_counted, token_scores, 0.0).sum(1)]


def rescore(
    hypotheses: Sequence[Hypothesis], attention: AttentionDecoder, weight: float
) -> list[Hypothesis]:
    """Add the attention decoder's weighted scores, and return the best hypothesis first."""
    scores = attention.score([hypothesis.tokens for hypothesis in hypotheses])
    rescored = [
        replace(hypothesis, score=hypothesis.score + weight * score, attention_score=weight * score)
        for hypothesis, score in zip(hypotheses, scores, strict=True)
    ]
    return sorted(rescored, key=lambda hypothesis: hypothesis.score, reverse=True)


# ---- beam search and decoding graph


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights of the language models and of the attention decoder, relative to CTC.

    Attributes:
        word, token: factors of the log-probabilities of words and of tokens.
        word_bonus, token_bonus: added for each word and each token.
        unknown: added for each word that the model of words does not know.
        attention: factor of the attention decoder's log-probabilities when it rescores.
    """

    word: float = 0.6
    word_bonus: float = 1.0
    unknown: float = -5.0
    token: float = 0.3
    token_bonus: float = 0.5
    attention: float = 1.0

    @classmethod
    def from_plain(cls, values: Mapping[str, float]) -> Self:
        """Read weights from plain data; raise ConfigError unless they are numbers by name."""
        with suppress(TypeError):  # of other names, or of values that are no numbers
            weights = cls(**values)
            if all(abs(weight) < MAX_WEIGHT for weight in weights.plain().values()):
                return weights
        raise ConfigError(
            f"The weights of a decoder must be numbers named {', '.join(cls().plain())}; got "
            f"{str(values)[:100]}. Correct them, or write null to have them fitted."
        )

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

    Raises:
        ConfigError: the decoder type is unknown, or the weights or the flag are invalid.
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
        weights: Mapping[str, float] | Weights | None = None,
        attention_rescoring: bool = False,
        decoder_type: str = DECODER_TYPES[0],
    ) -> None:
        if decoder_type not in DECODER_TYPES:
            raise ConfigError(
                f"`decoder_type` must be {' or '.join(DECODER_TYPES)}; got {decoder_type}."
            )
        if not isinstance(attention_rescoring, bool):
            raise ConfigError(
                f"`attention_rescoring` must be True or False; got {attention_rescoring}."
            )
        self.tokenizer, self.beam_size = tokenizer, beam_size
        self.decoder_type, self.attention_rescoring = decoder_type, attention_rescoring
        self._source = language_models
        self.needs_tuning = weights is None
        if not isinstance(weights, Weights):
            weights = Weights.from_plain({} if weights is None else weights)
        self.weights = weights
        self.phrases: tuple[str, ...] = ()  # hotwords

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the searches: their trees are too deep for pickle."""
        built = {"_search", "_biased_search", "_hotword_scorer", "graph_decoder"}
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

    @cached_property
    def language_models(self) -> LanguageModels:
        if isinstance(self._source, LanguageModels):
            return self._source
        return load_language_models(Path(self._source), self.tokenizer)

    # -- copies with changes

    def changed(self, **attributes: object) -> "BeamDecoder":
        decoder = copy(self)  # without the searches, by __getstate__
        vars(decoder).update(attributes)
        return decoder

    def with_weights(self, weights: Weights) -> "BeamDecoder":
        models = self.language_models  # loaded once for all copies
        return self.changed(weights=weights, needs_tuning=False, language_models=models)

    def with_hotwords(self, phrases: Iterable[str]) -> "BeamDecoder":
        """Return a copy that expects other phrases; its tokens must be able to spell them.

        The transcript changes only if the biased search finds one of the phrases. A repeated phrase
        counts once, because rewards shrink with the length of the list.
        """
        if self.decoder_type == "graph":
            raise ConfigError(
                "Hotwords need the beam decoder, but this model decodes with a graph. Leave the "
                "hotwords out, or fit another decoder: sbkit tune RUN --decoder beam"
            )
        search, models = self._search, self.language_models
        unique = tuple(dict.fromkeys(phrases))
        return self.changed(phrases=unique, language_models=models, _search=search)

    # -- the searches, built when they are needed

    def check_graph(self) -> None:
        """Raise an error if a graph's packages are missing, or if it should rescore."""
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
        graph = make_graph(
            word_lm=word_lm,
            tokenizer=self.tokenizer,
            lm_weight=self.weights.word,
            word_bonus=self.weights.word_bonus,
            unknown_word_score=self.weights.unknown,
        )
        return GraphDecoder(graph=graph, vocabulary=self.tokenizer.vocabulary)

    @cached_property
    def _search(self) -> PrefixBeamSearch:
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
                    unknown_word_score=weights.unknown,
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
        self, log_probs: LogProbs, attention: AttentionDecoder | None = None
    ) -> list[Hypothesis]:
        """Return the hypotheses of a whole clip, (U, V), the best first.

        Rescoring needs ``attention``, the attention decoder of the utterance.
        """
        if self.decoder_type == "graph":
            return self.graph_decoder.decode(log_probs)
        if self.attention_rescoring and attention is None:
            raise TypeError("attention rescoring needs the attention decoder of the utterance")
        return self.finish(self.advance(self.start(), log_probs), attention)

    def start(self) -> BeamStates:
        """Begin a stream; raise ConfigError for a decoding graph, which takes only whole clips."""
        return tuple(search.start() for search in self._searches())

    def advance(self, states: BeamStates, log_probs: LogProbs) -> BeamStates:
        """Return the state after more frames, (U, V). The earlier state is no longer valid."""
        pairs = zip(self._searches(), states, strict=True)
        return tuple(search.advance(state, log_probs) for search, state in pairs)

    def copy(self, states: BeamStates) -> BeamStates:
        return tuple(state.copy() for state in states)

    def finish(
        self, states: BeamStates, attention: AttentionDecoder | None = None
    ) -> list[Hypothesis]:
        """Return the hypotheses of a clip that ends here, best first; ``attention`` rescores."""
        pairs = zip(self._searches(), states, strict=True)
        beams = [search.finish(state) for search, state in pairs]
        if self.attention_rescoring and attention is not None:
            beams = [rescore(beam, attention, self.weights.attention) for beam in beams]
        return self._hotword_scorer.choose(*beams) if self.phrases else beams[0]

    def _searches(self) -> list[PrefixBeamSearch]:
        """Return the plain search and, with hotwords, the biased one."""
        if self.decoder_type == "graph":
            raise ConfigError(
                "Streaming needs the greedy or the beam decoder, but this model decodes with a "
                "graph. Pass --decoder greedy, or fit another: sbkit tune RUN --decoder beam"
            )
        return [self._search, self._biased_search] if self.phrases else [self._search]


# ---- clips


@dataclass(frozen=True, eq=False, kw_only=True)
class DecoderInput:
    """The output of a model for a clip.

    Attributes:
        log_probs: (U, V).
        samples: the length of the clip.
        start: where the clip begins in its recording, in seconds.
        attention: the attention decoder of the clip, for a decoder that rescores.
        phrases: hotwords of this clip, besides the decoder's; only beam search uses them.
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


class CtcDecoder:
    """Decode clips with a beam decoder, or greedily without one, and align their words.

    It holds no model, so that it can be sent to other processes.
    """

    def __init__(self, decoder: BeamDecoder | None, aligner: WordAligner) -> None:
        vocabulary = aligner.tokenizer.vocabulary
        greedy = GreedyDecoder(vocab_size=vocabulary.size, blank=vocabulary.blank)
        self.decoder: BeamDecoder | GreedyDecoder = decoder or greedy
        self.aligner = aligner

    @property
    def is_python(self) -> bool:
        """Whether decoding runs Python code without a model, and so holds the interpreter."""
        decoder = self.decoder
        return _is_beam_search(decoder) and not decoder.attention_rescoring

    def decode(self, clip: DecoderInput, *, times: bool) -> Recognized:
        """Decode a clip; the times of its words count from the start of its recording."""
        decoder, aligner = self.decoder, self.aligner
        if clip.phrases and _is_beam_search(decoder):
            decoder = _with_hotwords(decoder, clip.phrases)
            aligner = replace(aligner, hotwords=decoder.hotwords)
        beam = decoder.nbest(clip.log_probs, clip.attention)
        tokens = list(beam[0].tokens)
        text = aligner.tokenizer.decode(tokens)
        if not times:
            return Recognized(text)
        words = aligner.align(clip.log_probs, tokens, beam, samples=clip.samples)
        return Recognized(text, tuple(word.later(clip.start) for word in words))


def _is_beam_search(decoder: BeamDecoder | GreedyDecoder) -> TypeGuard[BeamDecoder]:
    return isinstance(decoder, BeamDecoder) and decoder.decoder_type == "beam"


@lru_cache(MAX_HOTWORD_DECODERS)
def _with_hotwords(decoder: BeamDecoder, phrases: tuple[str, ...]) -> BeamDecoder:
    return decoder.with_hotwords([*decoder.phrases, *phrases])


_decoder_of_process: CtcDecoder  # in each process of the pool


class DecoderPool:
    """Decode clips, in up to ``processes`` processes once there have been many frames."""

    def __init__(self, decoder: CtcDecoder, *, processes: int) -> None:
        self.decoder, self._num_processes = decoder, min(processes, MAX_PROCESSES)
        self._lock = threading.Lock()
        self._executor: ProcessPoolExecutor | None = None
        self._num_frames = 0

    def decode(self, clips: Sequence[DecoderInput], *, times: bool) -> list[Recognized]:
        """Return the text of each clip, and with ``times`` its timed words.

        Raises SbkitError if a clip cannot be decoded, or a process is killed.
        """
        self._num_frames += sum(len(clip.log_probs) for clip in clips)
        is_pooled = self._num_processes > 1 and self._num_frames >= MIN_FRAMES_FOR_POOL
        if not (is_pooled and self.decoder.is_python):
            return [self.decoder.decode(clip, times=times) for clip in clips]
        from loky.process_executor import BrokenProcessPool

        try:
            return list(self._start_executor().map(partial(_decode, times), clips))
        except BrokenProcessPool as error:
            self.close()
            raise SbkitError(
                f"One of the {self._num_processes} decoding processes was killed, perhaps because "
                "memory ran out. Free memory, or pass --decoder greedy."
            ) from error

    def close(self) -> None:
        with self._lock:
            if self._executor is not None:
                self._finalizer()
                self._executor = None

    def _start_executor(self) -> "ProcessPoolExecutor":
        """Return the running executor; start it if there is none."""
        # multiprocessing's pool would import the main module of the program again, which may lack
        # a guard for that, and a fork copies locks that threads hold.
        from loky import ProcessPoolExecutor

        with self._lock:
            if self._executor is None:
                self._executor = ProcessPoolExecutor(
                    self._num_processes, initializer=_set_decoder, initargs=(self.decoder,)
                )
                # For a program that never closes the pool: loky's own exit handler fails loudly.
                self._finalizer = weakref.finalize(self, _shut_down, self._executor, os.getpid())
            return self._executor


def _shut_down(executor: "ProcessPoolExecutor", owner: int) -> None:
    """Kill the processes, unless called from a fork of the process that owns them."""
    if os.getpid() == owner:
        executor.shutdown(kill_workers=True)


def _set_decoder(decoder: CtcDecoder) -> None:
    global _decoder_of_process
    _decoder_of_process = decoder


def _decode(times: bool, clip: DecoderInput) -> Recognized:
    return _decoder_of_process.decode(clip, times=times)
