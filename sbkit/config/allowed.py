"""The one list of what a bundle, a foreign YAML, an export and a replay may name, by exact name.

A name may lie: `speechbrain.core.os.system` is `posix.system`. So a name is followed to its object,
and the object has to be the one that stands here, under the name of the file that defines it.
Following imports nothing but modules of the list, since an import is code too, and asks no module
or class for what it does not hold by itself.

Nothing is here by prefix. What stands here was read: building it and calling it computes on
tensors; none of it opens a file, a connection or a pickle, but for the few that say so.
"""

import builtins
import inspect
import sys
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Literal

from torch import nn

Consumer = Literal["bundle", "yaml"]  # what a bundle may name, a whole YAML may name too

# Modules that a bundle is made of. Left out on purpose: what takes any callable (losses with a
# distance, ParameterDict), what has no size of its own (Lazy*), and what talks to other processes.
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
# Other classes that a whole YAML may name. They keep their arguments; the checkpointers make their
# folder, tokenizers and labels read the one file that they are given, the noises audio of a folder,
# and FileTrainLogger appends to its file. SpeechBrain's noises are not here: their CSV may name
# pickles.
CLASSES = {
    "torch.nn.modules.loss": "BCELoss BCEWithLogitsLoss CTCLoss CrossEntropyLoss HuberLoss "
    "KLDivLoss L1Loss MSELoss NLLLoss SmoothL1Loss",
    "torch.optim": "Adafactor Muon",
    "torch.optim.adadelta": "Adadelta",
    "torch.optim.adagrad": "Adagrad",
    "torch.optim.adam": "Adam",
    "torch.optim.adamax": "Adamax",
    "torch.optim.adamw": "AdamW",
    "torch.optim.asgd": "ASGD",
    "torch.optim.lbfgs": "LBFGS",
    "torch.optim.lr_scheduler": "ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR "
    "ExponentialLR LinearLR MultiStepLR OneCycleLR PolynomialLR ReduceLROnPlateau StepLR",
    "torch.optim.nadam": "NAdam",
    "torch.optim.radam": "RAdam",
    "torch.optim.rmsprop": "RMSprop",
    "torch.optim.rprop": "Rprop",
    "torch.optim.sgd": "SGD",
    "torch.optim.sparse_adam": "SparseAdam",
    "sbkit.audio.noise": "AddNoise AddReverb",
    "sbkit.checkpoint.checkpointer": "Checkpointer",
    "sbkit.decoding.decoder": "BeamDecoder",
    "sbkit.text.labels": "ClassLabels",
    "sbkit.text.tokenizer": "Tokenizer",
    "sbkit.train.schedule": "WarmupCosine",
    "sentencepiece": "SentencePieceProcessor",
    "speechbrain.augment.augmenter": "Augmenter",
    "speechbrain.augment.time_domain": "ChannelDrop ChannelSwap CutCat DoClip DropBitResolution "
    "DropChunk DropFreq FastDropChunk RandAmp Resample SignFlip SpeedPerturb",
    "speechbrain.decoders.ctc": "CTCBeamSearcher CTCPrefixBeamSearcher",
    "speechbrain.decoders.scorer": "CTCScorer CoverageScorer LengthScorer RNNLMRescorer "
    "RNNLMScorer RescorerBuilder ScorerBuilder TransformerLMRescorer TransformerLMScorer",
    "speechbrain.decoders.seq2seq": "S2SRNNBeamSearcher S2SRNNGreedySearcher "
    "S2STransformerBeamSearcher S2STransformerGreedySearcher",
    "speechbrain.decoders.transducer": "TransducerBeamSearcher",
    "speechbrain.nnet.losses": "AdditiveAngularMargin AngularMargin LogSoftmaxWrapper PitWrapper",
    "speechbrain.nnet.schedulers": "CyclicCosineScheduler CyclicLRScheduler IntervalScheduler "
    "InverseSquareRootScheduler LinearNoamScheduler LinearScheduler LinearWarmupScheduler "
    "NewBobScheduler NoamIntervalScheduler NoamScheduler ReduceLROnPlateau StepScheduler "
    "TriStageLRSchedule WarmAndExpDecayLRSchedule WarmCoolDecayLRSchedule",
    "speechbrain.utils.Accuracy": "AccuracyStats",
    "speechbrain.utils.checkpoints": "Checkpointer",
    "speechbrain.utils.epoch_loop": "EpochCounter EpochCounterWithStopper",
    "speechbrain.utils.metric_stats": "BinaryMetricStats ClassificationStats ErrorRateStats "
    "MetricStats",
    "speechbrain.utils.train_logger": "FileTrainLogger",
}
ACTIVATIONS = {  # functions that a part may be given by `!name:`
    "torch._C._nn": "gelu log_sigmoid softplus",
    "torch.nn.functional": "celu elu glu hardsigmoid hardswish hardtanh leaky_relu log_softmax "
    "mish relu relu6 selu sigmoid silu softmax softsign tanh tanhshrink",
}
FUNCTIONS = {  # those that a whole YAML may hold besides; naming them calls nothing
    "torch.nn.functional": "binary_cross_entropy binary_cross_entropy_with_logits cross_entropy "
    "ctc_loss kl_div l1_loss mse_loss nll_loss",
    "torch.nn.init": "constant_ kaiming_normal_ kaiming_uniform_ normal_ ones_ orthogonal_ "
    "uniform_ xavier_normal_ xavier_uniform_ zeros_",
    "speechbrain.decoders.ctc": "ctc_greedy_decode",
    "speechbrain.nnet.losses": "bce_loss classification_error ctc_loss kldiv_loss l1_loss mse_loss "
    "nll_loss transducer_loss",
}
APPLIED = {"torch.random": "manual_seed", "speechbrain.utils.seed": "seed_everything"}

