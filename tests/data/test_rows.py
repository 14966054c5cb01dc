"""Rows that Python holds become a table without loss."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sbkit.data.rows import store_rows


def test_rows_keep_columns_that_the_first_one_lacks_and_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths are relative to the working folder, also in audio as `datasets` gives it."""
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    of_datasets = {"path": "b.wav", "bytes": None}
    rows = [{"audio": "a.wav", "text": "x"}, {"audio": of_datasets, "text": "y", "speaker": "ann"}]
    assert pq.read_table(store_rows(rows)).to_pylist() == [
        {"audio": str(tmp_path / "a.wav"), "text": "x", "speaker": None},
        {"audio": str(tmp_path / "b.wav"), "text": "y", "speaker": "ann"},
    ]
