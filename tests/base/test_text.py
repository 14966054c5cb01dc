"""Names, numbers, and where figures come from: a summary names the commit that made it."""

import platform
import subprocess
from pathlib import Path

import pytest

from sbkit.base.errors import SbkitError
from sbkit.base.text import cpu_name, git_commit, listed, plural, versions


def test_numbers_of_things_and_the_first_of_their_names() -> None:
    assert [plural(count, "row") for count in (0, 1, 2000)] == ["0 rows", "1 row", "2,000 rows"]
    assert listed("abc") == "a, b, c"
    assert listed(range(5)) == "0, 1, 2 and 2 more"


def test_no_name_in_an_error_moves_the_cursor() -> None:
    error = SbkitError("It must be one, but \x1b[2J\x9b2J\u202eno \udcff is two.\nTake one.")
    assert str(error) == "It must be one, but \\x1b[2J\\x9b2J\\u202eno \\udcff is two.\\nTake one."


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # set while a hook runs the tests
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "model.py").write_text("width = 144\n")
    return tmp_path


def test_commit_of_a_clean_then_a_changed_checkout(checkout: Path) -> None:
    assert git_commit(checkout / "code") is None
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    _git(checkout, "init", "--quiet")
    _git(checkout, "add", ".")
    _git(checkout, *identity, "commit", "--quiet", "--no-verify", "--message", "first")
    commit = _git(checkout, "rev-parse", "HEAD")
    assert git_commit(checkout / "code") == commit
    (checkout / "code" / "model.py").write_text("width = 512\n")
    assert git_commit(checkout / "code") == f"{commit}-dirty"
    installed = checkout / "environment" / "sbkit"
    installed.mkdir(parents=True)
    assert git_commit(installed) is None  # the checkout contains it, and does not track it


def test_no_commit_without_git(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(checkout))
    assert git_commit(checkout / "code") is None


def test_versions_and_processor() -> None:
    assert versions()["python"] == platform.python_version()
    assert str(versions()["torch"]).startswith("2.")
    assert cpu_name()


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "core.hooksPath=/dev/null", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
