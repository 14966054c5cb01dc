"""The training of `accents.py`."""

from accents import Accents

from recipes.asr.recipe import AsrRecipe


class AccentRecipe(AsrRecipe):
    """Train adapters by accent."""

    task = Accents()
