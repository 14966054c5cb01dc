"""The classes and activations that a bundle may name, by exact name.

A name may lie: `speechbrain.core.os.system` is `posix.system`. So a name is resolved to its object,
and the object must be one of this list, under the name of the module that defines it. Resolving
imports only modules of the list, since an import runs code, and runs no property or `__getattr__`.

Nothing is listed by prefix. Each entry was read: building and calling it only computes on tensors;
none opens a file, a connection or a pickle.
"""

import inspect
import sys
from importlib import import_module
from types import ModuleType

from torch import nn

# Left out on purpose: what takes any callable (ParameterDict), what has no size of its own (Lazy*),
# and what talks to other processes.
MODULES = {
    "torch.nn.modules.activation": "CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh "
    "LeakyReLU LogSigmoid LogSoftmax Mish MultiheadAttention PReLU RReLU ReLU ReLU6 SELU SiLU "
    "Sigmoid Softmax Softmax2d Softmin Softplus Softshrink Softsign Tanh Tanhshrink Threshold",
    "torch.nn.modules.batchnorm": "BatchNorm1d BatchNorm2d BatchNorm3d",
    "torch.nn.modules.channelshuffle": "ChannelShuffle",
    "torch.nn.modules.container": "ModuleDict ModuleList Sequential",
    "torch.nn.modules.conv": "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d",
    "torch.nn.modules.distance": "CosineSimilarity PairwiseDistance",
    "torch.nn.modules.dropout": "AlphaDropout Dropout Dropout1d Dropout2d Dropout3d "
    "FeatureAlphaDropout",
    "torch.nn.modules.flatten": "Flatten Unflatten",
    "torch.nn.modules.instancenorm": "InstanceNorm1d InstanceNorm2d InstanceNorm3d",
    "torch.nn.modules.linear": "Bilinear Identity Linear",
    "torch.nn.modules.normalization": "CrossMapLRN2d GroupNorm LayerNorm LocalResponseNorm RMSNorm",
    "torch.nn.modules.padding": "CircularPad1d CircularPad2d ConstantPad1d ConstantPad2d "
    "ReflectionPad1d ReflectionPad2d ReplicationPad1d ReplicationPad2d ZeroPad1d ZeroPad2d",
    "torch.nn.modules.pixelshuffle": "PixelShuffle PixelUnshuffle",
    "torch.nn.modules.pooling": "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveMaxPool1d "
    "AdaptiveMaxPool2d AvgPool1d AvgPool2d LPPool1d LPPool2d MaxPool1d MaxPool2d",
    "torch.nn.modules.rnn": "GRU GRUCell LSTM LSTMCell RNN RNNCell",
    "torch.nn.modules.sparse": "Embedding",
    "torch.nn.modules.transformer": "Transformer TransformerDecoder TransformerDecoderLayer "
    "TransformerEncoder TransformerEncoderLayer",
    "sbkit.audio.augment": "Compose SpecAugment",
    "sbkit.audio.fbank": "Fbank",
    "sbkit.models.dropout": "Dropout",
    "sbkit.models.frame_conv": "FrameConv",
    "sbkit.models.frontend": "ConvFrontEnd",
    "sbkit.models.normalize": "GlobalNorm",
    "sbkit.models.pooling": "AttentiveStatisticsPooling",
    "sbkit.models.transformer": "ConformerBlock Convolution CrossAttention DecoderBlock "
    "FeedForward SelfAttention Transformer TransformerBlock",
    "speechbrain.augment.freq_domain": "RandomShift SpectrogramDrop Warping",
    "speechbrain.lobes.features": "Fbank MFCC",
    "speechbrain.lobes.models.CRDNN": "CNN_Block CRDNN DNN_Block",
    "speechbrain.lobes.models.ContextNet": "ContextNet ContextNetBlock SEmodule",
    "speechbrain.lobes.models.ECAPA_TDNN": "AttentiveStatisticsPooling BatchNorm1d Classifier "
    "Conv1d ECAPA_TDNN Res2NetBlock SEBlock SERes2NetBlock TDNNBlock",
    "speechbrain.lobes.models.RNNLM": "RNNLM",
    "speechbrain.lobes.models.ResNet": "BasicBlock Classifier ResNet SEBasicBlock SEBlock",
    "speechbrain.lobes.models.VanillaNN": "VanillaNN",
    "speechbrain.lobes.models.Xvector": "Classifier Discriminator Xvector",
    "speechbrain.lobes.models.convolution": "ConvBlock ConvolutionFrontEnd "
    "ConvolutionalSpatialGatingUnit",
    "speechbrain.lobes.models.transformer.Branchformer": "BranchformerEncoder "
    "BranchformerEncoderLayer ConvolutionBranch",
    "speechbrain.lobes.models.transformer.Conformer": "ConformerDecoder ConformerDecoderLayer "
    "ConformerEncoder ConformerEncoderLayer ConvolutionModule",
    "speechbrain.lobes.models.transformer.Transformer": "NormalizedEmbedding PositionalEncoding "
    "TransformerDecoder TransformerDecoderLayer TransformerEncoder TransformerEncoderLayer",
    "speechbrain.lobes.models.transformer.TransformerASR": "EncoderWrapper TransformerASR",
    "speechbrain.lobes.models.transformer.TransformerLM": "TransformerLM",
    "speechbrain.lobes.models.transformer.TransformerST": "TransformerST",
    "speechbrain.nnet.CNN": "Conv1d Conv2d ConvTranspose1d DepthwiseSeparableConv1d "
    "DepthwiseSeparableConv2d GaborConv1d SincConv",
    "speechbrain.nnet.RNN": "AttentionalRNNDecoder GRU GRUCell LSTM LSTMCell LiGRU QuasiRNN RNN "
    "RNNCell SLiGRU",
    "speechbrain.nnet.activations": "GumbelSoftmax Softmax Swish",
    "speechbrain.nnet.attention": "ContentBasedAttention KeyValueAttention LocationAwareAttention "
    "MultiheadAttention PositionalwiseFeedForward RelPosEncXL RelPosMHAXL RoPEMHA",
    "speechbrain.nnet.containers": "ConnectBlocks LengthsCapableSequential ModuleList Sequential",
    "speechbrain.nnet.dropout": "Dropout2d",
    "speechbrain.nnet.embedding": "Embedding",
    "speechbrain.nnet.hypermixing": "HyperMixing HyperNetwork ParallelMLPs",
    "speechbrain.nnet.linear": "Linear",
    "speechbrain.nnet.normalization": "BatchNorm1d BatchNorm2d ExponentialMovingAverage GroupNorm "
    "InstanceNorm1d InstanceNorm2d LayerNorm PCEN",
    "speechbrain.nnet.pooling": "AdaptivePool AttentionPooling GaussianLowpassPooling Pooling1d "
    "Pooling2d StatisticsPooling",
    "speechbrain.nnet.transducer.transducer_joint": "Transducer_joint",
    "speechbrain.processing.features": "ContextWindow DCT Deltas DynamicRangeCompression "
    "Filterbank GlobalNorm ISTFT InputNormalization MinLevelNorm STFT",
}
ACTIVATIONS = {  # functions that a part may take as arguments, by `!name:`
    "torch._C._nn": "gelu log_sigmoid softplus",
    "torch.nn.functional": "celu elu glu hardsigmoid hardswish hardtanh leaky_relu log_softmax "
    "mish relu relu6 selu sigmoid silu softmax softsign tanh tanhshrink",
}

