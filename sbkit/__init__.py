"""Training recipes for speech that do what their YAML declares.

``sbkit.Run``, ``sbkit.Brain`` and ``sbkit.Transcriber`` are imported when they are first asked for,
so that the command line stays quick, and a server that only runs bundles needs no torch.
"""

from typing import TYPE_CHECKING

from sbkit.base.imports import lazy_names
from sbkit.base.user import prepare_user
from sbkit.base.versions import __version__ as __version__

if TYPE_CHECKING:
    from sbkit.run.run import Run as Run
    from sbkit.runtime.transcriber import Transcriber as Transcriber
    from sbkit.train.brain import Brain as Brain

prepare_user()

__getattr__, __dir__ = lazy_names(
    "sbkit", Brain="train.brain", Run="run.run", Transcriber="runtime.transcriber"
)
