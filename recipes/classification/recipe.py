"""Classification of utterances by any column of the manifest: `--label=speaker`."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from recipes.classification.brain import ClassificationBrain, collate
from recipes.prepare import RANGES, corpus_of, prepare_labeled, print_data
from sbkit.data.batch import Loaders, make_loaders
from sbkit.data.corpus import KnobValues
from sbkit.data.splits import Splits, take_columns
from sbkit.distributed.device import Placement
from sbkit.tasks.utterance_classification import UTTERANCE_CLASSIFICATION
from sbkit.text.vocabulary import LABEL_FILE, ClassLabels, ensure_labels
from sbkit.train.recipe import Recipe


def prepare_labels(knobs: KnobValues, splits: Splits) -> ClassLabels:
    """List the classes of the training set."""
    names = take_columns(splits.train, knobs["label"])[knobs["label"]].to_pylist()
    return ensure_labels(Path(knobs["output_folder"]) / LABEL_FILE, names)


def make_label_loaders(
    hparams: Mapping[str, Any], splits: Splits, labels: ClassLabels, placement: Placement
) -> Loaders:
    """Plan the batches of every split."""
    print_data(splits, hparams)
    rate = hparams["sample_rate"]
    collate_by_label = partial(collate, labels=labels, column=hparams["label"], sample_rate=rate)
    return make_loaders(splits, hparams, collate=collate_by_label, placement=placement)


CLASSIFICATION = Recipe(
    task=UTTERANCE_CLASSIFICATION,
    prepare_splits=prepare_labeled,
    prepare_labels=prepare_labels,
    make_loaders=make_label_loaders,
    brain=ClassificationBrain,
    corpus=corpus_of,
    ranges=RANGES,
)
