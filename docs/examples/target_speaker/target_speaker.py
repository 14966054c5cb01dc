"""A recognizer of one speaker: part, task. B utterances, S samples, U frames, D width, M values."""

from typing import ClassVar

from torch import Tensor, nn

from sbkit.audio.fbank import Fbank
from sbkit.audio.lengths import length_mask
from sbkit.bundle.task import SideField
from sbkit.tasks.asr.task import AsrTask


class SpeakerGate(nn.Module):
    """Scale each value of the states by the voice of an enrolment: (B, U, D) -> (B, U, D)."""

    def __init__(self, d_model: int, n_mels: int, sample_rate: int) -> None:
        super().__init__()
        self.features = Fbank(n_mels=n_mels, sample_rate=sample_rate)
        self.gate = nn.Sequential(nn.LayerNorm(n_mels), nn.Linear(n_mels, d_model))

    def forward(self, x: Tensor, enrolment: Tensor, enrolment_lengths: Tensor) -> Tensor:
        """Take the enrolments (B, S) as well; their mean features (B, M) are the voices."""
        features, frames = self.features(enrolment.float(), enrolment_lengths)
        mask = length_mask(frames, features.shape[1], features.device).unsqueeze(2)
        voices = (features * mask).sum(1) / mask.sum(1)
        scales: Tensor = 2 * self.gate(voices).sigmoid()
        return x * scales.unsqueeze(1)


class TargetSpeaker(AsrTask):
    """Speech recognition of the speaker whose voice a file has."""

    decodes_frames = True
    side_fields: ClassVar = {"enrolment": SideField(kind="audio")}
