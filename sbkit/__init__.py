"""Training recipes for speech that do what their YAML declares.

``sbkit.Brain`` and ``sbkit.Transcriber`` are imported when they are first asked for, so that the
command line stays quick, and a server that only runs bundles needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from sbkit.base.text import __version__ as __version__

if TYPE_CHECKING:
    from sbkit.runtime.transcriber import Transcriber as Transcriber
    from sbkit.train.brain import Brain as Brain

HOMES = {"Brain": "sbkit.train.brain", "Transcriber": "sbkit.runtime.transcriber"}


def __getattr__(name: str) -> object:
    if name in HOMES:
        return getattr(import_module(HOMES[name]), name)
    raise AttributeError(f"module 'sbkit' has no attribute {name!r}")
