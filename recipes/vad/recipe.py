"""Voice activity: whether each frame is speech."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from recipes.corpora import corpus_of
from recipes.prepare import RANGES, print_data
from recipes.vad.brain import VoiceActivityBrain, collate
from recipes.vad.labels import prepare_speech
from sbkit.data.batches.loaders import Loaders, make_loaders
from sbkit.data.corpora.splits import Splits
from sbkit.distributed.device import Placement
from sbkit.tasks.voice_activity import VOICE_ACTIVITY
from sbkit.train.recipe import Recipe


def make_speech_loaders(
    hparams: Mapping[str, Any], splits: Splits, labels: None, placement: Placement
) -> Loaders:
    """Plan the batches of every split."""
    print_data(splits, hparams)
    with_labels = partial(collate, sample_rate=hparams["sample_rate"])
    return make_loaders(splits, hparams, collate=with_labels, placement=placement)


VAD = Recipe(
    task=VOICE_ACTIVITY,
    prepare_splits=prepare_speech,
    make_loaders=make_speech_loaders,
    brain=VoiceActivityBrain,
    corpus=corpus_of,
    ranges=RANGES,
)
