"""Prefix beam search with language models, hotwords and the attention decoder of a model.

Legend: U frames, V vocabulary.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from sbkit.base.arrays import LogProbs
from sbkit.base.errors import ConfigError
from sbkit.base.ranges import FLAG, MAPPING, Range, require_in_range
from sbkit.decoding.attention import AttentionScorer
from sbkit.decoding.decoder import WORD_WEIGHTS, DecoderWeights, rescore
from sbkit.decoding.greedy import Hypothesis, near_speech
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
from sbkit.lm.language_models import LanguageModels, load_language_models
from sbkit.text.tokenizer import Tokenizer

BEAM_SIZE = 32
MAX_BEAM_SIZE = 4096  # each hypothesis takes memory, and a downloaded bundle may ask for more
TOKEN_THRESHOLD = -6.0  # a frame tries only tokens with a higher log-probability
BLANK_THRESHOLD = -0.02  # a blank of 0.98 is certain: skipping its frame saves 7 % of the time
MAX_CANDIDATES = 12  # tokens that a frame tries: many are likely if a model has learned little


class BeamDecoder:
    """Decode CTC log-probabilities with language models, hotwords and an attention decoder.

    language_models: the models, or their file, which is loaded when it is first needed.
    beam_size: the number of hypotheses.
    weights: None: they are fitted to the validation sets at the end of training.
    attention_rescoring: whether the attention decoder's score is added to the hypotheses.
    phrases: hotwords; a bundle does not store them.

    >>> import numpy as np, tempfile
    >>> from pathlib import Path
    >>> from sbkit.lm.language_models import LanguageModels
    >>> from sbkit.text.tokenizer import ensure_tokenizer
    >>> options = {"token_type": "char", "vocab_size": None, "texts": lambda: ["ab ba"] * 9}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tokenizer = ensure_tokenizer(model_file=Path(folder, "tokenizer.model"), **options)
    >>> decoder = BeamDecoder(tokenizer=tokenizer, language_models=LanguageModels(None, None))
    >>> log_probs = np.log(np.eye(tokenizer.vocab_size)[tokenizer.encode("ba")] + 1e-9)
    >>> tokenizer.decode(decoder.nbest(log_probs)[0].tokens)
    'ba'
    """

    RANGES: ClassVar = {
        "beam_size": Range(low=1, high=MAX_BEAM_SIZE, integer=True, advice="32 is usual."),
        "attention_rescoring": FLAG,
        "weights": replace(MAPPING, advice="Write null to fit them."),
    }
    phrases: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        language_models: str | Path | LanguageModels,
        beam_size: int = BEAM_SIZE,
        weights: Mapping[str, float] | DecoderWeights | None = None,
        attention_rescoring: bool = False,
    ) -> None:
        values = {"beam_size": beam_size, "attention_rescoring": attention_rescoring}
        require_in_range(values, self.RANGES)
        self.tokenizer = tokenizer
        self._language_models_source = language_models
        self.beam_size = beam_size
        self.needs_tuning = weights is None
        if not isinstance(weights, DecoderWeights):
            weights = DecoderWeights.from_plain({} if weights is None else weights)
        self.weights = weights
        self.attention_rescoring = attention_rescoring

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the search, whose trees are too deep for pickle."""
        return {name: value for name, value in vars(self).items() if name != "_search"}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(beam_size={self.beam_size}, {self.weights})"

    def plain(self) -> dict[str, Any]:
        return {
            "beam_size": self.beam_size,
            "attention_rescoring": self.attention_rescoring,
            "weights": asdict(self.weights),
        }

    @cached_property
    def language_models(self) -> LanguageModels:
        if isinstance(self._language_models_source, LanguageModels):
            return self._language_models_source
        return load_language_models(Path(self._language_models_source), self.tokenizer)

    @property
    def hotwords(self) -> frozenset[str]:
        return frozenset(word for phrase in self.phrases for word in phrase.split())

    @property
    def used_weights(self) -> list[str]:
        """The names of the weights that have an effect."""
        models = self.language_models
        used = [*WORD_WEIGHTS] if models.words is not None and self.weights.word else []
        used += ["token", "token_bonus"] if models.tokens is not None else []
        return used + (["attention"] if self.attention_rescoring else [])

    # ---- copies with changes

    def copy_with(self, **changes: Any) -> Self:
        """Return a decoder with changed arguments, which builds its own search."""
        arguments: dict[str, Any] = {
            "tokenizer": self.tokenizer,
            "language_models": self._language_models_source,
            "beam_size": self.beam_size,
            "weights": None if self.needs_tuning else self.weights,
            "attention_rescoring": self.attention_rescoring,
        }
        decoder = type(self)(**(arguments | changes))
        decoder.phrases = self.phrases
        return decoder

    def with_weights(self, weights: DecoderWeights) -> Self:
        """Return a copy with other weights, which shares the loaded language models."""
        return self.copy_with(weights=weights, language_models=self.language_models)

    def with_hotwords(self, phrases: Iterable[str]) -> Self:
        """Return a copy with other hotwords, which the tokenizer must be able to spell.

        A repeated phrase counts once, because rewards shrink with the length of the list.
        """
        decoder = self.copy_with(language_models=self.language_models)
        phrases = [phrases] if isinstance(phrases, str) else phrases
        decoder.phrases = tuple(dict.fromkeys(phrases))
        return decoder

    # ---- the search, built when it is needed

    @cached_property
    def _search(self) -> PrefixBeamSearch:
        vocabulary = self.tokenizer.vocabulary
        settings = BeamSettings(
            vocab_size=vocabulary.size,
            blank=vocabulary.blank,
            beam_size=self.beam_size,
            token_threshold=TOKEN_THRESHOLD,
            max_candidates=MAX_CANDIDATES,
            excluded=(vocabulary.unk, vocabulary.bos, vocabulary.eos),
            silent_ids=self.tokenizer.silent_ids,
            blank_threshold=BLANK_THRESHOLD,
        )
        return PrefixBeamSearch(settings=settings, scorers=self._make_scorers())

    def _make_scorers(self) -> list[PrefixScorer]:
        """Return the language models, which know the words of hotwords, and the hotwords."""
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
                    added_words=[word for word in self.hotwords if word not in models.words],
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
        if self.phrases:
            rewards = reward_phrases(self.phrases, self.tokenizer)
            scorers.append(HotwordScorer(rewards=rewards, tokenizer=self.tokenizer))
        return scorers

    # ---- decoding

    def nbest(
        self, log_probs: LogProbs, attention: AttentionScorer | None = None
    ) -> list[Hypothesis]:
        return self.finish(self.advance(self.start(), log_probs), attention, log_probs)

    def start(self) -> BeamState:
        return self._search.start()

    def advance(self, state: BeamState, log_probs: LogProbs) -> BeamState:
        return self._search.advance(state, log_probs)

    def finish(
        self,
        state: BeamState,
        attention: AttentionScorer | None = None,
        log_probs: LogProbs | None = None,
    ) -> list[Hypothesis]:
        """Return the hypotheses of a clip that ends here, the best first.

        log_probs: of the whole clip, (U, V), so that CTC can score the texts that the attention
            decoder proposes; None in a stream, where these texts are not added.
        """
        # The beam is empty if no sequence of ordinary tokens is possible.
        beam = self._search.finish(state) or [Hypothesis(tokens=(), score=0.0)]
        if not self.attention_rescoring:
            return beam
        assert attention is not None
        # In silence a decoder may invent words with more confidence than CTC has in blanks.
        silent_ids = self.tokenizer.silent_ids
        if log_probs is not None and near_speech(log_probs, silent_ids).any():
            beam_texts = {hypothesis.tokens for hypothesis in beam}
            proposals = [text for text in attention.proposals if text not in beam_texts]
            beam += [self._search.score(log_probs, text) for text in proposals]
        return rescore(beam, attention, self.weights.attention)


def declared_decoder(hparams: Mapping[str, Any]) -> BeamDecoder | None:
    """Return the decoder of a YAML, without rescoring if no attention decoder is trained."""
    decoder = hparams.get("decoder")
    if decoder is None:
        if hparams.get("word_lm_order", 0) or hparams.get("token_lm_order", 0):
            raise ConfigError(
                "`word_lm_order` and `token_lm_order` belong to a `decoder`, but there is none.",
                keys=("word_lm_order",),
            )
        return None
    if type(decoder) is not BeamDecoder:
        raise ConfigError(
            "`decoder` must be a BeamDecoder, so that a bundle can hold it, but is a "
            f"{type(decoder).__name__}.",
            keys=("decoder",),
        )
    if hparams.get("ctc_weight", 1) == 1:  # the attention decoder is not trained
        return decoder.copy_with(attention_rescoring=False)
    return decoder
