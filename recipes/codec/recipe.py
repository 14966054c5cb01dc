"""A codec: audio alone, of any corpus."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from recipes.codec.brain import CodecBrain
from recipes.codec.task import CODEC as TASK
from recipes.corpora import corpus_of
from recipes.prepare import RANGES, prepare_audio, print_data
from sbkit.config.ranges import NOT_NEGATIVE
from sbkit.data.batches.batch import Batch, collate_audio
from sbkit.data.batches.loaders import Loaders, make_loaders
from sbkit.data.corpora.splits import Splits
from sbkit.distributed.device import Placement
from sbkit.train.recipe import Recipe


def load(hparams: Mapping[str, Any], splits: Splits, labels: None, placement: Placement) -> Loaders:
    """Plan the batches of every split."""
    print_data(splits, hparams)
    collate = partial(collate_clips, sample_rate=hparams["sample_rate"])
    return make_loaders(splits, hparams, collate=collate, placement=placement)


def collate_clips(rows: Sequence[Mapping[str, Any]], *, sample_rate: int) -> Batch:
    """Pad utterances to a batch."""
    return Batch(**collate_audio(rows, sample_rate))


WEIGHTS = ("mel_weight", "spectral_weight", "adversarial_weight")
CODEC = Recipe(
    task=TASK,
    prepare_splits=prepare_audio,
    make_loaders=load,
    brain=CodecBrain,
    corpus=corpus_of,
    ranges=RANGES | dict.fromkeys(WEIGHTS, NOT_NEGATIVE),
)
