from speechbrain import Stage

from recipes.asr.brain import AsrBrain
from recipes.asr.recipe import AsrRecipe


class TwoPassBrain(AsrBrain):
    def fit_batch(self, batch):
        batch = self.to_device(batch)
        for _ in range(2):  # with other masks and dropout
            with self.training_ctx:
                outputs = self.compute_forward(batch, Stage.TRAIN)
                loss = self.compute_objectives(outputs, batch, Stage.TRAIN)
            mean = loss.sums.sum() / loss.counts.sum().clamp(min=1)
            self.scaler.scale(mean / 2).backward()
        self.optimizers_step()
        return loss.detach()


class TwoPasses(AsrRecipe):
    brain = TwoPassBrain
