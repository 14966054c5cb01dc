"""From a transcript as it is written to the text that a model is trained on."""

from collections.abc import Callable, Collection
from functools import partial

from sbkit.base.errors import ConfigError
from sbkit.text.normalization import Orthography, compose, normalize
from sbkit.text.tags import normalize_around_tags


def transcript_normalizer(
    table: Orthography, kept_tags: Collection[str] = ()
) -> Callable[[str], str]:
    """Return the function that normalizes transcripts; training, scores and texts share it.

    Raises:
        ConfigError: the table spells numbers in a language whose numbers sbkit cannot read.

    >>> transcript_normalizer(Orthography(numbers="en"))("I paid $3.50 [laughs]")
    'i paid three dollars and fifty cents'
    """
    spell: Callable[[str], str] = str
    if table.numbers:
        # num2words takes 0.1 s to import.
        from sbkit.text.verbalize import languages_with_numbers, read_numbers

        languages = languages_with_numbers()
        if table.numbers not in languages:
            raise ConfigError(
                f"`text.numbers: spell` reads {', '.join(languages)}, but `language` is "
                f"{table.numbers}. Write the numbers of the transcripts as words, and take it out."
            )
        spell = partial(read_numbers, language=table.numbers)

    def normalize_words(text: str) -> str:
        return normalize(spell(compose(text)), "", table)

    return partial(normalize_around_tags, normalize=normalize_words, kept_names=kept_tags)
