"""Sharing the preparation of a corpus: shares, kills, two at once, half-written folders, Ray."""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock, patch

import fsspec
import numpy as np
import pytest
import soundfile
from fsspec.implementations.memory import MemoryFileSystem

from sbkit.base.errors import ASKED_TO_STOP, ConfigError, DataError, StoreError
from sbkit.commands.cli import run as sbkit
from sbkit.data import prepared, units
from sbkit.data.corpus import corpus_of
from sbkit.data.prepared import Spec, finish, plan, verify, write
from sbkit.data.units import Work
from tests.calls import note_calls
from tests.processes import Process, run_fresh
from tests.runs import ROOT

YAML = f"{ROOT}/hparams/ctc.yaml"
SLURM = {  # the second of two tasks
    **{"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "5"},
    **{"SLURM_ARRAY_TASK_STEP": "2", "SLURM_ARRAY_TASK_COUNT": "2"},
}
WRITE = """
import json, sys, time
from pathlib import Path
from sbkit.data.units import write
unit, barrier = json.loads(sys.argv[1]), Path(sys.argv[2])
while not barrier.exists():
    time.sleep(0.01)
write(unit)
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Mapping[str, str]:
    """Write tables of 24 clips, and return their paths by split."""
    tables, first = {}, 0
    for split, count in (("train", 20), ("dev", 4)):
        lines = ["path,sentence"]
        for number in range(first, first := first + count):
            wave = 900 * np.sin(np.arange(1600) * (number + 1) / 30)
            soundfile.write(tmp_path / f"{number}.wav", wave.astype(np.int16), 16_000)
            lines.append(f"{number}.wav,Word {number}.")
        tables[split] = tmp_path / f"{split}.csv"
        tables[split].write_text("\n".join(lines) + "\n")
    return {split: str(table) for split, table in tables.items()}


@pytest.fixture
def spec(manifest: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spec:
    """Return a corpus in several units of a few clips."""
    monkeypatch.setattr(prepared, "UNIT_CLIPS", 2)
    return Spec.of(YAML, {"manifest": manifest}, str(tmp_path / "out"))


def words_of(spec: Spec, *options: str) -> list[str]:
    tables = [f"--manifest.{split}={table}" for split, table in spec.settings["manifest"].items()]
    return ["prepare", YAML, *tables, "--out", spec.out, *options]


def write_all(spec: Spec) -> None:
    for unit in plan(spec):
        write(unit)
    assert finish(spec) == []


def shards_of(spec: Spec) -> dict[str, tuple[bytes, int]]:
    """Return the content and the time of all shards by name."""
    files = Path(spec.out).glob("*-last.*")
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


# ---- shares


@pytest.mark.parametrize(
    ("options", "variables", "expected"),
    [
        ("--share 4/3 --out o", {}, "must be K/N with K from 1 to N"),
        ("--share 0/3 --out o", {}, "must be K/N with K from 1 to N"),
        ("--share 1/3", {}, "need --out: a folder or URL"),
        ("--finish", {}, "need --out: a folder or URL"),
        ("--out o", {"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX is set"),
        ("", {"AWS_BATCH_JOB_ARRAY_INDEX": "2"}, "AWS_BATCH_JOB_ARRAY_INDEX is set"),
        ("--out s3://b/o", {"SLURM_PROCID": "1", "SLURM_NTASKS": "9"}, "SLURM_PROCID is set"),
        ("", {"RANK": "0", "WORLD_SIZE": "2"}, "RANK is set"),
        (
            "--out o",
            {
                "SLURM_ARRAY_TASK_ID": "9",
                "SLURM_ARRAY_TASK_MIN": "1",
                "SLURM_ARRAY_TASK_COUNT": "4",
            },
            "number 8 of 4",
        ),
    ],
)
def test_shares_that_cannot_be_are_refused_in_one_sentence(
    options: str, variables: Mapping[str, str], expected: str
) -> None:
    with patch.dict(os.environ, variables), pytest.raises(ConfigError, match=expected):
        sbkit(["prepare", YAML, *options.split()])


def test_shares_write_all_units_once_and_finish_lists_the_others(
    spec: Spec, capfd: pytest.CaptureFixture[str]
) -> None:
    names = {Work.of(unit).name for unit in plan(spec)}
    assert len(names) > 4
    with patch.dict(os.environ, SLURM):
        assert sbkit(words_of(spec)) == 0
    with patch.dict(os.environ, {"JOB_COMPLETION_INDEX": "0"}):
        assert sbkit(words_of(spec, "--finish")) == ASKED_TO_STOP
        output = "".join(capfd.readouterr())
        assert {name for name in names if f"missing: {name}" in output} == {
            Work.of(unit).name for unit in plan(spec)[::2]
        }
        before = shards_of(spec)
        assert sbkit(words_of(spec, "--share", "3/256")) == 0  # there are not as many units
        assert sbkit(words_of(spec, "--share", "1/1")) == 0
    assert {**shards_of(spec), **before} == shards_of(spec)  # what was there is not written again
    assert finish(spec) == [] and verify(spec.out) == 0


def test_killed_process_loses_one_unit(spec: Spec) -> None:
    todo = plan(spec)
    slow = "import sbkit.data.units as u, time, sys, json\npublish = u.ShardWriter.publish\n"
    slow += "def wait(*words, **options):\n    publish(*words, **options)\n    time.sleep(0.3)\n"
    slow += "u.ShardWriter.publish = wait\nfor unit in json.loads(sys.argv[1]): u.write(unit)\n"
    process = Process(["-c", slow, json.dumps(todo)])
    while len(shards_of(spec)) < 4:
        time.sleep(0.01)
    process.kill()
    process.wait(timeout=60)
    before = shards_of(spec)
    missing = finish(spec)
    assert 0 < len(missing) < len(todo) - 1
    write_all(spec)
    whole = {name: shard for name, shard in before.items() if name[:-17] not in "".join(missing)}
    assert {**shards_of(spec), **whole} == shards_of(spec) and verify(spec.out) == 0


def test_two_processes_may_write_one_unit_at_once(spec: Spec, tmp_path: Path) -> None:
    first, *others = plan(spec)
    for unit in others:
        write(unit)
    words = ["-c", WRITE, json.dumps(first), str(tmp_path / "go")]
    processes = [Process(words) for _ in range(3)]
    (tmp_path / "go").touch()
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    assert finish(spec) == [] and verify(spec.out) == 0
    assert not [*Path(spec.out).glob(".*")]


# ---- folders that cannot be read


def remove(pattern: str) -> Callable[[Path], None]:
    def remove_files(folder: Path) -> None:
        for file in folder.glob(pattern):
            file.unlink()

    return remove_files


def change_text(folder: Path) -> None:
    content = (folder / "train.arrow").read_bytes()
    assert b"Word 7." in content
    (folder / "train.arrow").write_bytes(content.replace(b"Word 7.", b"Ward 7."))


def change_format(folder: Path) -> None:
    record = json.loads((folder / "corpus.json").read_text())
    (folder / "corpus.json").write_text(json.dumps({**record, "format": 99}))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (remove("corpus.json"), "is half written.*--finish"),
        (lambda folder: os.truncate(folder / "corpus.json", 40), "is damaged.*--finish"),
        (change_format, "has the format 99.*prepare the corpus again"),
        (remove("train.arrow"), "is missing, damaged.*--finish"),
        (change_text, "missing, damaged or not the one of.*--finish"),
        (remove("train-*-last.arrow"), "is missing.*--verify"),
        (
            lambda folder: os.truncate([*folder.glob("t*-last.arrow")][0], 600),
            "600 bytes.*--verify",
        ),
    ],
)
def test_folder_that_is_not_whole_is_refused_by_name_and_not_repaired(
    damage: Callable[[Path], None], expected: str, spec: Spec
) -> None:
    write_all(spec)
    damage(Path(spec.out))
    before = {file.name: file.read_bytes() for file in Path(spec.out).glob("*.*")}
    settings = {**spec.settings, "manifest": None, "data_folder": spec.out}
    with pytest.raises(DataError, match=f"(?s){spec.out}.*{expected}"):
        prepared.prepare(settings, corpus_of(settings))
    assert {file.name: file.read_bytes() for file in Path(spec.out).glob("*.*")} == before


# ---- stores


def test_planning_looks_at_no_audio(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = note_calls(monkeypatch, units, "stat_files", len)
    assert plan(spec) and not looks
    with pytest.raises(ConfigError, match="audio_store"):
        Spec.of(YAML, {**spec.settings, "audio_store": "lazy"}, spec.out)


@pytest.mark.parametrize("method", ["put_file", "pipe_file", "cat_file", "get_file", "find"])
def test_store_that_is_away_is_no_fault_of_its_files(
    method: str, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(spec, out="memory://away")
    monkeypatch.setattr(
        MemoryFileSystem, method, Mock(side_effect=OSError("Please reduce your rate"))
    )
    read = ["prepare", YAML, f"--data_folder={spec.out}"]
    with pytest.raises(StoreError, match="goes on once the store answers") as caught:
        for words in (words_of(spec), read):
            sbkit(words)
    assert "damaged" not in str(caught.value)
    fsspec.filesystem("memory").store.clear()


@pytest.mark.slow(60)
@pytest.mark.skipif(not find_spec("ray"), reason="no Ray here")
def test_ray_writes_the_units(spec: Spec) -> None:
    code = f"""
import json, sys, ray
from sbkit.data.prepared import Spec, finish, plan, write
ray.init(num_cpus=2, include_dashboard=False)
spec = Spec.of({YAML!r}, {{"manifest": json.loads(sys.argv[1])}}, sys.argv[2])
ray.data.from_items(plan(spec)).map(write).materialize()
assert finish(spec) == []
"""
    process = run_fresh(code, json.dumps(spec.settings["manifest"]), spec.out)
    assert process.returncode == 0, process.stderr
    assert verify(spec.out) == 0
