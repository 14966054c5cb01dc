"""The corpus of Debian's Russian Festival voice, fetched when it is first used."""

from collections.abc import Mapping

from recipes.FestvoxRu.prepare import LANGUAGE, prepare_festvox
from sbkit.base.errors import ConfigError
from sbkit.data.cache import default_cache
from sbkit.data.corpus import KnobValues
from sbkit.data.debian_release import splits
from sbkit.data.manifest import Manifest
from sbkit.data.release import read_release
from sbkit.data.tables import TableOptions
from sbkit.text.languages import language_tags

__all__ = ["about", "read", "splits"]


def about(knobs: KnobValues) -> Mapping[str, str]:
    """Return the name and the license, for a model card."""
    return {"name": "festvox-ru", "license": "BSD-like"}


def read(knobs: KnobValues, split: str) -> Manifest:
    """Read one split, with the column word_times; fetch the corpus if it is missing.

    Raises:
        ConfigError: `language` is not that of the corpus.
        DataError: the corpus cannot be fetched.
    """
    if language_tags(knobs["language"]) != (LANGUAGE,):
        raise ConfigError(
            f"The corpus FestvoxRu is in {LANGUAGE}, but `language` is {knobs['language']!r}. Pass "
            f"--language={LANGUAGE}."
        )
    release = prepare_festvox(cache_folder=default_cache())
    return read_release(release / f"{split}.tsv", TableOptions.from_knobs(knobs, LANGUAGE))
