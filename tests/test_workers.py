"""What lets several workers run the tests: which module comes first, and which go together."""

import fcntl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import locked, pytest_collection_modifyitems, scope_of


def item(module: str, name: str, *markers: str) -> Any:
    def closest(marker: str) -> str | None:
        return marker if marker in markers else None

    return SimpleNamespace(path=Path(module), name=name, get_closest_marker=closest)


def test_long_modules_come_first_and_a_module_keeps_its_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    items = [item("a", "1"), item("b", "1", "ddp"), item("c", "1"), item("c", "2", "slow", "ddp")]
    items += [item("c", "3", "slow"), item("d", "1")]
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    pytest_collection_modifyitems(items)
    names = " ".join(f"{each.path}{each.name}" for each in items)
    assert names == "c1 c2 c3 b1 a1 d1"


def test_one_process_keeps_the_order_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [item("a", "1"), item("b", "1", "slow")]
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytest_collection_modifyitems(items)
    assert [str(each.path) for each in items] == ["a", "b"]


def test_one_worker_runs_all_modules_with_tests_of_several_processes(tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in ("one.py", "two.py", "three.py"))
    one.write_text("@pytest.mark.ddp")
    two.write_text("pytestmark = pytest.mark.ddp")
    three.write_text("@pytest.mark.slow")
    assert scope_of(one) == scope_of(two) != scope_of(three)


def test_a_lock_ends_with_its_block(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as other:
        with locked(tmp_path / "lock"), pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
