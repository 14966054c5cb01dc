"""Normalizers for scoring: the text table of a language, or one of Whisper's normalizers.

Leaderboards use Whisper's English or basic normalizer (Radford et al. 2022, arXiv 2212.04356,
appendix C).
"""

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from json import dumps, loads

from sbkit.base.errors import ConfigError
from sbkit.base.imports import require_package
from sbkit.text.languages import parse_language
from sbkit.text.normalization import TextTable, language_table, normalize, table_to_store

WHISPER_BASIC, WHISPER_ENGLISH = "whisper-basic", "whisper-english"
LEADERBOARD_EXTRA = "leaderboard"  # of the package
NUM_TABLE_DIGITS = 12


@dataclass(frozen=True)
class Normalizer:
    """A function that normalizes texts, its name, and the SHA-256 of its rules."""

    name: str
    sha256: str
    normalize: Callable[[str], str]

    def __str__(self) -> str:
        return f"{self.name} {self.sha256[:NUM_TABLE_DIGITS]}"


def table_normalizer(language: str, table: TextTable) -> Normalizer:
    """Return the normalizer of a text table, made for a language."""
    content = dumps(table_to_store(table), sort_keys=True)  # files may reorder the keys
    suffix = "" if table.is_plain else ", as written"
    return Normalizer(
        name=f"text table of {language}{suffix}",
        sha256=hashlib.sha256(content.encode()).hexdigest(),
        normalize=partial(normalize, language=language, table=table),
    )


def named_normalizer(name: str) -> Normalizer:
    """Return the normalizer of a language's tag, or one of Whisper's."""
    if name in (WHISPER_BASIC, WHISPER_ENGLISH):
        return _whisper_normalizer(name)
    try:
        return table_normalizer(name, language_table(parse_language(name)))
    except ConfigError as error:
        raise ConfigError(
            f"`normalizer` must be {WHISPER_ENGLISH}, {WHISPER_BASIC} or the tag of a language, "
            f"but is {name!r}."
        ) from error


def _whisper_normalizer(name: str) -> Normalizer:
    """Return a normalizer of transformers.

    The English one unifies British and American spelling by a list of OpenAI's, which the package
    whisper-normalizer contains and transformers does not.
    """
    module_name = "transformers.models.whisper.english_normalizer"
    module = require_package(module_name, extra=LEADERBOARD_EXTRA)
    rules = inspect.getsource(module)
    if name == WHISPER_BASIC:
        function = module.BasicTextNormalizer()
    else:
        require_package("whisper_normalizer", extra=LEADERBOARD_EXTRA)
        spellings = files("whisper_normalizer").joinpath("normalizers/english.json").read_text()
        function = module.EnglishTextNormalizer(loads(spellings))
        rules += spellings
    return Normalizer(name, hashlib.sha256(f"{name}\n{rules}".encode()).hexdigest(), function)
