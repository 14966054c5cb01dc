"""The data, the symbols and the keys of a synthesizer's runs: the clips of one voice."""

from collections.abc import Mapping
from typing import ClassVar

from recipes.prepare import CorpusRecipe
from recipes.tts.data import prepare_spoken, prepare_symbols
from sbkit.base.ranges import NonNegative, OneOf, Range, Text
from sbkit.config.hparams import Settings
from sbkit.config.keys import Key, data_key, label_key
from sbkit.models.vocoder import FRAME_HOPS
from sbkit.tasks.tts.recordings import SpokenCollate
from sbkit.tasks.tts.symbols import SYMBOL_TYPES
from sbkit.tasks.tts.task import TtsTask
from sbkit.text.vocabulary import ClassLabels
from sbkit.train.recipe import BrainClass


class TtsRecipe(CorpusRecipe):
    """Train a voice on transcripts."""

    task = TtsTask()
    brain: ClassVar[BrainClass] = "recipes.tts.brain.TtsBrain"
    keys: ClassVar[Mapping[str, Key]] = {
        **CorpusRecipe.keys,
        "language": data_key(
            Text(name="one language tag", advice="Train a voice for each language.")
        ),
        "symbols": label_key(OneOf(values=SYMBOL_TYPES, advice="phonemes need espeak-ng.")),
        "hop": label_key(),  # the pitch of each frame is a column of the data
        "longest_symbol": Key(Range(low=0.1, advice="0.6 s is usual.")),
        **dict.fromkeys(("align_weight", "duration_weight", "variance_weight"), Key(NonNegative)),
        "segment_frames": Key(Range(low=4, integer=True, advice="32 frames are 0.8 s.")),
    }
    prepare_splits = staticmethod(prepare_spoken)
    prepare_labels = staticmethod(prepare_symbols)

    def make_collate(self, hparams: Settings, labels: ClassLabels) -> SpokenCollate:
        return SpokenCollate(labels, hparams["sample_rate"], FRAME_HOPS * hparams["hop"])
