"""The table of `segment` and `speak --lines`: finished rows stay, and so do the files of others."""

from pathlib import Path

import pytest

from sbkit.base.errors import ConfigError
from sbkit.cli.clip_table import open_clip_table
from tests.shortage import largest_file


def test_full_disk_names_the_progress_and_loses_no_item(tmp_path: Path) -> None:
    table_file = tmp_path / "table.csv"
    progress = tmp_path / "table.progress.jsonl"
    with open_clip_table(table_file, {"model": "a"}) as table:
        table.add("first", [{"text": "one"}])
        size = progress.stat().st_size + 20
        with largest_file(size), pytest.raises(OSError, match="too") as caught:
            table.add("second", [{"text": "two"}])
    assert caught.value.filename == str(progress)
    for unfinished in (["second"], []):  # the line that was cut off is dropped
        with open_clip_table(table_file, {"model": "a"}) as table:
            assert table.unfinished(["first", "second"]) == unfinished
            for item in unfinished:
                table.add(item, [{"text": "two"}])
    assert table.sorted_rows() == [{"text": "one"}, {"text": "two"}]


def test_table_of_another_origin_is_refused(tmp_path: Path) -> None:
    table_file = tmp_path / "own.csv"
    table_file.write_text("path,text\n")
    with pytest.raises(ConfigError, match="own.csv was not"), open_clip_table(table_file, {}):
        pass
