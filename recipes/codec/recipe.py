"""The data and the keys of a codec's runs: the audio of any corpus."""

from collections.abc import Mapping
from typing import ClassVar

from recipes.prepare import CorpusRecipe
from sbkit.base.ranges import NonNegative
from sbkit.config.keys import Key, above, resumed_key
from sbkit.tasks.codec.task import CodecTask
from sbkit.train.recipe import BrainClass


class CodecRecipe(CorpusRecipe):
    """Train a codec on audio."""

    task = CodecTask()
    brain: ClassVar[BrainClass] = "recipes.codec.brain.CodecBrain"
    keys: ClassVar[Mapping[str, Key]] = {
        **CorpusRecipe.keys,
        **dict.fromkeys(("mel_weight", "spectral_weight", "adversarial_weight"), Key(NonNegative)),
        "discriminator_channels": Key(needs={"adversarial_weight": above(0)}),
        "discriminator_lr": resumed_key(NonNegative, needs={"adversarial_weight": above(0)}),
    }
