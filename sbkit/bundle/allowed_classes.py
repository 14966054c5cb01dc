"""The classes and activations that a bundle may name, by exact name.

A name may mislead: `speechbrain.core.os.system` is `posix.system`. So a bundle names everything by
the module that defines it, and a name is looked up on this list before anything is imported.

The list has no prefixes. The code of each entry was read: building and calling it only computes
on tensors. No entry opens a file, a connection or a pickle. An entry that takes names looks them up
in a fixed table only: `PretrainedEncoder` looks up its `model_type`, which may name an encoder of
transformers, in `sbkit/models/pretrained/transformers_encoder.py`.
"""

from importlib import import_module
from itertools import accumulate
from pkgutil import iter_modules
from typing import Any

from torch import nn

from sbkit.base.errors import BundleError
from sbkit.base.libraries import is_library

# Left out on purpose: classes that take any callable (ParameterDict), have no size of their own
# (Lazy*), or communicate with other processes.
ALLOWED_CLASSES = {
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
    "sbkit.models.frontend": "ConvFrontEnd",
    "sbkit.models.layers": "Dropout FrameConv GlobalNorm LinearStack",
    "sbkit.models.pretrained.encoder": "PretrainedEncoder PretrainedFeatures PretrainedFrontEnd "
    "PretrainedTransformer",
    "sbkit.models.speechbrain_parts": "SpeechBrainLayers SpeechBrainTransformer",
    "sbkit.models.transformer": "ConformerBlock Convolution CrossAttention DecoderBlock "
    "DepthwiseConv FeedForward SelfAttention Transformer TransformerBlock",
    "sbkit.models.vocoder": "LogMel VocoderDecoder VocoderEncoder",
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
for folder in iter_modules(import_module("sbkit.tasks").__path__, "sbkit.tasks."):
    ALLOWED_CLASSES[f"{folder.name}.model"] = getattr(import_module(folder.name), "MODEL_PARTS", "")
ALLOWED_FUNCTIONS = {  # functions that `!name:` may pass to a part
    "torch._C._nn": "gelu log_sigmoid softplus",
    "torch.nn.functional": "celu elu glu hardsigmoid hardswish hardtanh leaky_relu log_softmax "
    "mish relu relu6 selu sigmoid silu softmax softsign tanh tanhshrink",
}

ALLOWED_TAGS = {  # the tags that may stand before each name
    f"{module}.{name}": tags
    for table, tags in ((ALLOWED_CLASSES, ("!new", "!name")), (ALLOWED_FUNCTIONS, ("!name",)))
    for module, names in table.items()
    for name in names.split()
}
ALLOWED_MODULES = {  # the modules that define these names, and their packages
    module
    for name in ALLOWED_TAGS
    for module in accumulate(name.split(".")[:-1], lambda package, part: f"{package}.{part}")
}


def canonical(name: str) -> str:
    """Return the name that a class or function has in the module that defines it.

    A name from a module that is not on the list is returned unchanged: that module is not imported.

    >>> canonical("torch.nn.Linear")
    'torch.nn.modules.linear.Linear'
    """
    module, _, attribute = name.rpartition(".")
    target = getattr(import_module(module), attribute, None) if module in ALLOWED_MODULES else None
    home, qualified_name = (getattr(target, key, None) for key in ("__module__", "__qualname__"))
    return f"{home}.{qualified_name}" if home and qualified_name else name


def find_allowed(tag: str, name: str, *, user_modules: frozenset[str] = frozenset()) -> Any:
    """Return the class or activation that a bundle names by the tag `!new` or `!name`.

    Nothing else turns a name in a bundle into an object. ``user_modules`` are the modules that
    `--import` names: the torch.nn.Module classes that they define are allowed, too, unless they
    belong to a library, because their arguments may name files, addresses and code.
    Raises BundleError for any other name, before anything is imported.
    """
    module, _, attribute = name.rpartition(".")
    if tag in ALLOWED_TAGS.get(name, ()):
        return vars(import_module(module))[attribute]
    if module in user_modules:
        variables = vars(import_module(module))
        value = variables.get(attribute)
        if is_library(variables.get("__file__") or ""):
            raise BundleError(
                f"{name} is a class of an installed package, and its arguments could make it run "
                "any code. Derive your own class from it, in a file beside the YAML."
            )
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module:
            return value
    raise BundleError(
        f"{name} is not on sbkit's list of modules that a model may be built from. If you trust "
        f"its author, pass --import {module or 'MODULE'}, or in Python `user_modules`."
    )
