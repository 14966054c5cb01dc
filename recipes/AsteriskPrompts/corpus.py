"""The default corpus: the telephone prompts of Asterisk, fetched when they are first used."""

from collections.abc import Mapping

from recipes.AsteriskPrompts.prepare import prepare_prompts
from sbkit.data.cache import default_cache
from sbkit.data.corpus import KnobValues
from sbkit.data.debian_release import splits
from sbkit.data.manifest import Manifest
from sbkit.data.release import read_releases
from sbkit.data.tables import TableOptions
from sbkit.text.languages import language_tags

__all__ = ["about", "read", "splits"]

# From the copyright file of each package.
LICENSES = {
    **dict.fromkeys(("en", "es", "fr"), "CC-BY-SA-3.0"),
    **dict.fromkeys(("it", "ru"), "CC-BY-3.0"),
}


def about(knobs: KnobValues) -> Mapping[str, str]:
    """Return the name and the license, for a model card."""
    licenses = dict.fromkeys(LICENSES[tag] for tag in language_tags(knobs["language"]))
    return {"name": "Asterisk prompts", "license": " and ".join(licenses)}


def read(knobs: KnobValues, split: str) -> Manifest:
    """Read one split in the language or languages of the knobs; fetch it if it is missing.

    Raises:
        SbkitError: a language has no prompts, or they cannot be fetched.
    """
    releases = {
        language: prepare_prompts(language=language, cache_folder=default_cache())
        for language in language_tags(knobs["language"])
    }
    return read_releases(releases, split, TableOptions.from_knobs(knobs))
