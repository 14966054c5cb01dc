"""Splits are prepared once, and a change of what they were made from shows."""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import soundfile
from datasets.table import MemoryMappedTable

from recipes.CommonVoice import corpus as common_voice
from recipes.prepare import prepare_transcripts
from recipes.vad.data import prepare_speech
from sbkit.base.errors import ConfigError, DataError
from sbkit.commands.cli import run as sbkit
from sbkit.config.hparams import read_settings
from sbkit.data import sharded_corpus, tables
from sbkit.data.shard import read_rows
from sbkit.data.splits import Splits
from tests.calls import note_calls
from tests.recipes.test_common_voice import SPLITS, make_release

HEADER = "client_id\tpath\tsentence\n"
YAML = Path("hparams/ctc.yaml")


def write_clip(file: Path, seconds: float = 1.0) -> None:
    soundfile.write(file, np.zeros(int(seconds * 16_000), np.int16), 16_000)


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """Return a release of two clips in each split."""
    folder = make_release(tmp_path / "release", count=2, kind="wav")
    rows = [f"{split}{n}.wav\t{100 * (n + 1)}\n" for split in SPLITS for n in range(2)]
    (folder / "clip_durations.tsv").write_text("".join(["clip\tduration[ms]\n", *rows]))
    return folder


@pytest.fixture
def read_splits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return note_calls(monkeypatch, common_voice, "read_blocks", lambda settings, split: split)


def prepare(release: Path, **settings: object) -> Splits:
    overrides = {"data_folder": str(release), "audio_store": "lazy", "min_seconds": 0, **settings}
    return prepare_transcripts(read_settings(YAML, overrides))


def test_later_start_reads_no_table(release: Path, read_splits: list[str]) -> None:
    first, later = prepare(release), prepare(release, lr=0.1)  # which decides no row
    assert read_splits == ["train", "dev", "test"]
    assert later.fingerprints == first.fingerprints
    assert later.train[:] == first.train[:]


@pytest.mark.parametrize("form", ["release", "shards"])
def test_rows_prepared_in_blocks_are_those_of_one_block(
    form: str, release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        write_clip(release / "clips" / f"cv_{number}.mp3")
    rows = [f"speaker {number % 3}\tcv_{number}.mp3\tWords {number}.\n" for number in range(8)]
    (release / "train.tsv").write_text(HEADER + "".join(rows))
    with (release / "clip_durations.tsv").open("a") as durations:
        durations.writelines(f"cv_{7 - number}.mp3\t{1000 + number}\n" for number in range(8))
    source = release
    if form == "shards":
        source = tmp_path / "shards"
        folders = (f"--data_folder={release}", "--shards", str(source), "--shard-size", "100 kB")
        assert sbkit(["prepare", str(YAML), *folders]) == 0
    monkeypatch.setattr(tables, "BLOCK_BYTES", 100)
    in_blocks = prepare(source).train
    table = MemoryMappedTable.from_file(in_blocks.cache_files[0]["filename"])
    assert len(sizes := [*map(len, table.to_batches())]) > 2 and all(sizes)
    shutil.rmtree(tmp_path / "cache" / "prepared")
    monkeypatch.setattr("sbkit.data.common_voice.PLAIN_CLIP", "^$")  # so the release is one block
    monkeypatch.setattr(sharded_corpus, "are_distinct", lambda hashes: False)
    assert prepare(source).train[:] == in_blocks[:]


def test_labels_of_a_table_are_in_the_fingerprints(release: Path) -> None:
    """The recipe takes them from the table, and a run was resumed with others."""
    settings = {"data_folder": str(release), "min_seconds": 0, "language": "en"}
    fingerprints: list[Mapping[str, str]] = []
    for value in ("0.10-0.60", "0.20-0.60", "0.10-0.60"):
        rows = f"{HEADER[:-1]}\tspeech\nann\ttrain0.wav\tHi.\t{value}\n"
        (release / "train.tsv").write_text(rows)
        splits = prepare_speech(read_settings(Path("hparams/vad.yaml"), settings))
        fingerprints.append(splits.fingerprints)
    first, second, again = fingerprints
    assert first["train, speech"] != second["train, speech"]
    assert again == first


def test_lazy_clip_that_changes_is_an_error_until_the_next_start(release: Path) -> None:
    rows = prepare(release).valid["dev"]
    write_clip(release / "clips" / "dev1.wav", seconds=1.5)
    with pytest.raises(DataError, match=r"dev1.wav has \d+ bytes, but had .* Start again"):
        list(read_rows(rows, [0, 1]))
    assert len(list(read_rows(prepare(release).valid["dev"], [0, 1]))) == 2


def test_corpus_of_a_module_is_stored_if_it_tells_its_files(
    release: Path, read_splits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("my_corpus")
    vars(module).update(splits=common_voice.splits, read=common_voice.read)
    monkeypatch.setitem(sys.modules, "my_corpus", module)
    for _ in range(2):
        prepare(release, corpus="my_corpus")
    assert len(read_splits) == 6
    vars(module).update(files=common_voice.files)
    for _ in range(2):
        prepare(release, corpus="my_corpus")
    assert len(read_splits) == 9
    vars(module).update(splits=lambda settings: {"train": [settings["seed"]]})
    with pytest.raises(ConfigError, match="reads `seed`. Take `files` out"):
        prepare(release, corpus="my_corpus", language="de")


def test_cache_prune_removes_splits_of_earlier_tables(release: Path, tmp_path: Path) -> None:
    prepare(release)
    table = release / "train.tsv"
    table.write_text(table.read_text().replace("number", "no."))
    prepare(release)
    folder = tmp_path / "cache" / "prepared"
    assert len([*folder.glob("release-*")]) == 2
    assert sbkit(["cache", "prune"]) == 0
    assert len([*folder.glob("release-*")]) == 1
