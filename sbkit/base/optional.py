"""Packages that only an extra of setup.cfg installs."""

from importlib import import_module
from typing import Any

from sbkit.base.errors import SbkitError


def require_package(name: str, *, extra: str) -> Any:
    """Import a package of an extra; raises SbkitError where it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise SbkitError(
            f"The package {name.partition('.')[0].replace('_', '-')} must be installed for this, "
            f"but cannot be imported ({error}). Install it: pip install 'sbkit[{extra}]'"
        ) from error
