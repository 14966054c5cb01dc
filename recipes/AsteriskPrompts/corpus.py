"""The default corpus: the telephone prompts of Asterisk, fetched at the first use."""

from collections.abc import Mapping
from typing import Any

from recipes.AsteriskPrompts.prepare import prepare_prompts
from sbkit.data.cache import default_cache
from sbkit.data.debian_release import splits
from sbkit.data.manifest import Manifest
from sbkit.data.release import read_releases
from sbkit.text.languages import language_tags

__all__ = ["about", "read", "splits"]

# As the copyright file of each package has it.
LICENCES = {"en": "CC-BY-SA-3.0", "es": "CC-BY-SA-3.0", "fr": "CC-BY-SA-3.0"}
LICENCES |= {"it": "CC-BY-3.0", "ru": "CC-BY-3.0"}


def about(knobs: Mapping[str, Any]) -> Mapping[str, str]:
    """Return its name and its licence, for a model's card."""
    licences = dict.fromkeys(LICENCES[each] for each in language_tags(knobs["language"]))
    return {"name": "Asterisk prompts", "licence": " and ".join(licences)}


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
