"""The training of `target_speaker.py`."""

from target_speaker import TargetSpeaker

from recipes.asr.recipe import AsrRecipe


class TargetSpeakerRecipe(AsrRecipe):
    """Train a recognizer of one speaker."""

    task = TargetSpeaker()
