"""The search of a run: prefix beam, joint or through a graph, with its language models.

Legend: U frames of 40 ms, V vocabulary.
"""

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from sbkit.base.errors import SbkitError
from sbkit.base.imports import require_package
from sbkit.config.ranges import Range
from sbkit.decoding.attention import AttentionDecoder, JointBeamSearch, rescore
from sbkit.decoding.frames import BeamSettings, Hypothesis, LogProbs
from sbkit.decoding.hotwords import HotwordScorer, reward_phrases
from sbkit.decoding.language_models import LanguageModels, load_language_models
from sbkit.decoding.prefix_beam import BeamState, PrefixBeamSearch
from sbkit.decoding.scorer import (
    Scorer,
    SumOfScorers,
    TokenScorer,
    WordScorer,
    make_lexicon,
)
from sbkit.decoding.word_graph import PACKAGES, GraphSearch, make_graph
from sbkit.text.tokenizer import Tokenizer

Search = PrefixBeamSearch | JointBeamSearch | GraphSearch
BeamStates = tuple[BeamState, ...]  # of the search, and of the one with hotwords
KINDS = ("beam", "graph")
BEAM_SIZE = 32
MAX_BEAM_SIZE = 4096  # each hypothesis takes memory, and a bundle of another's may ask for more
LARGEST_WEIGHT = 1e3
LIKELY = -6.0  # log-probability of tokens that are tried
MOST_TOKENS = 12  # of a frame; a model that has learned little has many likely ones
NO_ATTENTION = "none"  # a text, which a command line can put in the place of another text
ATTENTION = ("rescore", "joint")  # how an attention decoder is used
DECODER_FILE, LANGUAGE_MODELS = "decoder.json", "lm.safetensors"  # in a run and in a bundle


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights of the language models and of the attention decoder beside CTC.

    Attributes:
        word, token: factors of the log-probabilities of words and of tokens.
        word_bonus, token_bonus: for each word and each token.
        unknown: for each word that the model of words does not know.
        attention: factor of the attention decoder's log-probabilities, where it takes part.
    """

    word: float = 0.6
    word_bonus: float = 1.0
    unknown: float = -5.0
    token: float = 0.3
    token_bonus: float = 0.5
    attention: float = 1.0

    @classmethod
    def of(cls, values: Any) -> Self:
        """Read weights from plain data; raise SbkitError for anything but numbers by name."""
        try:
            made = cls(**values)
            is_sound = all(abs(each) < LARGEST_WEIGHT for each in made.plain().values())
        except TypeError:
            is_sound = False
        if not is_sound:
            raise SbkitError(
                f"The weights of a decoder must be numbers named {', '.join(cls().plain())}, but "
                f"are {str(values)[:100]}. Correct them, or write null to have them chosen."
            )
        return made

    def plain(self) -> dict[str, float]:
        """Return them as plain data."""
        return asdict(self)


class BeamDecoder:
    """A search with the language models of a run, and perhaps its attention decoder and hotwords.

    ``kind``: "beam" for prefix beam search, or "graph" for the best path through a graph of the
    model of words, which is built when it is first needed. That uses neither the model of tokens
    nor the attention decoder, and prunes by itself.
    ``weights`` are chosen on the validation set at the end of training where they are null.
    ``attention``: "rescore" adds the attention decoder's score to the hypotheses of the beam,
    "joint" searches token by token with it, "none" or None does without.
    Raises SbkitError for another one, and for weights that are none.
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
        attention: str | None = None,
        kind: str = KINDS[0],
    ) -> None:
        if kind not in KINDS or attention not in (None, NO_ATTENTION, *ATTENTION):
            raise SbkitError(
                f"A decoder must be of `kind` {' or '.join(KINDS)} with `attention` "
                f"{', '.join((NO_ATTENTION, *ATTENTION))}, but is {kind} with {attention}. Correct "
                "it."
            )
        self.tokenizer, self.beam_size, self.kind = tokenizer, beam_size, kind
        self.attention = None if attention == NO_ATTENTION else attention
        self._source = language_models
        self.needs_tuning = weights is None
        given = Weights() if weights is None else weights
        self.weights = given if isinstance(given, Weights) else Weights.of(given)
        self.phrases: tuple[str, ...] = ()  # hotwords

    def __getstate__(self) -> dict[str, Any]:
        """Leave out searches, whose trees are too deep for pickle."""
        built = {"search", "_biased", "_hotwords"}
        return {name: value for name, value in vars(self).items() if name not in built}

    def plain(self) -> dict[str, Any]:
        """Return what describes it in `decoder.json` and in a bundle."""
        names = ("kind", "beam_size", "attention")
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

    def with_weights(self, weights: Weights, *, beam_size: int | None = None) -> "BeamDecoder":
        """Return the same decoder with other weights, and perhaps another beam."""
        return self._copy(
            weights=weights,
            needs_tuning=False,
            beam_size=beam_size or self.beam_size,
            language_models=self.language_models,  # loaded before they are copied
        )

    def with_attention(self, attention: str | None) -> "BeamDecoder":
        """Return the same decoder with another use of the attention decoder."""
        return self._copy(attention=attention)

    def with_language_models(self, models: LanguageModels) -> "BeamDecoder":
        """Return the same decoder with other language models."""
        return self._copy(language_models=models)

    def with_hotwords(self, phrases: Sequence[str]) -> "BeamDecoder":
        """Return the same decoder with phrases to expect, which its tokens can spell.

        Its transcript changes only where the search then finds one of them.
        """
        if self.kind == "graph":
            raise SbkitError(
                "Hotwords must have the beam search, but this decoder is a word graph. Do without, "
                "or choose another decoder: sbkit tune RUN --decoder beam"
            )
        made = self.with_weights(self.weights)
        made.phrases = tuple(phrases)
        vars(made)["search"] = self.search  # without hotwords it is the same
        return made

    def _copy(self, **changes: Any) -> "BeamDecoder":
        made = copy(self)  # by __getstate__
        vars(made).update(changes)
        return made

    def check_graph(self) -> None:
        """Raise SbkitError for a graph without its packages, or with an attention decoder."""
        if self.kind != "graph":
            return
        for name in PACKAGES:
            require_package(name, extra="graph")
        if self.attention is not None:
            raise SbkitError(
                "A decoder of `kind: graph` must do without the attention decoder, since it finds "
                f"one hypothesis alone, but `attention` is {self.attention}. Pass "
                "--attention_decoding=none (tune: --attention none), or --decoder_type=beam."
            )

    # -- how its parts are built --------------------------------------------------------------

    @cached_property
    def _hotwords(self) -> HotwordScorer:
        rewards = reward_phrases(self.phrases, self.tokenizer)
        return HotwordScorer(rewards=rewards, tokenizer=self.tokenizer)

    @cached_property
    def search(self) -> Search:
        """Make the search without hotwords."""
        if self.kind == "graph":
            return self._search_graph()
        return self._search(self._scorers())

    @cached_property
    def _biased(self) -> Search:
        """Make the search with hotwords."""
        return self._search([*self._scorers(self.hotwords), self._hotwords])

    def _search_graph(self) -> GraphSearch:
        self.check_graph()
        words, weights = self.language_models.words, self.weights
        special = self.tokenizer.vocabulary
        if words is None:
            raise SbkitError(
                "A decoder of `kind: graph` must have a language model of words, but has none. "
                "Pass --word_lm_order=3, or --decoder_type=beam."
            )
        graph = make_graph(
            words=words,
            tokenizer=self.tokenizer,
            blank=special.blank,
            scale=weights.word,
            word_bonus=weights.word_bonus,
            unknown=weights.unknown,
        )
        return GraphSearch(
            graph=graph, settings=BeamSettings(vocab_size=special.size, blank=special.blank)
        )

    def _search(self, scorers: Sequence[Scorer]) -> Search:
        special, scorer = self.tokenizer.vocabulary, SumOfScorers(scorers=scorers)
        settings = BeamSettings(
            vocab_size=special.size,
            blank=special.blank,
            beam_size=self.beam_size,
            token_threshold=LIKELY,
            most_tokens=MOST_TOKENS,
            excluded=(special.unk, special.bos, special.eos),
        )
        if self.attention != "joint":
            return PrefixBeamSearch(settings=settings, scorer=scorer)
        weight = self.weights.attention
        return JointBeamSearch(settings=settings, weight=weight, eos=special.eos, scorer=scorer)

    def _scorers(self, added: Collection[str] = ()) -> list[Scorer]:
        """Return the language models with their weights; ``added`` words are known, too."""
        models, weights, scorers = self.language_models, self.weights, list[Scorer]()
        if models.words is not None and weights.word:
            scorers.append(
                WordScorer(
                    lm=models.words,
                    lexicon=make_lexicon(models.words, self.tokenizer),
                    tokenizer=self.tokenizer,
                    lm_weight=weights.word,
                    word_bonus=weights.word_bonus,
                    unknown_word_score=weights.unknown,
                    added_words=[word for word in added if word not in models.words],
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
        """Return the beam of a whole clip, (U, V), the best hypothesis first.

        Raises SbkitError where the attention decoder is used and not given.
        """
        if self.attention is not None and attention is None:
            raise SbkitError(
                f"A decoder with `attention: {self.attention}` must be given the attention decoder "
                "of the utterance, but has CTC alone. Pass one."
            )
        beams = [search.decode(log_probs, attention) for search in self._searches()]
        return self._choose(beams, attention)

    def start(self) -> BeamStates:
        """Return the state before the first frame, for frames that come in pieces.

        Raises SbkitError for a search that takes whole clips alone: joint, or through a graph.
        """
        return tuple(search.start() for search in self._prefix_searches())

    def advance(self, states: BeamStates, log_probs: LogProbs) -> BeamStates:
        """Return the state after more frames, (U, V); the one before is of no use then."""
        pairs = zip(self._prefix_searches(), states, strict=True)
        return tuple(search.advance(state, log_probs) for search, state in pairs)

    def copy(self, states: BeamStates) -> BeamStates:
        """Return a state that stays as it is when this one goes on."""
        return tuple(state.copy() for state in states)

    def finish(
        self, states: BeamStates, attention: AttentionDecoder | None = None
    ) -> list[Hypothesis]:
        """Return the beam of a clip that ends here, the best hypothesis first.

        The end of the sentence is scored, and the attention decoder rescores where it is given.
        """
        pairs = zip(self._prefix_searches(), states, strict=True)
        return self._choose([search.finish(state) for search, state in pairs], attention)

    def _searches(self) -> list[Search]:
        """Return the search and, with hotwords, the one that is biased to them."""
        return [self.search, self._biased] if self.phrases else [self.search]

    def _prefix_searches(self) -> list[PrefixBeamSearch]:
        searches = [each for each in self._searches() if isinstance(each, PrefixBeamSearch)]
        if not searches:
            raise SbkitError(
                "Frames that come in pieces must be decoded by prefix beam search or greedily, but "
                f"this decoder is {self.attention or self.kind}. Tune another: sbkit tune RUN "
                "--decoder beam --attention none"
            )
        return searches

    def _choose(
        self, beams: list[list[Hypothesis]], attention: AttentionDecoder | None
    ) -> list[Hypothesis]:
        if self.attention == "rescore" and attention is not None:
            beams = [rescore(beam, attention, self.weights.attention) for beam in beams]
        return self._hotwords.choose(*beams) if self.phrases else beams[0]
