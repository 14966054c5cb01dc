"""Train a voice detector on clips in noise and silence, with a label for each frame.

Legend: B utterances, U frames of 20 ms.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from speechbrain import Stage
from torch import Tensor
from torch.nn.functional import pad

from recipes.vad.data import NoisyClips, SpeechBatch
from sbkit.audio.augment import Augmentation
from sbkit.audio.lengths import length_mask
from sbkit.models.loss import Loss
from sbkit.tasks.vad.model import VadModel
from sbkit.tasks.vad.task import DELAY_FRAMES, FrameCounts, VadTask
from sbkit.train.brain import Brain


class NoisyOutputs(NamedTuple):
    """The outputs for a batch, and the batch with noise."""

    log_probs: Tensor  # (B, U, 2) of silence and speech
    frames: Tensor  # (B,)
    noisy: SpeechBatch


class VadBrain(Brain):
    """Train the log-probability of speech or silence in each frame."""

    network: VadModel
    parts = ("compute_features", "normalize", "conv", "rnn", "speech_lin")
    metrics = VadTask.metrics

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.augmentation = Augmentation(self.hparams, features=self.network.features)

    @cached_property
    def noisy_clips(self) -> NoisyClips:
        train = None if self.loaders is None else self.loaders.splits.train
        return NoisyClips(self.hparams.settings, train, self.device)

    def compute_forward(self, batch: SpeechBatch, stage: Stage) -> NoisyOutputs:
        augmentation = self.augmentation if stage is Stage.TRAIN else None
        noisy = self.noisy_clips.add_to(batch, augmentation)
        log_probs, frames = self.network.predict(noisy.audio, noisy.audio_lengths)
        return NoisyOutputs(log_probs, frames, noisy)

    def compute_objectives(self, outputs: NoisyOutputs, batch: SpeechBatch, stage: Stage) -> Loss:
        """Sum the negative log-likelihood of the frames of each utterance."""
        log_probs = outputs.log_probs
        speech = pad(outputs.noisy.speech, (DELAY_FRAMES, 0))[:, : log_probs.shape[1]]
        likelihoods = log_probs.gather(2, speech.long().unsqueeze(2)).squeeze(2)
        mask = length_mask(outputs.frames, log_probs.shape[1], log_probs.device)
        sums = -(likelihoods * mask).sum(1)
        return Loss(sums * batch.weights, mask.sum(1) * batch.weights)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.measure_normalization(self.network.features)

    def score(self, outputs: NoisyOutputs, batch: SpeechBatch) -> Sequence[FrameCounts]:
        return super().score((outputs.log_probs, outputs.frames), outputs.noisy)
