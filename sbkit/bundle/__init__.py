"""The exchange format of models: configuration, module specifications, allow-list and weights.

`sbkit.runtime` runs bundles, and `sbkit.export` writes them. Names are imported on first use, so
that importing this package does not import torch.
"""

from typing import TYPE_CHECKING

from sbkit.base.imports import lazy_names

if TYPE_CHECKING:
    from sbkit.bundle.bundle import Bundle as Bundle
    from sbkit.bundle.bundle import read_bundle as read_bundle
    from sbkit.bundle.config import BundleConfig as BundleConfig
    from sbkit.bundle.config import BundleFiles as BundleFiles
    from sbkit.bundle.protocols import Encoded as Encoded
    from sbkit.bundle.protocols import RunnableModel as RunnableModel
    from sbkit.bundle.protocols import SpeechSynthesizer as SpeechSynthesizer
    from sbkit.bundle.protocols import StreamingModel as StreamingModel

__getattr__ = lazy_names(
    "sbkit.bundle",
    Bundle="bundle",
    BundleConfig="config",
    BundleFiles="config",
    Encoded="protocols",
    RunnableModel="protocols",
    SpeechSynthesizer="protocols",
    StreamingModel="protocols",
    read_bundle="bundle",
)
