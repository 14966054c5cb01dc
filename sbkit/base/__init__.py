"""The ground floor: errors, files, units, and the machine."""

from typing import TYPE_CHECKING

from sbkit.base.imports import lazy_names

if TYPE_CHECKING:
    from sbkit.base.errors import BundleError as BundleError
    from sbkit.base.errors import ConfigError as ConfigError
    from sbkit.base.errors import DataError as DataError
    from sbkit.base.errors import DeviceError as DeviceError
    from sbkit.base.errors import SbkitError as SbkitError

__getattr__ = lazy_names(
    "sbkit.base",
    BundleError="errors",
    ConfigError="errors",
    DataError="errors",
    DeviceError="errors",
    SbkitError="errors",
)
