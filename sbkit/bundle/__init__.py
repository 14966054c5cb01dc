"""The exchange format of models: configuration, module specifications, allow-list and weights.

`sbkit.runtime` runs bundles, and `sbkit.export` writes them. Importing this package does not import
torch.
"""

from sbkit.bundle.bundle import Bundle as Bundle
from sbkit.bundle.bundle import read_bundle as read_bundle
from sbkit.bundle.config import BundleConfig as BundleConfig
from sbkit.bundle.config import BundleFiles as BundleFiles
from sbkit.bundle.protocols import Encoded as Encoded
from sbkit.bundle.protocols import RunnableModel as RunnableModel
from sbkit.bundle.protocols import SpeechSynthesizer as SpeechSynthesizer
from sbkit.bundle.protocols import StreamingModel as StreamingModel
