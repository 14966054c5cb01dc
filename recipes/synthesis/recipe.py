"""Text to speech, in the voice of a corpus."""

from recipes.prepare import RANGES, corpus_of
from recipes.synthesis.brain import SynthesisBrain
from recipes.synthesis.data import make_spoken_loaders, prepare_spoken, prepare_symbols
from sbkit.config.ranges import NON_NEGATIVE, Range
from sbkit.tasks.synthesis import SYNTHESIS as TASK
from sbkit.train.recipe import Recipe

SYNTHESIS = Recipe(
    task=TASK,
    prepare_splits=prepare_spoken,
    prepare_labels=prepare_symbols,
    make_loaders=make_spoken_loaders,
    brain=SynthesisBrain,
    corpus=corpus_of,
    ranges=RANGES
    | dict.fromkeys(("align_weight", "duration_weight", "variance_weight"), NON_NEGATIVE)
    | {
        "segment_frames": Range(low=4, whole=True, advice="32 frames are 0.8 s."),
        "longest_symbol": Range(low=0.1, advice="0.6 s is usual."),
    },
)
