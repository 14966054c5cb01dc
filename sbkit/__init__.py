"""Train, score, export and serve speech recognizers that do what their YAML declares.

``sbkit.Brain`` is imported when it is first asked for, so that the command line stays quick.
"""

from typing import TYPE_CHECKING

from sbkit.base.text import __version__ as __version__

if TYPE_CHECKING:
    from sbkit.train.brain import Brain as Brain


def __getattr__(name: str) -> object:
    if name == "Brain":
        from sbkit.train.brain import Brain

        return Brain
    raise AttributeError(f"module 'sbkit' has no attribute {name!r}")
