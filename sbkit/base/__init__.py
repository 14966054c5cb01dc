"""The ground floor: errors, files, units, ranges of values, and the machine."""

from typing import TYPE_CHECKING

from sbkit.base.errors import BundleError as BundleError
from sbkit.base.errors import ConfigError as ConfigError
from sbkit.base.errors import DataError as DataError
from sbkit.base.errors import DeviceError as DeviceError
from sbkit.base.errors import SbkitError as SbkitError
from sbkit.base.imports import lazy_names

if TYPE_CHECKING:
    from sbkit.base.ranges import Range as Range
    from sbkit.base.ranges import TextValue as TextValue

__getattr__, __dir__ = lazy_names("sbkit.base", Range="ranges", TextValue="ranges")
