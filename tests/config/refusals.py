"""Read a YAML that must be refused."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from sbkit.base.errors import ConfigError
from sbkit.config.hparams import load_hparams


def refusal(path: Path, overrides: Mapping[str, object]) -> str:
    """Return the error of a YAML that must not be built."""
    with pytest.raises(ConfigError) as caught:
        load_hparams(path, overrides)
    return str(caught.value)
