"""Parts that fail in the ways that real ones do, for the tests that look for the failure."""

from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from torch import Tensor, nn

from sbkit.models.frontend import ConvFrontEnd
from tests.runs import COUNTS, ROOT, Workplace, make_workplace, rows_of

LOUD = 23.5  # mean log-mel energy of a frame: 21.3 at most in speech, 25.4 in noise at full scale


class Overflow(nn.Module):
    """Give infinity for utterances that are too loud, as an unguarded exponential would."""

    def forward(self, features: Tensor) -> Tensor:
        """Look at each utterance alone: (B, T, M) -> (B, T, M)."""
        loud = features.mean(2).amax(1).reshape(-1, 1, 1) > LOUD
        return torch.where(loud, features * torch.inf, features)


class FragileFrontEnd(ConvFrontEnd):
    """A front-end that cannot stand noise at full scale."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.overflow = Overflow()

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Overflow, or go on as usual."""
        return super().forward(self.overflow(features), lengths)


def noisy_workplace(asterisk: Path, folder: Path, counts: dict[str, int] = COUNTS) -> Workplace:
    """Make a release in which the first training clip is noise at full scale."""
    workplace = make_workplace(asterisk, folder, counts)
    noise = np.random.default_rng(0).choice([-1.0, 1.0], 24_000)
    soundfile.write(noisy_clip(workplace), noise, 16_000)
    return workplace


def noisy_clip(workplace: Workplace) -> Path:
    """Name that clip."""
    return workplace.release / "clips" / rows_of(workplace.release / "train.tsv")[0]["path"]


def write_fragile(folder: Path) -> str:
    """Write a YAML whose front-end cannot stand such noise."""
    text = (ROOT / "hparams" / "ctc.yaml").read_text(encoding="utf-8")
    ours = "!new:sbkit.models.frontend.ConvFrontEnd"
    assert text.count(ours) == 1
    yaml = folder / "fragile.yaml"
    yaml.write_text(text.replace(ours, "!new:tests.faulty.FragileFrontEnd"))
    return str(yaml)
