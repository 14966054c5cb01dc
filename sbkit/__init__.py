"""Training recipes for speech that do what their YAML declares.

The public names are imported when they are first asked for, so that the command line stays quick,
and a server that only runs bundles needs no torch. Other names have the file that defines them.
"""

import ast
import warnings
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from sbkit.base.user_folders import prepare_user
from sbkit.base.versions import __version__ as __version__

if TYPE_CHECKING:
    from sbkit.base.errors import BundleError as BundleError
    from sbkit.base.errors import ConfigError as ConfigError
    from sbkit.base.errors import DataError as DataError
    from sbkit.base.errors import DeviceError as DeviceError
    from sbkit.base.errors import SbkitError as SbkitError
    from sbkit.bundle.task import Task as Task
    from sbkit.config.document import Only as Only
    from sbkit.config.hparams import load_hparams as load_hparams
    from sbkit.data.batch import Batch as Batch
    from sbkit.data.corpus import Corpus as Corpus
    from sbkit.data.manifest import Clip as Clip
    from sbkit.data.manifest import Manifest as Manifest
    from sbkit.logs.metric import Metric as Metric
    from sbkit.models.loss import Loss as Loss
    from sbkit.run.run import Run as Run
    from sbkit.runtime.runtimes import load_bundle as load_bundle
    from sbkit.tasks.asr.model import AsrModel as AsrModel
    from sbkit.tasks.asr.predict import Transcriber as Transcriber
    from sbkit.tasks.asr.session import Session as Session
    from sbkit.tasks.asr.session import StreamingRecognizer as StreamingRecognizer
    from sbkit.tasks.asr.session import advance_batch as advance_batch
    from sbkit.tasks.codec.predict import Codec as Codec
    from sbkit.tasks.tts.predict import Synthesizer as Synthesizer
    from sbkit.tasks.vad.predict import SpeechRules as SpeechRules
    from sbkit.tasks.vad.predict import VoiceDetector as VoiceDetector
    from sbkit.train.brain import Brain as Brain
    from sbkit.train.recipe import Recipe as Recipe

PUBLIC = {  # the file that defines each name, by the imports above, which only type checkers do
    alias.name: str(node.module)
    for node in ast.walk(ast.parse(Path(__file__).read_text("utf-8")))
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
    if alias.asname and not alias.name.startswith("_")
}


def __getattr__(name: str) -> object:
    if name not in PUBLIC:
        raise AttributeError(f"module 'sbkit' has no attribute {name!r}")
    prepare_user()  # before libraries look for the folders of their caches
    with warnings.catch_warnings(), suppress(ImportError):
        warnings.filterwarnings("ignore", "IProgress not found")  # sbkit does not need it
        import_module("tqdm.auto")
    return getattr(import_module(PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*PUBLIC, *globals()})
