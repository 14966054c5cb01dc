"""Training recipes for speech that do what their YAML declares.

The public names are imported when they are first asked for, so that the command line stays quick,
and a server that only runs bundles needs no torch. Other names have the file that defines them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from sbkit.base.user import prepare_user
from sbkit.base.versions import __version__ as __version__

if TYPE_CHECKING:
    from sbkit.base.errors import BundleError as BundleError
    from sbkit.base.errors import ConfigError as ConfigError
    from sbkit.base.errors import DataError as DataError
    from sbkit.base.errors import DeviceError as DeviceError
    from sbkit.base.errors import SbkitError as SbkitError
    from sbkit.config.hparams import load_hparams as load_hparams
    from sbkit.data.batch import Batch as Batch
    from sbkit.data.manifest import Clip as Clip
    from sbkit.data.manifest import Manifest as Manifest
    from sbkit.logs.metric import Metric as Metric
    from sbkit.models.asr import AsrModel as AsrModel
    from sbkit.models.loss import Loss as Loss
    from sbkit.run.run import Run as Run
    from sbkit.runtime.codec import Codec as Codec
    from sbkit.runtime.session import Session as Session
    from sbkit.runtime.session import StreamingRecognizer as StreamingRecognizer
    from sbkit.runtime.session import advance_batch as advance_batch
    from sbkit.runtime.synthesizer import Synthesizer as Synthesizer
    from sbkit.runtime.torch_model import load_bundle as load_bundle
    from sbkit.runtime.transcriber import Transcriber as Transcriber
    from sbkit.runtime.voice_detector import SpeechRules as SpeechRules
    from sbkit.runtime.voice_detector import VoiceDetector as VoiceDetector
    from sbkit.tasks.task import Task as Task
    from sbkit.train.brain import Brain as Brain
    from sbkit.train.recipe import Recipe as Recipe

prepare_user()

HOMES = {
    "AsrModel": "sbkit.models.asr",
    "Batch": "sbkit.data.batch",
    "Brain": "sbkit.train.brain",
    "BundleError": "sbkit.base.errors",
    "Clip": "sbkit.data.manifest",
    "Codec": "sbkit.runtime.codec",
    "ConfigError": "sbkit.base.errors",
    "DataError": "sbkit.base.errors",
    "DeviceError": "sbkit.base.errors",
    "Loss": "sbkit.models.loss",
    "Manifest": "sbkit.data.manifest",
    "Metric": "sbkit.logs.metric",
    "Recipe": "sbkit.train.recipe",
    "Run": "sbkit.run.run",
    "SbkitError": "sbkit.base.errors",
    "Session": "sbkit.runtime.session",
    "SpeechRules": "sbkit.runtime.voice_detector",
    "StreamingRecognizer": "sbkit.runtime.session",
    "Synthesizer": "sbkit.runtime.synthesizer",
    "Task": "sbkit.tasks.task",
    "Transcriber": "sbkit.runtime.transcriber",
    "VoiceDetector": "sbkit.runtime.voice_detector",
    "advance_batch": "sbkit.runtime.session",
    "load_bundle": "sbkit.runtime.torch_model",
    "load_hparams": "sbkit.config.hparams",
}


def __getattr__(name: str) -> object:
    if name not in HOMES:
        raise AttributeError(f"module 'sbkit' has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*HOMES, *globals()})
