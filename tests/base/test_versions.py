"""A result names the versions, the code and the commit that it was made with."""

import subprocess
from pathlib import Path

import pytest

from sbkit.base.versions import git_commit


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # set while a hook runs the tests
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "model.py").write_text("width = 144\n")
    return tmp_path


def test_git_commit_of_clean_and_changed_checkout(checkout: Path) -> None:
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
    assert git_commit(installed) is None  # inside the checkout, but not tracked


def test_git_commit_is_none_without_git(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(checkout))
    assert git_commit(checkout / "code") is None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "core.hooksPath=/dev/null", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
