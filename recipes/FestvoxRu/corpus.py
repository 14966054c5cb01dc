"""The corpus of Debian's Russian Festival voice, fetched at the first use."""

from collections.abc import Mapping
from typing import Any

from recipes.FestvoxRu.prepare import LANGUAGE, prepare_festvox
from sbkit.base.errors import SbkitError
from sbkit.data.cache import default_cache
from sbkit.data.debian_release import splits
from sbkit.data.manifest import Manifest
from sbkit.data.release import read_release
from sbkit.text.languages import language_tags

__all__ = ["about", "read", "splits"]


def about(knobs: Mapping[str, Any]) -> Mapping[str, str]:
    """Return its name and its licence, for a model's card."""
    return {"name": "festvox-ru", "licence": "BSD-like"}


def read(knobs: Mapping[str, Any], split: str) -> Manifest:
    """Read one split, with the column word_times, fetching the corpus if need be.

    Raises:
        SbkitError: another language is asked for, or the corpus cannot be fetched.
    """
    if language_tags(knobs["language"]) != (LANGUAGE,):
        raise SbkitError(
            f"`language` must be {LANGUAGE} for the corpus FestvoxRu, but is "
            f"{knobs['language']!r}. Pass --language={LANGUAGE}."
        )
    release = prepare_festvox(cache_folder=default_cache())
    return read_release(release / f"{split}.tsv", LANGUAGE, knobs)
