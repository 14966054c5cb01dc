"""What foreign YAML may name: a list of what is found under a name, never of names.

A name may lie: `speechbrain.core.os.system` is `posix.system`. So a name is followed to its object,
and what counts is where that was defined. Following imports nothing but modules of the list, since
an import is code too, and asks no module or class for what it does not hold by itself.
"""

import builtins
import inspect
import sys
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType

from torch import nn

# Modules of these places hold tensors and compute: making one reads and writes nothing.
MODULES = (
    "torch.nn.modules",
    "sbkit.models",
    "sbkit.audio",
    "speechbrain.nnet",
    "speechbrain.lobes.features",
    "speechbrain.lobes.models.convolution",
    "speechbrain.lobes.models.transformer",
    "speechbrain.lobes.models.CRDNN",
    "speechbrain.lobes.models.ECAPA_TDNN",
    "speechbrain.lobes.models.RNNLM",
    "speechbrain.lobes.models.VanillaNN",
    "speechbrain.lobes.models.Xvector",
    "speechbrain.processing.features",
    "speechbrain.augment.freq_domain",
)
# Other classes that do no more than keep their arguments. Checkpointers make their folder, and the
# tokenizer reads its file. SpeechBrain's noises are not here: their CSV may name pickles.
CLASSES = (
    "torch.optim",
    "sbkit.checkpoint.checkpointer.Checkpointer",
    "sbkit.train.schedule",
    "sbkit.text.tokenizer.Tokenizer",
    "speechbrain.augment.augmenter.Augmenter",
    "speechbrain.augment.time_domain.DropChunk",
    "speechbrain.augment.time_domain.DropFreq",
    "speechbrain.augment.time_domain.SpeedPerturb",
    "speechbrain.decoders.seq2seq",
    "speechbrain.nnet.schedulers",
    "speechbrain.utils.checkpoints.Checkpointer",
    "speechbrain.utils.epoch_loop.EpochCounter",
    "speechbrain.utils.metric_stats.ErrorRateStats",
    "speechbrain.utils.train_logger.FileTrainLogger",
)
FUNCTIONS = (
    "torch._C._nn",
    "torch.nn.functional",
    "torch.nn.init",
    "sbkit.models",
    "sbkit.audio",
    "speechbrain.decoders.ctc.ctc_greedy_decode",
    "speechbrain.nnet.losses",
)
APPLIED = ("torch.random.manual_seed", "speechbrain.utils.seed.seed_everything")


def refusal(kind: str, name: str) -> str | None:
    """Say why a name may not be used by `!new`, `!name` or `!apply`; None when it may."""
    found = find(name)
    if found is None:
        return "names nothing on the list"
    home = home_of(found)
    if home is None or not _fits(kind, found, home):
        return f"is {home or 'no class or function'}, which is not on the list"
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
    """Tell whether an attribute of an object that `!new:` makes is no method and not private."""
    if not attribute.isidentifier() or attribute.startswith("_"):
        return False
    return not callable(_held(find(class_name), attribute))


def _fits(kind: str, found: object, home: str) -> bool:
    if kind == "!apply":
        return home in APPLIED
    if isinstance(found, type):
        return _within(home, CLASSES) or (_within(home, MODULES) and issubclass(found, nn.Module))
    return kind == "!name" and _within(home, FUNCTIONS)


def _unwrapped_by_torch(found: object) -> object:
    """See through torch's own wrappers: dynamo puts one around `torch.manual_seed`."""
    wrapper = str(getattr(found, "__globals__", {}).get("__name__"))
    return inspect.unwrap(found) if wrapper.startswith("torch.") and callable(found) else found


def _within(home: str, places: Iterable[str]) -> bool:
    return any(f"{home}.".startswith(f"{place}.") for place in places)


def _module(name: str) -> ModuleType | None:
    """Give a module that is imported already, or that the list lets one import."""
    if name not in sys.modules and _may_import(name):
        try:
            return import_module(name)
        except ImportError:
            return None
    return sys.modules.get(name)


def _may_import(name: str) -> bool:
    places = (*MODULES, *CLASSES, *FUNCTIONS, *APPLIED)
    return _within(name, places) or any(place.startswith(f"{name}.") for place in places)


def _held(holder: object, name: str) -> object | None:
    """Look an attribute up without running a `__getattr__` or a property."""
    found: object | None = inspect.getattr_static(holder, name, None)
    return found.__func__ if isinstance(found, staticmethod | classmethod) else found
