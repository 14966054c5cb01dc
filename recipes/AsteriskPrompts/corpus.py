"""The default corpus: the telephone prompts of Asterisk, fetched at the first use."""

from collections.abc import Mapping
from typing import Any

from recipes.AsteriskPrompts.prepare import prepare_prompts
from recipes.release_folder import splits
from sbkit.data.corpora.manifest import Manifest
from sbkit.data.corpora.release import read_releases
from sbkit.data.storage.audio_cache import default_cache
from sbkit.text.languages import language_tags

__all__ = ["read", "splits"]


def read(knobs: Mapping[str, Any], split: str) -> Manifest:
    """Read one split of a language, or of several where a list is named, fetching it if need be.

    Raises:
        SbkitError: there are no prompts in a language, or they cannot be fetched.
    """
    releases = {
        language: prepare_prompts(language=language, cache_folder=default_cache())
        for language in language_tags(knobs["language"])
    }
    return read_releases(releases, split, knobs)
