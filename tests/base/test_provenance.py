"""A summary names the commit that made it, and does not name one that did not."""

import platform
import subprocess
from pathlib import Path

import pytest

from sbkit.base.provenance import cpu_name, git_commit, versions


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # set while a hook runs the tests
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "model.py").write_text("width = 144\n")
    return tmp_path


def test_commit_of_a_clean_then_a_changed_checkout(checkout: Path) -> None:
    commit = _commit_all(checkout)
    assert git_commit(checkout / "code") == commit
    (checkout / "code" / "model.py").write_text("width = 512\n")
    assert git_commit(checkout / "code") == f"{commit}-dirty"


def test_the_variables_of_a_hook_name_no_other_commit(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = _commit_all(checkout)
    (checkout / "other").mkdir()
    (checkout / "other" / "file").touch()
    _commit_all(checkout / "other")
    monkeypatch.setenv("GIT_DIR", str(checkout / "other" / ".git"))
    assert git_commit(checkout / "code") == commit


def test_no_commit_outside_a_checkout(checkout: Path) -> None:
    assert git_commit(checkout / "code") is None


def test_no_commit_for_a_package_installed_inside_some_checkout(checkout: Path) -> None:
    _commit_all(checkout)
    installed = checkout / "environment" / "sbkit"
    installed.mkdir(parents=True)
    assert git_commit(installed) is None


def test_no_commit_without_git(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _commit_all(checkout)
    monkeypatch.setenv("PATH", str(checkout))
    assert git_commit(checkout / "code") is None


def test_versions_and_processor() -> None:
    assert versions()["python"] == platform.python_version()
    assert str(versions()["torch"]).startswith("2.")
    assert cpu_name()


def _commit_all(folder: Path) -> str:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    _git(folder, "init", "--quiet")
    _git(folder, "add", ".")
    _git(folder, *identity, "commit", "--quiet", "--no-verify", "--message", "first")
    return _git(folder, "rev-parse", "HEAD")


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "core.hooksPath=/dev/null", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
