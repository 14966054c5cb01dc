"""Train a detector of voice activity: clips in noise and silence, and a label for each frame.

Legend: B utterances, S samples, U frames.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from speechbrain import Stage
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from recipes.vad.labels import SPEECH, read_speech
from sbkit.audio.augment import Augmentation
from sbkit.audio.levels import WINDOWS
from sbkit.data.batches.batch import Batch, collate_audio
from sbkit.logs.metric import Metrics
from sbkit.models.loss import Loss
from sbkit.models.voice_activity import VoiceActivityModel
from sbkit.tasks.voice_activity import VOICE_ACTIVITY, FrameCounts, frame_errors
from sbkit.train.brain import Brain
from sbkit.train.feature_statistics import measure_on_start

GAIN_DB = (-20.0, 10.0)  # how loud a clip becomes


@dataclass(frozen=True, kw_only=True)
class SpeechBatch(Batch):
    """Audio, and which windows of 20 ms are speech; speech (B, U)."""

    ON_DEVICE = (*Batch.ON_DEVICE, SPEECH)

    speech: Tensor


def collate(rows: Sequence[Mapping[str, Any]], *, sample_rate: int) -> SpeechBatch:
    """Pad utterances to a batch, with the labels of their frames."""
    window = sample_rate // WINDOWS
    labels = [read_speech(row[SPEECH], len(row["audio"]) // window) for row in rows]
    speech = pad_sequence([torch.from_numpy(each) for each in labels], batch_first=True)
    return SpeechBatch(**collate_audio(rows, sample_rate), speech=speech)


class VoiceActivityBrain(Brain):
    """Train the log-probability of speech or silence in each frame.

    Validation and test add noise and silence as training does, drawn alike each time.
    """

    metrics: ClassVar[Metrics] = VOICE_ACTIVITY.metrics

    def __init__(self, **options: Any) -> None:
        """Accept SpeechBrain's options."""
        super().__init__(**options)
        parts = ("compute_features", "normalize", "conv", "rnn", "speech_lin")
        self.detector = VoiceActivityModel(
            model=self.modules["model"], **{each: getattr(self.hparams, each) for each in parts}
        )
        self.augmentation = Augmentation(self.hparams, features=self.detector.features)

    def compute_forward(self, batch: SpeechBatch, stage: Stage) -> tuple[Tensor, Tensor]:
        """Return log-probabilities (B, U, 2) of audio in noise, and its labels (B, U)."""
        with torch.random.fork_rng(devices=[], enabled=stage is not Stage.TRAIN):
            if stage is not Stage.TRAIN:
                torch.manual_seed(self.step)
            placed = self._place(batch)
            audio, lengths = self.augmentation.audio(placed, training=True)
        log_probs, _ = self.detector.predict(audio, lengths)
        return log_probs, placed.speech[:, : log_probs.shape[1]]

    def _place(self, batch: SpeechBatch) -> SpeechBatch:
        """Give each clip a drawn level, and a drawn place in silence, of whole frames."""
        window = self.hparams.sample_rate // WINDOWS
        frames = round(self.hparams.silence_seconds * WINDOWS)
        draws = torch.rand(2, len(batch)).to(batch.audio.device)
        gain = 10 ** ((GAIN_DB[0] + draws[0] * (GAIN_DB[1] - GAIN_DB[0])) / 20)
        audio = pad(batch.audio, (0, frames * window + -batch.audio.shape[1] % window))
        windows = (audio * gain.unsqueeze(1)).unflatten(1, (-1, window))  # (B, U, 320)
        places = torch.arange(windows.shape[1], device=audio.device)
        places = (places - (draws[1] * (frames + 1)).long().unsqueeze(1)) % len(places)
        speech = pad(batch.speech, (0, windows.shape[1] - batch.speech.shape[1]))
        return replace(
            batch,
            audio=windows.gather(1, places.unsqueeze(2).expand_as(windows)).flatten(1),
            audio_lengths=torch.full_like(batch.audio_lengths, audio.shape[1]),
            speech=speech.gather(1, places),
        )

    def compute_objectives(
        self, outputs: tuple[Tensor, Tensor], batch: SpeechBatch, stage: Stage
    ) -> Loss:
        """Sum the negative log-likelihood of all frames of each utterance."""
        log_probs, speech = outputs
        right = log_probs.gather(2, speech.long().unsqueeze(2)).squeeze(2)
        return Loss(-right.sum(1) * batch.weights, speech.shape[1] * batch.weights)

    def on_fit_start(self) -> None:
        """Find the last checkpoint; without one, measure the features first."""
        super().on_fit_start()
        measure_on_start(self, self.detector.features)

    def score(self, outputs: tuple[Tensor, Tensor], batch: SpeechBatch) -> list[FrameCounts]:
        """Count the frames of each utterance."""
        found, speech = outputs[0].argmax(2).bool(), outputs[1]
        counted = (speech, speech & ~found, ~speech, ~speech & found)
        return [
            FrameCounts(*row) for row in zip(*(x.sum(1).tolist() for x in counted), strict=True)
        ]

    def measure(self, results: Sequence[FrameCounts]) -> Mapping[str, float]:
        """Divide the errors by the frames."""
        return frame_errors(results)
