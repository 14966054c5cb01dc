"""Version numbers of code whose results are kept between two starts.

Whoever changes such code decides: if its results may change, its number goes up. A test compares
the digests with the files (tests/base/test_code_versions.py), and prints the new ones.
"""

import platform
from collections.abc import Mapping
from typing import Any, NamedTuple

from sbkit.base.versions import AUDIO_PACKAGES, TEXT_PACKAGES, package_versions


class CodeVersion(NamedTuple):
    """The number of some code, and the digest of its files when that was decided."""

    number: int
    digest: str


# By the module whose results are kept; "corpus" is all that writes a corpus.
CODE_VERSIONS: Mapping[str, CodeVersion] = {
    "corpus": CodeVersion(1, ""),
    **dict.fromkeys(
        (
            "releases",
            "texts",
            "token_counts",
            "symbols",
            "pitch",
            "speech",
            "statistics",
            "data_report",
        ),
        CodeVersion(1, ""),
    ),
}


def audio_state() -> dict[str, Any]:
    """Return what changes when the code that decodes and stores audio, or its packages, do."""
    return {"code": CODE_VERSIONS["corpus"].number, "packages": package_versions(AUDIO_PACKAGES)}


def code_state(name: str = "corpus") -> dict[str, Any]:
    """Return what changes when code, Python, or a package that reads rows or texts does."""
    packages = package_versions((*AUDIO_PACKAGES, *TEXT_PACKAGES))
    python = ".".join(platform.python_version_tuple()[:2])
    number = CODE_VERSIONS[name].number if name in CODE_VERSIONS else 0  # of a recipe's own fact
    return {"code": number, "python": python, "packages": packages}