ALLOWED = {  # what each name is called by, and who may use it at least
    f"{module}.{name}": (kinds, consumer)
    for table, kinds, consumer in (
        (MODULES, ("!new", "!name"), "bundle"),
        (ACTIVATIONS, ("!name",), "bundle"),
        (CLASSES, ("!new", "!name"), "yaml"),
        (FUNCTIONS, ("!name",), "yaml"),
        (APPLIED, ("!apply",), "yaml"),
    )
    for module, names in table.items()
    for name in names.split()
}
HOMES = {name.rpartition(".")[0] for name in ALLOWED}
IMPORTED = {".".join(home.split(".")[:end]) for home in HOMES for end in range(1, 9)}


def refusal(
    kind: str, name: str, *, consumer: Consumer = "yaml", own: frozenset[str] = frozenset()
) -> str | None:
    """Return why a name may not be used by `!new`, `!name` or `!apply`; None when it may.

    ``own`` names modules that the user imported by `--import`: what is defined there is allowed,
    in a bundle only its torch.nn.Module classes.
    """
    found = find(name)
    if found is None:
        return "names nothing on the list"
    home = home_of(found)
    if home is None:
        return "is no class or function, which is not on the list"
    if not (_fits(kind, found, home, consumer) or _is_own(kind, found, consumer, own)):
        return f"is {home}, which is not on the list"
    return None


def find(name: str) -> object | None:
    """Follow a dotted name as HyperPyYAML would, but import only modules of the list."""
    first, *rest = name.split(".")
    found = _module(first) or vars(builtins).get(first)
    for end, part in enumerate(rest, start=2):
        prefix = ".".join(name.split(".")[:end])
        inside = _module(prefix) if isinstance(found, ModuleType) else None
        found = inside or _held(found, part)
        if found is None:
            return None
    return found


def home_of(found: object) -> str | None:
    """Name where a class or function is defined; None for what is neither, or lies about it."""
    if isinstance(found, ModuleType) or not callable(found):
        return None
    module, name = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(name, str)):
        return None
    there: object | None = sys.modules.get(module)
    for part in name.split("."):
        there = _held(there, part)
    return f"{module}.{name}" if there is _unwrapped_by_torch(found) else None


def is_data(class_name: str, attribute: str) -> bool:
    """Check that an attribute of an object that `!new:` makes is no method and not private."""
    if not attribute.isidentifier() or attribute.startswith("_"):
        return False
    return not callable(_held(find(class_name), attribute))


def _fits(kind: str, found: object, home: str, consumer: Consumer) -> bool:
    kinds, least = ALLOWED.get(home, ((), "yaml"))
    is_made = "!new" not in kinds or isinstance(found, type)
    return kind in kinds and is_made and (consumer == "yaml" or least == "bundle")


def _is_own(kind: str, found: object, consumer: Consumer, own: frozenset[str]) -> bool:
    if getattr(found, "__module__", None) not in own or kind not in ("!new", "!name"):
        return False
    return consumer == "yaml" or (isinstance(found, type) and issubclass(found, nn.Module))


def _unwrapped_by_torch(found: object) -> object:
    """See through torch's own wrappers: dynamo puts one around `torch.manual_seed`."""
    if not isinstance(found, FunctionType):
        return found
    wrapper = str(found.__globals__.get("__name__"))
    return inspect.unwrap(found) if wrapper.startswith("torch.") else found


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
