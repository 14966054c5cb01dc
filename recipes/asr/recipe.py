"""Speech recognition: CTC, and an attention decoder beside it."""

from recipes.asr.brain import AsrBrain
from recipes.asr.data import make_asr_loaders, prepare_splits, prepare_tokenizer
from recipes.asr.ranges import RANGES
from sbkit.train.recipe import Recipe

ASR = Recipe(
    prepare_splits=prepare_splits,
    prepare_labels=prepare_tokenizer,
    make_loaders=make_asr_loaders,
    brain=AsrBrain,
    ranges=RANGES,
)
