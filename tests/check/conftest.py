"""The release of the tests of `sbkit check`."""

from pathlib import Path

import pytest

from tests.check.harness import healthy_workplace
from tests.runs import Workplace


@pytest.fixture(scope="session")
def workplace(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Return a small release in which no check finds anything."""
    return healthy_workplace(asterisk_english, tmp_path_factory.mktemp("workplace"))
