"""The training of `transducer.py`, with its legend, on scores (B, U, L + 1, V)."""

from typing import Any

from speechbrain import Stage
from torch.nn.functional import pad
from torchaudio.functional import rnnt_loss
from transducer import Transducer

from recipes.asr.recipe import AsrRecipe
from sbkit.audio.augment import Augmentation
from sbkit.data.batch import TextBatch
from sbkit.decoding.pool import RecognizedClip
from sbkit.evaluate.wer import ScoredUtterance
from sbkit.models.loss import Loss
from sbkit.train.brain import Brain


class TransducerBrain(Brain):
    """Train the probability of a transcript, summed over its alignments."""

    parts = ("compute_features", "CNN", "Transformer", "embedding", "gru", "joiner")
    metrics = Transducer.metrics

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.augmentation = Augmentation(self.hparams, features=self.network.encoder.features)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.measure_normalization(self.network.encoder.features)

    def compute_forward(self, batch: TextBatch, stage: Stage) -> Any:
        network, training = self.network, stage is Stage.TRAIN
        audio, lengths = self.augmentation.augment_audio(batch, training=training)
        masks = self.augmentation.feature_augmentation(training=training)
        states, frames = network.encoder.backbone(*network.encoder.inputs(audio, lengths, masks))
        prefixes, _ = network.read(pad(batch.tokens, (1, 0), value=network.vocabulary.bos))
        return states, frames, network.join(states[:, : int(frames.max())], prefixes)

    def compute_objectives(self, outputs: Any, batch: TextBatch, stage: Stage) -> Loss:
        lengths = [n.to(batch.tokens.device).int() for n in (outputs[1], batch.token_lengths)]
        blank = self.network.vocabulary.blank
        sums = rnnt_loss(outputs[2], batch.tokens.int(), *lengths, blank=blank, reduction="none")
        return Loss(sums * batch.weights, lengths[1] * batch.weights)

    def score(self, outputs: Any, batch: TextBatch) -> list[ScoredUtterance]:
        tokens = [self.network.search(row[:count]) for row, count in zip(*outputs[:2], strict=True)]
        texts = map(self.hparams.tokenizer.decode, tokens)
        return self.results_of([*map(RecognizedClip, texts)], batch)


class TransducerRecipe(AsrRecipe):
    """Train a transducer on transcripts."""

    task = Transducer()
    brain = TransducerBrain
