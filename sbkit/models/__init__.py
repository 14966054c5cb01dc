"""Models: encoders, recognizers, their losses, and streaming.

Names are imported on first use, so that importing this package does not import torch.
"""

from typing import TYPE_CHECKING

from sbkit.base.imports import lazy_names

if TYPE_CHECKING:
    from sbkit.models.asr import AsrModel as AsrModel
    from sbkit.models.frontend import ConvFrontEnd as ConvFrontEnd
    from sbkit.models.layers import GlobalNorm as GlobalNorm
    from sbkit.models.layers import LinearStack as LinearStack
    from sbkit.models.loss import Loss as Loss
    from sbkit.models.transformer import ConformerBlock as ConformerBlock
    from sbkit.models.transformer import Transformer as Transformer

__getattr__, __dir__ = lazy_names(
    "sbkit.models",
    AsrModel="asr",
    ConformerBlock="transformer",
    ConvFrontEnd="frontend",
    GlobalNorm="layers",
    LinearStack="layers",
    Loss="loss",
    Transformer="transformer",
)
