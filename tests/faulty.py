"""A front-end that overflows with noise at full scale, and a release with such a clip."""

from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from torch import Tensor, nn

from sbkit.models.frontend import ConvFrontEnd
from tests.runs import ROOT, Workplace, make_workplace, rows_of

MAX_ENERGY = 23.5  # mean log-mel energy of a frame: speech up to 21.3, full-scale noise 25.4


class Overflow(nn.Module):
    """Return infinity for loud utterances, as an unguarded exponential does."""

    def forward(self, features: Tensor) -> Tensor:
        """Normalize each utterance by itself: (B, T, M) -> (B, T, M)."""
        loud = features.mean(2).amax(1).reshape(-1, 1, 1) > MAX_ENERGY
        return torch.where(loud, features * torch.inf, features)


class FragileFrontEnd(ConvFrontEnd):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.overflow = Overflow()

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(self.overflow(features), lengths)


def noisy_workplace(asterisk: Path, folder: Path) -> Workplace:
    """Write a release whose first training clip is noise at full scale."""
    workplace = make_workplace(asterisk, folder)
    noise = np.random.default_rng(0).choice([-1.0, 1.0], 24_000)
    soundfile.write(noisy_clip(workplace), noise, 16_000)
    return workplace


def noisy_clip(workplace: Workplace) -> Path:
    return workplace.release / "clips" / rows_of(workplace.release / "train.tsv")[0]["path"]


def write_fragile(folder: Path) -> str:
    text = (ROOT / "hparams" / "ctc.yaml").read_text(encoding="utf-8")
    front_end = "!new:sbkit.models.frontend.ConvFrontEnd"
    assert text.count(front_end) == 1
    yaml = folder / "fragile.yaml"
    # The front-end hears the level, which masks would lower.
    text = text.replace("level: utterance", "level: none").replace("freq_masks: 2", "freq_masks: 0")
    yaml.write_text(text.replace(front_end, "!new:tests.faulty.FragileFrontEnd"))
    return str(yaml)
