"""Numbers and the keys of a telephone as they are read aloud, in transcripts that have symbols."""

from collections.abc import Mapping

from sbkit.text.verbalize import spell_numbers

# The words of the two extra telephone keys, in the languages whose prompts have them.
_KEYS: Mapping[str, Mapping[str, str]] = {
    "en": {"*": "star", "#": "pound"},
    "es": {"*": "asterisco", "#": "numeral"},
    "fr": {"*": "étoile", "#": "dièse"},
    "it": {"*": "asterisco", "#": "cancelletto"},
    "ru": {"*": "звездочка", "#": "решетка"},
}


def spell_digits(text: str, language: str = "en") -> str:
    """Spell the numbers of a text, and the keys * and # of a telephone, as they are read aloud."""
    for key, word in _KEYS.get(language, {}).items():
        text = text.replace(key, f" {word} ")
    return spell_numbers(text, language)
