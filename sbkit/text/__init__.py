"""Text: normalization, verbalization, tokenizers, vocabularies, language tags, recognized words."""

from typing import TYPE_CHECKING

from sbkit.base.imports import lazy_names

if TYPE_CHECKING:
    from sbkit.text.normalization import normalize as normalize
    from sbkit.text.tokenizer import Tokenizer as Tokenizer
    from sbkit.text.verbalize import spell_out as spell_out
    from sbkit.text.vocabulary import ClassLabels as ClassLabels
    from sbkit.text.vocabulary import Vocabulary as Vocabulary
    from sbkit.text.word import Word as Word

__getattr__, __dir__ = lazy_names(
    "sbkit.text",
    ClassLabels="vocabulary",
    Tokenizer="tokenizer",
    Vocabulary="vocabulary",
    Word="word",
    normalize="normalization",
    spell_out="verbalize",
)
