"""Whoever changes code whose results are kept decides whether they are made again."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbkit.base.code_versions import CODE_FILES, CODE_VERSIONS
from tests.test_floors import MODULES, ROOT, imports


def files_of(name: str) -> Iterator[Path]:
    """Yield the files of a name in CODE_FILES."""
    patterns = CODE_FILES[name]
    files = [file for pattern in patterns for file in ROOT.glob(pattern)]
    assert len(files) >= len(patterns), f"{name} names files that are not there"
    yield from files if name != "corpus" else follow_imports(files)


def follow_imports(files: list[Path]) -> Iterator[Path]:
    """Yield files of Python, and those of sbkit and recipes that they import."""
    pending = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    seen = {"sbkit.base.code_versions"}
    while pending:
        name = pending.pop()
        if name in MODULES and name not in seen:
            seen.add(name)
            file = ROOT / name.replace(".", "/")
            yield file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
            pending += imports(name)


def digest_of(name: str) -> str:
    digest = hashlib.sha256()
    for file in sorted(files_of(name)):
        digest.update(f"{file.relative_to(ROOT)} {file.stat().st_size}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def test_changed_code_has_another_version_or_gives_the_same_results() -> None:
    now = {name: digest_of(name) for name in CODE_FILES}
    table = "".join(
        f'    "{name}": CodeVersion({CODE_VERSIONS[name].number}, "{digest}"),\n'
        for name, digest in now.items()
    )
    changed = [name for name in now if CODE_VERSIONS[name].digest != now[name]]
    if changed:
        pytest.fail(
            f"The code of {', '.join(changed)} has changed, and its results are kept. Decide for "
            "each whether its results may be others now. If so, raise its number in "
            f"sbkit/base/code_versions.py; else only paste the digests:\n{table}",
            pytrace=False,
        )
    assert now.keys() == CODE_VERSIONS.keys()


def test_what_writes_a_corpus_imports_no_torch_and_no_server() -> None:
    names = {str(file.relative_to(ROOT)) for file in files_of("corpus")}
    assert {
        "sbkit/data/work_units.py",
        "sbkit/audio/decode.py",
        "recipes/OwnData/corpus.py",
    } <= names
    assert not [name for name in names if name.startswith(("sbkit/serve", "sbkit/train"))]
