"""Version numbers of code whose results are cached between two starts.

Whoever changes such code decides: if its results may change, its number goes up. A test compares
the digests with the files (tests/base/test_code_versions.py), and prints the new ones.
"""

import platform
from collections.abc import Mapping
from typing import Any, NamedTuple

from sbkit.base.versions import AUDIO_PACKAGES, TEXT_PACKAGES, package_versions


class CodeVersion(NamedTuple):
    """The version number of some code, and the digest of its files at that version."""

    number: int
    digest: str


# By the name of the cached result.
CODE_VERSIONS: Mapping[str, CodeVersion] = {
    "corpus": CodeVersion(6, "d7cda78a3c6972b8"),
    "releases": CodeVersion(1, "8321af0cf2d48046"),
    "text": CodeVersion(10, "507ac90e6d35f30f"),
    "token_counts": CodeVersion(1, "8e681fb5a62e1a0d"),
    "labels": CodeVersion(1, "707d0770a1e74ba2"),
    "language_models": CodeVersion(1, "fd2ebab8e77b0055"),
    "symbols": CodeVersion(3, "bb04fbaefff82960"),
    "pitch": CodeVersion(1, "7f3da11fe1bf11e6"),
    "speech": CodeVersion(2, "f6054583c06e69db"),
    "data_report": CodeVersion(4, "dea5ed27142df803"),
}
# Patterns, relative to the folder that contains sbkit and recipes. "corpus" covers everything that
# writes a corpus: these files and the files that they import.
CODE_FILES: Mapping[str, tuple[str, ...]] = {
    "corpus": ("sbkit/data/prepared.py", "recipes/*/corpus.py"),
    "releases": ("recipes/debian/*.py", "recipes/AsteriskPrompts/*.py", "recipes/FestvoxRu/*.py"),
    "text": (
        *("sbkit/text/languages.py", "sbkit/text/normalization.py", "sbkit/text/normalizers.py"),
        *("sbkit/text/transcripts.py", "sbkit/text/verbalize.py", "sbkit/text/verbalize.toml"),
    ),
    "token_counts": ("sbkit/data/splits.py", "sbkit/text/tokenizer.py"),
    "labels": ("sbkit/text/*okenizer.py", "sbkit/text/vocabulary.py"),
    "language_models": ("sbkit/lm/*.py",),
    "symbols": (
        *("sbkit/tasks/tts/symbols.py", "sbkit/text/verbalize.py"),
        "sbkit/text/verbalize.toml",
    ),
    "pitch": ("recipes/tts/data.py", "sbkit/tasks/tts/recordings.py"),
    "speech": (*("recipes/vad/data.py", "sbkit/audio/segments.py", "sbkit/tasks/vad/task.py"),),
    "data_report": (
        *("sbkit/data/data_report.py", "sbkit/data/normalization_report.py"),
        "sbkit/data/damaged_text.py",
    ),
}


def versions_of_audio() -> dict[str, Any]:
    """Return the versions of the code that decodes and stores audio, and of its packages."""
    return {"code": CODE_VERSIONS["corpus"].number, "packages": package_versions(AUDIO_PACKAGES)}


def versions_of_code(name: str = "corpus") -> dict[str, Any]:
    """Return the versions of code, of Python, and of the packages that read rows or texts."""
    packages = package_versions((*AUDIO_PACKAGES, *TEXT_PACKAGES))
    python = ".".join(platform.python_version_tuple()[:2])
    number = CODE_VERSIONS[name].number if name in CODE_VERSIONS else 0  # 0: named by a recipe
    return {"code": number, "python": python, "packages": packages}
