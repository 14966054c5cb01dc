"""Language models: n-gram models with back-off, their training, and ARPA files.

`NgramModel` scores text word by word; `train` is KenLM's modified Kneser-Ney smoothing in numpy.
"""

from typing import TYPE_CHECKING

from sbkit.base.imports import lazy_names

if TYPE_CHECKING:
    from sbkit.lm.arpa import read_arpa as read_arpa
    from sbkit.lm.arpa import write_arpa as write_arpa
    from sbkit.lm.kneser_ney import train as train
    from sbkit.lm.language_models import LanguageModels as LanguageModels
    from sbkit.lm.ngram import NgramModel as NgramModel

__getattr__, __dir__ = lazy_names(
    "sbkit.lm",
    LanguageModels="language_models",
    NgramModel="ngram",
    read_arpa="arpa",
    train="kneser_ney",
    write_arpa="arpa",
)
