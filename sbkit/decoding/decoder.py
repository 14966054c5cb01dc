"""The beam decoder of a run: prefix beam search or a decoding graph, with its language models.

Legend: U frames of 40 ms, V vocabulary.
"""

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from sbkit.base.arrays import LogProbs
from sbkit.base.errors import ConfigError
from sbkit.base.imports import require_package
from sbkit.config.ranges import Range
from sbkit.decoding.attention import AttentionDecoder, rescore
from sbkit.decoding.decoding_graph import PACKAGES, GraphDecoder, make_graph
from sbkit.decoding.frames import BeamSettings, Hypothesis
from sbkit.decoding.hotwords import HotwordScorer, reward_phrases
from sbkit.decoding.language_models import LanguageModels, load_language_models
from sbkit.decoding.prefix_beam import BeamState, PrefixBeamSearch
from sbkit.decoding.scorer import (
    PrefixScorer,
    SumOfScorers,
    TokenScorer,
    WordScorer,
    make_lexicon,
)
from sbkit.text.tokenizer import Tokenizer

BeamStates = tuple[BeamState, ...]  # of the search without hotwords, and of the one with them
DECODER_TYPES = ("beam", "graph")
BEAM_SIZE = 32
MAX_BEAM_SIZE = 4096  # each hypothesis takes memory, and a downloaded bundle may ask for more
MAX_WEIGHT = 1e3
TOKEN_THRESHOLD = -6.0  # log-probability above which a token is tried at a frame
MAX_CANDIDATES = 12  # tokens tried at a frame; a model that has learned little has many likely ones
DECODER_FILE, LANGUAGE_MODELS = "decoder.json", "lm.safetensors"  # in a run and in a bundle


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
    def of(cls, values: Any) -> Self:
        """Read weights from plain data; raise ConfigError unless they are numbers by name."""
        try:
            weights = cls(**values)
            is_valid = all(abs(weight) < MAX_WEIGHT for weight in weights.plain().values())
        except TypeError:
            is_valid = False
        if not is_valid:
            raise ConfigError(
                f"The weights of a decoder must be numbers named {', '.join(cls().plain())}; got "
                f"{str(values)[:100]}. Correct them, or write null to have them fitted."
            )
        return weights

    def plain(self) -> dict[str, float]:
        """Return the weights as plain data."""
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
        tokenizer: the tokenizer of the model.
        language_models: the models, or their file, which is loaded when it is first needed.
        beam_size: number of hypotheses.
        weights: None to have them fitted to the validation sets at the end of training.
        attention_rescoring: whether the attention decoder's score is added to the hypotheses.
        decoder_type: "beam" for prefix beam search; "graph" for the best path through a decoding
            graph, built when it is first needed. A graph uses neither the model of tokens nor
            hotwords nor the attention decoder, and has its own pruning.

    Raises:
        ConfigError: the decoder type is unknown, or the weights or the flag are invalid.
    """

    RANGES: ClassVar = {
        "beam_size": Range(low=1, high=MAX_BEAM_SIZE, whole=True, advice=f"{BEAM_SIZE} is usual.")
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
        self.weights = (
            weights
            if isinstance(weights, Weights)
            else Weights.of({} if weights is None else weights)
        )
        self.phrases: tuple[str, ...] = ()  # hotwords

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the searches: their trees are too deep for pickle."""
        built = {"_search", "_biased_search", "_hotword_scorer", "graph_decoder"}
        return {name: value for name, value in vars(self).items() if name not in built}

    def plain(self) -> dict[str, Any]:
        """Return the entries of `decoder.json` and of a bundle."""
        names = ("decoder_type", "beam_size", "attention_rescoring")
        return {**{name: getattr(self, name) for name in names}, "weights": self.weights.plain()}

    @property
    def hotwords(self) -> frozenset[str]:
        """Return the words of the hotword phrases."""
        return frozenset(word for phrase in self.phrases for word in phrase.split())

    @cached_property
    def language_models(self) -> LanguageModels:
        """Load the language models when they are first needed."""
        if isinstance(self._source, LanguageModels):
            return self._source
        return load_language_models(Path(self._source), self.tokenizer)

    # -- copies with changes ------------------------------------------------------------------

    def with_weights(self, weights: Weights, *, beam_size: int | None = None) -> "BeamDecoder":
        """Return a copy with other weights, and optionally another beam size."""
        return self._copy(
            weights=weights,
            needs_tuning=False,
            beam_size=beam_size or self.beam_size,
            language_models=self.language_models,  # loaded before they are copied
        )

    def without_attention(self) -> "BeamDecoder":
        """Return a copy that does not rescore with the attention decoder."""
        return self._copy(attention_rescoring=False)

    def with_language_models(self, models: LanguageModels) -> "BeamDecoder":
        """Return a copy with other language models."""
        return self._copy(language_models=models)

    def with_hotwords(self, phrases: Sequence[str]) -> "BeamDecoder":
        """Return a copy that expects some phrases, which its tokens can spell.

        The transcript changes only where the biased search finds one of the phrases.
        """
        if self.decoder_type == "graph":
            raise ConfigError(
                "Hotwords need the beam decoder, but this model decodes with a graph. Leave the "
                "hotwords out, or fit another decoder: sbkit tune RUN --decoder beam"
            )
        decoder = self.with_weights(self.weights)
        decoder.phrases = tuple(phrases)
        vars(decoder)["_search"] = self._search  # the same without hotwords
        return decoder

    def _copy(self, **changes: Any) -> "BeamDecoder":
        decoder = copy(self)  # by __getstate__
        vars(decoder).update(changes)
        return decoder

    # -- construction of the searches ---------------------------------------------------------

    def check_graph(self) -> None:
        """Raise an error for a graph whose packages are missing, or with attention rescoring."""
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
        """Build the decoding graph."""
        self.check_graph()
        words, weights = self.language_models.words, self.weights
        vocabulary = self.tokenizer.vocabulary
        if words is None:
            raise ConfigError(
                "`decoder_type: graph` needs a language model of words, but there is none. Pass "
                "--word_lm_order=3, or --decoder_type=beam."
            )
        graph = make_graph(
            words=words,
            tokenizer=self.tokenizer,
            blank=vocabulary.blank,
            scale=weights.word,
            word_bonus=weights.word_bonus,
            unknown=weights.unknown,
        )
        return GraphDecoder(graph=graph, vocab_size=vocabulary.size, blank=vocabulary.blank)

    @cached_property
    def _search(self) -> PrefixBeamSearch:
        """Build the search without hotwords."""
        return self._make_search(self._make_scorers())

    @cached_property
    def _biased_search(self) -> PrefixBeamSearch:
        """Build the search with hotwords."""
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
        return PrefixBeamSearch(settings=settings, scorer=SumOfScorers(scorers=scorers))

    def _make_scorers(self, added_words: Collection[str] = ()) -> list[PrefixScorer]:
        """Return the weighted language models; ``added_words`` count as known words."""
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

    # -- decoding -----------------------------------------------------------------------------

    def nbest(
        self, log_probs: LogProbs, attention: AttentionDecoder | None = None
    ) -> list[Hypothesis]:
        """Return the hypotheses of a whole clip, (U, V), the best first.

        ``attention`` is the attention decoder of the utterance, required for rescoring.
        """
        if self.decoder_type == "graph":
            return self.graph_decoder.decode(log_probs)
        if self.attention_rescoring and attention is None:
            raise TypeError("attention rescoring needs the attention decoder of the utterance")
        beams = [search.decode(log_probs) for search in self._searches()]
        return self._choose(beams, attention)

    def start(self) -> BeamStates:
        """Return the state before the first frame, for streaming.

        Raises ConfigError for a decoding graph, which takes only whole clips.
        """
        return tuple(search.start() for search in self._searches())

    def advance(self, states: BeamStates, log_probs: LogProbs) -> BeamStates:
        """Return the state after more frames, (U, V). The earlier state is no longer valid."""
        pairs = zip(self._searches(), states, strict=True)
        return tuple(search.advance(state, log_probs) for search, state in pairs)

    def copy(self, states: BeamStates) -> BeamStates:
        """Return an independent copy of a state."""
        return tuple(state.copy() for state in states)

    def finish(
        self, states: BeamStates, attention: AttentionDecoder | None = None
    ) -> list[Hypothesis]:
        """Return the hypotheses of a clip that ends here, the best first.

        The end of the sentence is scored, and ``attention``, if given, rescores.
        """
        pairs = zip(self._searches(), states, strict=True)
        return self._choose([search.finish(state) for search, state in pairs], attention)

    def _searches(self) -> list[PrefixBeamSearch]:
        """Return the search and, with hotwords, the one that is biased to them."""
        if self.decoder_type == "graph":
            raise ConfigError(
                "Streaming needs the greedy or the beam decoder, but this model decodes with a "
                "graph. Pass --decoder greedy, or fit another: sbkit tune RUN --decoder beam"
            )
        return [self._search, self._biased_search] if self.phrases else [self._search]

    def _choose(
        self, beams: list[list[Hypothesis]], attention: AttentionDecoder | None
    ) -> list[Hypothesis]:
        if self.attention_rescoring and attention is not None:
            beams = [rescore(beam, attention, self.weights.attention) for beam in beams]
        return self._hotword_scorer.choose(*beams) if self.phrases else beams[0]
