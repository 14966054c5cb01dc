"""A container's limit counts, not the machine's memory."""

from pathlib import Path

import pytest

from sbkit.base.memory import available_memory

GROUP = {
    "memory.max": "1000\n",
    "memory.current": "700\n",
    "memory.stat": "file 9\ninactive_file 50\n",
}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        ({"meminfo": "MemTotal: 9 kB\nMemAvailable:  7 kB\n"}, 7 * 1024),
        ({"meminfo": "MemAvailable: 7 kB\n", **GROUP}, 350),
        ({"meminfo": "MemAvailable: 7 kB\n", **GROUP, "memory.max": "max\n"}, 7 * 1024),
        ({"meminfo": "MemAvailable: 7 kB\n", **GROUP, "memory.max": "\n"}, 7 * 1024),
        ({**GROUP, "memory.stat": ""}, 300),
        ({**GROUP, "memory.max": "100\n"}, 0),
        ({"meminfo": "\n\nMemAvailable:\n"}, None),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, files: dict[str, str], free: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert available_memory(tmp_path / "meminfo", [tmp_path, tmp_path / "none"]) == free


def test_this_machine_tells() -> None:
    free = available_memory()
    assert free is None or free > 1 << 20
