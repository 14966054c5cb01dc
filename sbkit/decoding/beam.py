"""Prefix beam search with language models, hotwords and the attention decoder of a model.

Legend: U frames, V vocabulary.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from types import MappingProxyType

from sbkit.base.arrays import LogProbs
from sbkit.decoding.decoder import AttentionScorer, LanguageModelDecoder, rescore
from sbkit.decoding.greedy import Hypothesis
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

TOKEN_THRESHOLD = -6.0  # a frame tries only tokens with a higher log-probability
BLANK_THRESHOLD = -0.02  # a blank of 0.98 is certain: skipping its frame saves 7 % of the time
MAX_CANDIDATES = 12  # tokens that a frame tries: many are likely if a model has learned little
TRIAL_BEAM_SIZE = 16  # takes half the time of 32

BeamStates = tuple[BeamState, ...]  # of the unbiased search and, with hotwords, of the biased one


class BeamDecoder(LanguageModelDecoder):
    """Decode CTC log-probabilities with language models, hotwords and an attention decoder.

    >>> import numpy as np, tempfile
    >>> from pathlib import Path
    >>> from sbkit.lm.language_models import LanguageModels
    >>> from sbkit.text.tokenizer import ensure_tokenizer
    >>> options = {"kind": "char", "vocab_size": None, "texts": lambda: ["ab ba"] * 9}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tokenizer = ensure_tokenizer(model_file=Path(folder, "tokenizer.model"), **options)
    >>> decoder = BeamDecoder(tokenizer=tokenizer, language_models=LanguageModels(None, None))
    >>> log_probs = np.log(np.eye(tokenizer.vocab_size)[tokenizer.encode("ba")] + 1e-9)
    >>> tokenizer.decode(decoder.nbest(log_probs)[0].tokens)
    'ba'
    """

    decoder_type = "beam"
    weight_ranges = MappingProxyType(
        {
            "word": (0.2, 1.0),
            "word_bonus": (0.0, 2.5),
            "unknown_word": (-10.0, -2.0),
            "token": (0.0, 0.6),
            "token_bonus": (0.0, 1.0),
            "attention": (0.0, 2.5),
        }
    )
    _cached_names = frozenset(("_unbiased_search", "_biased_search", "_hotword_scorer"))

    # -- copies with changes

    def with_hotwords(self, phrases: Iterable[str]) -> "BeamDecoder":
        """Return a copy with other hotwords, which the tokenizer must be able to spell.

        The transcript changes only if the biased search finds one of the phrases. A repeated phrase
        counts once, because rewards shrink with the length of the list.
        """
        decoder = self.copy_with(language_models=self.language_models)
        phrases = [phrases] if isinstance(phrases, str) else phrases
        decoder.phrases = tuple(dict.fromkeys(phrases))
        # Without hotwords the search is the same, so the copy shares it, with its cached states.
        decoder._unbiased_search = self._unbiased_search
        return decoder

    def make_quick(self) -> "BeamDecoder":
        """Return a copy with a smaller beam."""
        return self.copy_with(beam_size=min(self.beam_size, TRIAL_BEAM_SIZE))

    # -- the searches, built when they are needed

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

    def check(self) -> None:
        """Do nothing: beam search runs everywhere."""

    def nbest(
        self, log_probs: LogProbs, attention: AttentionScorer | None = None
    ) -> list[Hypothesis]:
        return self.finish(self.advance(self.start(), log_probs), attention)

    def start(self) -> BeamStates:
        return tuple(search.start() for search in self._searches())

    def advance(self, states: BeamStates, log_probs: LogProbs) -> BeamStates:
        pairs = zip(self._searches(), states, strict=True)
        return tuple(search.advance(state, log_probs) for search, state in pairs)

    def finish(
        self, states: BeamStates, attention: AttentionScorer | None = None
    ) -> list[Hypothesis]:
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
        if self.phrases:
            return [self._unbiased_search, self._biased_search]
        return [self._unbiased_search]
