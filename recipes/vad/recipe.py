"""The data and the keys of a detector's runs: clips in noise and silence."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from recipes.prepare import CorpusRecipe
from recipes.vad.data import collate, prepare_speech
from sbkit.base.ranges import HOUR, Decibels, PositiveCount, Range, Share
from sbkit.config.hparams import Settings
from sbkit.config.keys import Key, above, label_key
from sbkit.data.batch import Batch
from sbkit.data.shard import Row
from sbkit.tasks.vad.task import VadTask
from sbkit.train.recipe import BrainClass


class VadRecipe(CorpusRecipe):
    """Train a detector on clips in noise."""

    task = VadTask()
    brain: ClassVar[BrainClass] = "recipes.vad.brain.VadBrain"
    keys: ClassVar[Mapping[str, Key]] = {
        **CorpusRecipe.keys,
        "recognizer": label_key(str | None),
        "silence_seconds": Key(Range(low=0, high=HOUR, advice="Pass 0 for none.")),
        "gain_db": Key(Decibels),
        "noise_prob": Key(Share),
        "snr_db": Key(Decibels, needs={"noise_prob": above(0)}),
        "d_model": Key(PositiveCount),
    }
    prepare_splits = staticmethod(prepare_speech)

    def make_collate(self, hparams: Settings, labels: Any) -> Callable[[Sequence[Row]], Batch]:
        return partial(collate, sample_rate=hparams["sample_rate"])
