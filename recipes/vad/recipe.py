"""Voice activity detection: whether each frame is speech."""

from functools import partial

from recipes.prepare import RANGES, corpus_of, unlabeled_loaders
from recipes.vad.brain import VoiceActivityBrain, collate
from recipes.vad.data import prepare_speech
from sbkit.tasks.voice_activity import VOICE_ACTIVITY
from sbkit.train.recipe import Recipe

VAD = Recipe(
    task=VOICE_ACTIVITY,
    prepare_splits=prepare_speech,
    make_loaders=partial(unlabeled_loaders, collate=collate),
    brain=VoiceActivityBrain,
    corpus=corpus_of,
    ranges=RANGES,
)
