"""Speech recognition: CTC, and an attention decoder beside it."""

from recipes.asr.brain import AsrBrain
from recipes.asr.data import make_asr_loaders, prepare_tokenizer
from recipes.asr.ranges import RANGES
from recipes.corpora import corpus_of
from recipes.prepare import prepare_transcripts
from sbkit.train.recipe import Recipe

ASR = Recipe(
    prepare_splits=prepare_transcripts,
    prepare_labels=prepare_tokenizer,
    make_loaders=make_asr_loaders,
    brain=AsrBrain,
    corpus=corpus_of,
    ranges=RANGES,
)
