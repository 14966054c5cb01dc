"""Public names of a package that are imported when they are first asked for.

A server without torch imports `sbkit.audio.io`, so `sbkit/audio/__init__.py` must not import torch.
"""

from collections.abc import Callable
from importlib import import_module


def lazy_names(package: str, **homes: str) -> Callable[[str], object]:
    """Return a module's ``__getattr__`` that imports each name from its module in the package.

    >>> __getattr__ = lazy_names("sbkit.base", SbkitError="errors")
    >>> __getattr__("SbkitError").__module__
    'sbkit.base.errors'
    """

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return get
