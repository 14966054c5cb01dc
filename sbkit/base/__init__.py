"""The ground floor: errors, files, units, and the machine."""

from sbkit.base.errors import BundleError as BundleError
from sbkit.base.errors import ConfigError as ConfigError
from sbkit.base.errors import DataError as DataError
from sbkit.base.errors import DeviceError as DeviceError
from sbkit.base.errors import SbkitError as SbkitError
