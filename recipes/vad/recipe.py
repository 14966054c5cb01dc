"""Voice activity detection, trained on clips in noise and silence, with a label for each frame.

Legend: B utterances, U frames of 20 ms.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from speechbrain import Stage
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from recipes.prepare import CorpusRecipe
from recipes.vad.data import (
    NOISE_DRAWS,
    SPEECH,
    add_noise,
    add_silence,
    make_voices,
    prepare_speech,
    speech_of,
    take_noise,
)
from sbkit.audio.augment import Augmentation, make_colored
from sbkit.audio.lengths import length_mask
from sbkit.audio.random_draws import draw_uniform
from sbkit.audio.segments import WINDOWS_PER_SECOND
from sbkit.config.hparams import Settings
from sbkit.data.batch import Batch, collate_audio
from sbkit.data.shard import Row, read_rows
from sbkit.models.loss import Loss
from sbkit.tasks.detection.model import VoiceActivityModel
from sbkit.tasks.detection.task import DELAY_FRAMES, Detection, FrameCounts
from sbkit.train.brain import Brain

EVALUATION_NOISE = (10, 10), (0, 0), 1  # snr_db, gain_db and noise_prob
NUM_BABBLE_CLIPS = 500  # training clips that babble is made from


@dataclass(frozen=True, kw_only=True)
class SpeechBatch(Batch):
    """Audio, with a label for each window of 20 ms: speech or not."""

    ON_DEVICE = (*Batch.ON_DEVICE, SPEECH)

    speech: Tensor  # (B, U)


class Scored(NamedTuple):
    """The outputs for a batch, with their targets."""

    log_probs: Tensor  # (B, U, 2) of silence and speech
    speech: Tensor  # (B, U)
    mask: Tensor  # (B, U) true within an utterance


def collate(rows: Sequence[Row], *, sample_rate: int) -> SpeechBatch:
    """Pad utterances to a batch of whole windows, with the labels of the windows."""
    labels = [torch.from_numpy(speech_of(row, sample_rate)) for row in rows]
    speech = pad_sequence(labels, batch_first=True)
    return SpeechBatch(**collate_audio(rows, sample_rate), speech=speech)


def _between(low: float, high: float, share: Tensor) -> Tensor:
    return low + share * (high - low)


class VoiceActivityBrain(Brain):
    """Train the log-probability of speech or silence in each frame."""

    network: VoiceActivityModel
    parts = ("compute_features", "normalize", "conv", "rnn", "speech_lin")
    metrics = Detection.metrics

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.augmentation = Augmentation(self.hparams, features=self.network.features)
        self._colored = make_colored(self.hparams.sample_rate, self.device)

    @cached_property
    def _voices(self) -> Tensor:
        """The speech of training clips, for babble; the same on every rank."""
        if self.loaders is None:
            return torch.zeros(0)
        split = self.loaders.splits.train
        rate = self.hparams.sample_rate
        clips = list[Tensor]()
        for row in read_rows(split, range(0, len(split), -(-len(split) // NUM_BABBLE_CLIPS))):
            speech = np.repeat(speech_of(row, rate), rate // WINDOWS_PER_SECOND)
            clips.append(torch.from_numpy(row["audio"][: len(speech)][speech]).float())
        return make_voices(clips, rate).to(self.device)

    def compute_forward(self, batch: SpeechBatch, stage: Stage) -> Scored:
        hparams = self.hparams
        training = stage is Stage.TRAIN
        silence = round(hparams.silence_seconds * WINDOWS_PER_SECOND)
        window = self.network.chunk_shift_samples
        snr_db, gain_db, noise_prob = EVALUATION_NOISE
        # An evaluation draws the same noise for an utterance each time. With one kind of noise, the
        # best checkpoint was an early one that knew little about the others.
        draws = draw_uniform(len(batch), 4 + NOISE_DRAWS)
        if training:
            snr_db, gain_db, noise_prob = hparams.snr_db, hparams.gain_db, hparams.noise_prob
        else:
            draws[:, 0] = 0.5  # equal silence before and after a clip
        lead, gain, ratio, chance = draws.T[:4].to(batch.audio.device, non_blocking=True)
        start = (lead * (silence + 1)).long()
        audio, speech = add_silence(batch.audio, batch.speech, start, total=silence, window=window)
        lengths = batch.audio_lengths + silence * window
        batch = replace(batch, audio=audio, audio_lengths=lengths)
        audio, lengths = self.augmentation.augment_audio(batch, training=training)
        audio = audio * 10 ** (_between(*gain_db, gain) / 20).unsqueeze(1)
        ratio = torch.where(chance < noise_prob, _between(*snr_db, ratio), torch.inf)
        mask = length_mask(lengths, audio.shape[1], audio.device)
        noise = take_noise(self._colored, self._voices, draws[:, 4:], audio.shape[1])
        noisy = add_noise(audio, speech, noise, ratio, mask)
        log_probs, frames = self.network.predict(noisy, lengths)
        mask = length_mask(frames, log_probs.shape[1], log_probs.device)
        speech = pad(speech, (DELAY_FRAMES, 0))[:, : log_probs.shape[1]]
        return Scored(log_probs, speech, mask)

    def compute_objectives(self, scored: Scored, batch: SpeechBatch, stage: Stage) -> Loss:
        """Sum the negative log-likelihood of the frames of each utterance."""
        likelihoods = scored.log_probs.gather(2, scored.speech.long().unsqueeze(2)).squeeze(2)
        sums = -(likelihoods * scored.mask).sum(1)
        return Loss(sums * batch.weights, scored.mask.sum(1) * batch.weights)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.measure_normalization(self.network.features)

    def score(self, scored: Scored, batch: SpeechBatch) -> list[FrameCounts]:
        detected = scored.log_probs.argmax(2).bool()
        speech = scored.speech
        mask = scored.mask
        frames = (
            *(speech & mask, speech & ~detected & mask),
            *(~speech & mask, ~speech & detected & mask),
        )
        counts = zip(*(frame.sum(1).tolist() for frame in frames), strict=True)
        return [FrameCounts(*utterance) for utterance in counts]


class Vad(CorpusRecipe, Detection):
    """Train a detector on clips in noise."""

    brain = VoiceActivityBrain
    prepare_splits = staticmethod(prepare_speech)

    def make_collate(self, hparams: Settings, labels: Any) -> Callable[[Sequence[Row]], Batch]:
        return partial(collate, sample_rate=hparams["sample_rate"])
