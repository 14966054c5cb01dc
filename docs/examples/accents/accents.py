"""Adapters by accent: part, task. B utterances, U frames, D width, G accents."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sbkit.base.errors import DataError
from sbkit.bundle.task import SideField
from sbkit.models.transformer import Transformer
from sbkit.tasks.asr.task import AsrTask

ACCENTS = ("us", "uk")
WIDTH = 16  # of an adapter


class AccentTransformer(Transformer):
    """An encoder with an adapter for each accent."""

    def __init__(self, *, d_model: int, **sizes: Any) -> None:
        super().__init__(d_model=d_model, **sizes)
        self.adapters = nn.ModuleList(
            nn.Sequential(nn.Linear(d_model, WIDTH), nn.SiLU(), nn.Linear(WIDTH, d_model))
            for _ in ACCENTS
        )

    def forward(  # type: ignore[override]
        self, x: Tensor, lengths: Tensor, accent: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Encode frames with the adapters of accents (B,): (B, U, D), (B,) -> (B, U, D), (B,)."""
        x, lengths = super().forward(x, lengths)
        changes = torch.stack([adapter(x) for adapter in self.adapters])  # (G, B, U, D)
        return x + changes[accent, torch.arange(len(x), device=x.device)], lengths


class Accents(AsrTask):
    """Speech recognition of a known accent."""

    decodes_frames = True
    side_fields: ClassVar = {"accent": SideField()}

    def side_inputs(self, fields: Mapping[str, Any], labels: Any) -> dict[str, int]:
        if fields["accent"] not in ACCENTS:
            raise DataError(f"`accent` must be one of {ACCENTS}, but is {fields['accent']}.")
        return {"accent": ACCENTS.index(fields["accent"])}
