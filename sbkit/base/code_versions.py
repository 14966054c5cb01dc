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
    "corpus": CodeVersion(6, "9e13be49ce3538cf"),
    "releases": CodeVersion(1, "8321af0cf2d48046"),
    "text": CodeVersion(10, "98a7d864a099bc64"),
    "token_counts": CodeVersion(1, "960bc208151bb216"),
    "labels": CodeVersion(1, "707d0770a1e74ba2"),
    "language_models": CodeVersion(1, "fd2ebab8e77b0055"),
    "symbols": CodeVersion(3, "d473a0712826a1d4"),
    "pitch": CodeVersion(1, "7f3da11fe1bf11e6"),
    "speech": CodeVersion(2, "d25dc7e1c7f03836"),
    "data_report": CodeVersion(4, "a8b3e640a23d25db"),
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
