"""A container's limits count, not the machine's cores."""

import os
from pathlib import Path

import pytest

from sbkit.base.cores import cgroup_quota, usable_cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no Linux")
def test_one_core_is_usable_where_affinity_leaves_one() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        ({"": "max 100000", "jobs": "400000 100000", "jobs/mine": "max 100000"}, 4),
        ({"jobs": "400000 100000", "jobs/mine": "150000 100000"}, 1.5),
        ({"jobs/mine": "max 100000"}, None),
        ({"jobs/mine": "nonsense"}, None),
        ({"jobs/mine": "100000 0"}, None),
        ({}, None),
    ],
)
def test_the_tightest_quota_of_all_groups_above_counts(
    tmp_path: Path, limits: dict[str, str], cores: float | None
) -> None:
    (tmp_path / "jobs" / "mine").mkdir(parents=True)
    for group, limit in limits.items():
        (tmp_path / group / "cpu.max").write_text(limit + "\n")
    membership = tmp_path / "cgroup"
    membership.write_text("4:memory:/old\n0::/jobs/mine\n")
    assert cgroup_quota(tmp_path, membership) == cores


def test_a_quota_below_one_core_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbkit.base.cores.cgroup_quota", lambda *_: 0.5)
    assert usable_cores() == 1
