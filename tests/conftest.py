"""What several tests share: the default corpus, fetched once and kept in the cache."""

from pathlib import Path

import pytest

from recipes.AsteriskPrompts.prepare import prepare_prompts
from sbkit.data.store import default_cache


@pytest.fixture(scope="session")
def asterisk_english() -> Path:
    """The release folder of the English prompts."""
    return prepare_prompts(language="en", cache_folder=default_cache())