ALLOWED = {  # the tags that may name each
    f"{module}.{name}": kinds
    for table, kinds in ((MODULES, ("!new", "!name")), (ACTIVATIONS, ("!name",)))
    for module, names in table.items()
    for name in names.split()
}
HOMES = {name.rpartition(".")[0] for name in ALLOWED}
IMPORTED = {".".join(home.split(".")[:end]) for home in HOMES for end in range(1, 9)}


def refusal(kind: str, name: str, *, own: frozenset[str] = frozenset()) -> str | None:
    """Return why a bundle may not name something by `!new` or `!name`; None when it may.

    ``own`` names modules that the user imported by `--import`, whose torch.nn.Module classes are
    allowed.
    """
    found = find(name)
    if found is None:
        return "names nothing on the list"
    home = home_of(found)
    if home is None:
        return "is no class or function, which is not on the list"
    is_made = kind != "!new" or isinstance(found, type)
    if not (kind in ALLOWED.get(home, ()) and is_made) and not _is_own(kind, found, own):
        return f"is {home}, which is not on the list"
    return None


def find(name: str) -> object | None:
    """Resolve a dotted name as HyperPyYAML does, but import only modules of the list."""
    first, *rest = name.split(".")
    found: object | None = _module(first)
    for end, part in enumerate(rest, start=2):
        prefix = ".".join(name.split(".")[:end])
        inside = _module(prefix) if isinstance(found, ModuleType) else None
        found = inside or _held(found, part)
        if found is None:
            return None
    return found


def home_of(found: object) -> str | None:
    """Return the full name of a class or function; None for anything else, or a false name."""
    if isinstance(found, ModuleType) or not callable(found):
        return None
    module, name = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(name, str)):
        return None
    there: object | None = sys.modules.get(module)
    for part in name.split("."):
        there = _held(there, part)
    return f"{module}.{name}" if there is found else None


def _is_own(kind: str, found: object, own: frozenset[str]) -> bool:
    is_module = isinstance(found, type) and issubclass(found, nn.Module)
    return is_module and kind in ("!new", "!name") and found.__module__ in own


def _module(name: str) -> ModuleType | None:
    """Return a module that is imported already, or that the list lets one import."""
    if name not in sys.modules and name in IMPORTED:
        try:
            return import_module(name)
        except ImportError:
            return None
    return sys.modules.get(name)


def _held(holder: object, name: str) -> object | None:
    """Look an attribute up without running a `__getattr__` or a property."""
    found: object | None = inspect.getattr_static(holder, name, None)
    return found.__func__ if isinstance(found, staticmethod | classmethod) else found
