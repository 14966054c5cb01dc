"""A codec, trained on the audio of any corpus."""

from recipes.codec.brain import CodecBrain
from recipes.prepare import RANGES, corpus_of, prepare_audio, unlabeled_loaders
from sbkit.config.ranges import NON_NEGATIVE
from sbkit.tasks.codec import CODEC as TASK
from sbkit.train.recipe import Recipe

LOSS_WEIGHTS = ("mel_weight", "spectral_weight", "adversarial_weight")
CODEC = Recipe(
    task=TASK,
    prepare_splits=prepare_audio,
    make_loaders=unlabeled_loaders,
    brain=CodecBrain,
    corpus=corpus_of,
    ranges=RANGES | dict.fromkeys(LOSS_WEIGHTS, NON_NEGATIVE),
)
