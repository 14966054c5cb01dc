"""The training of `biasing.py`: of half of the transcripts, one word is expected."""

from dataclasses import replace

from biasing import BiasedTask
from speechbrain import Stage

from recipes.asr.brain import AsrBrain
from recipes.asr.recipe import AsrRecipe
from sbkit.audio.random_draws import draw_uniform
from sbkit.bundle.side_inputs import stack_side_inputs
from sbkit.data.batch import TextBatch
from sbkit.models.encoder import Predictions
from sbkit.runtime.torch_model import to_tensors

SHARE = 0.5  # of the transcripts


class BiasedBrain(AsrBrain):
    """Train with phrases that are drawn from the transcripts."""

    def compute_forward(self, batch: TextBatch, stage: Stage) -> Predictions:
        if stage is Stage.TRAIN:
            draws = draw_uniform(len(batch), 2).tolist()
            words = [(text.split() or [""]) for text in batch.texts]
            phrases = [
                text[int(place * len(text))] if share < SHARE else ""
                for text, (share, place) in zip(words, draws, strict=True)
            ]
            task = BiasedTask()
            clips = [task.side_inputs({"phrases": phrase}, self.tokenizer) for phrase in phrases]
            sides = to_tensors(stack_side_inputs(clips), batch.audio.device)
            batch = replace(batch, sides=sides)
        return super().compute_forward(batch, stage)


class BiasedRecipe(AsrRecipe):
    """Train a recognizer that expects phrases."""

    task = BiasedTask()
    brain = BiasedBrain
