"""Speech recognition: CTC, and an attention decoder beside it."""

from recipes.asr.brain import AsrBrain
from recipes.asr.data import make_asr_loaders, prepare_tokenizer
from recipes.prepare import RANGES, corpus_of, prepare_transcripts
from sbkit.config.ranges import SHARE, Range, Text
from sbkit.tasks.speech_recognition import SPEECH_RECOGNITION
from sbkit.train.recipe import Recipe

ASR = Recipe(
    task=SPEECH_RECOGNITION,
    prepare_splits=prepare_transcripts,
    prepare_labels=prepare_tokenizer,
    make_loaders=make_asr_loaders,
    brain=AsrBrain,
    corpus=corpus_of,
    ranges={
        **RANGES,
        "ctc_weight": Range(low=0.01, high=1, advice="All decoding is by CTC, which must learn."),
        "inter_ctc_weight": Range(
            low=0, high=0.99, advice="At 1 nothing trains the upper encoder."
        ),
        "label_smoothing": SHARE,
        "lm_text": Text(),
    },
)
