"""Pretrained speech encoders as modules of a YAML; names are imported on first use."""

from typing import TYPE_CHECKING

from sbkit.base.imports import lazy_names

if TYPE_CHECKING:
    from sbkit.models.pretrained.parts import PretrainedEncoder as PretrainedEncoder
    from sbkit.models.pretrained.parts import PretrainedFeatures as PretrainedFeatures
    from sbkit.models.pretrained.parts import PretrainedFrontEnd as PretrainedFrontEnd

__getattr__ = lazy_names(
    "sbkit.models.pretrained",
    PretrainedEncoder="parts",
    PretrainedFeatures="parts",
    PretrainedFrontEnd="parts",
)
