"""A program of torch.export, which runs with torch alone: ``torch.export.load(FILE).module()``."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from sbkit.inference.formats.candidate import EXACT, Candidate
from sbkit.inference.formats.source import Source, trained_log_probs

FILE = "model.pt2"


def write_torch(source: Source, folder: Path) -> Sequence[Candidate]:
    """Write the program, and read it again."""
    torch.export.save(source.program, folder / FILE)
    loaded = torch.export.load(folder / FILE).module()
    return [
        Candidate(
            name="fp32", files=(FILE,), limits=EXACT, log_probs=partial(trained_log_probs, loaded)
        )
    ]
