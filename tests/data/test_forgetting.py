"""A person asks to be deleted: her sound and her name are nowhere in the cache afterwards."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

from recipes.prepare import prepare_audio
from sbkit.base.errors import ConfigError
from sbkit.commands.cli import run as sbkit
from sbkit.data.forgetting import find_forgotten
from sbkit.data.read_manifests import store_rows
from sbkit.data.shard import read_rows
from sbkit.data.splits import Splits
from tests.runs import ROOT, contents_of, times_of

YAML = f"{ROOT}/hparams/ctc.yaml"
SPEAKERS = ("anna", "ben", "carla")
KEYS = {"language": "en", "sample_rate": 16_000, "min_seconds": 0.0, "max_seconds": 9.0}


@dataclass
class Corpus:
    """A table of three speakers, with a few clips of noise each."""

    folder: Path
    count: int = 4  # of the clips of a speaker

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        for number, name in enumerate(name for speaker in SPEAKERS for name in self.names(speaker)):
            samples = np.random.default_rng(number).integers(-9000, 9000, 8000, np.int16)
            soundfile.write(self.folder / name, samples, 16_000)
        self.list(*SPEAKERS)

    def names(self, speaker: str) -> list[str]:
        return [f"{speaker}-{number}.wav" for number in range(self.count)]

    def rows(self, *speakers: str) -> list[dict[str, Any]]:
        files = [self.folder / name for speaker in speakers for name in self.names(speaker)]
        texts = [f"Sentence {file.stem[-1]} as {file.stem[:-2]} read it." for file in files]
        return [
            {"path": str(file), "text": text, "speaker": text.split()[3]}
            for file, text in zip(files, texts, strict=True)
        ]

    def write(self, name: str, *speakers: str) -> Path:
        lines = [",".join(row.values()) for row in self.rows(*speakers)]
        file = self.folder / f"{name}.csv"
        file.write_text("\n".join(["path,text,speaker", *lines]))
        return file

    def list(self, *speakers: str) -> None:
        """Write the tables without the other speakers."""
        for name in ("train", "dev"):
            self.write(name, *speakers)

    def delete(self, speaker: str) -> None:
        for name in self.names(speaker):
            (self.folder / name).unlink()

    def prepare(self, **more: Any) -> Splits:
        tables = {name: str(self.folder / f"{name}.csv") for name in ("train", "dev")}
        return prepare_audio({**KEYS, "manifest": tables, **more})

    def assert_prepared(self, *speakers: str, **more: Any) -> None:
        """Check ids and audio of all rows; nothing may be decoded."""
        train = self.prepare(**more).train
        rows = [*read_rows(train, range(len(train)))]
        assert {row["id"] for row in rows} == {
            name[:-4] for s in speakers for name in self.names(s)
        }
        for row in rows:
            expected = np.random.default_rng(self._number(row["id"]))
            assert np.array_equal(row["audio"], expected.integers(-9000, 9000, 8000, np.int16))

    def _number(self, id: str) -> int:
        speaker, number = id.split("-")
        return self.count * SPEAKERS.index(speaker) + int(number)

    def held_in(self, folder: Path) -> dict[str, set[str]]:
        """Return what the files of a folder have of each speaker, by any of their bytes."""
        held: dict[str, set[str]] = {speaker: set() for speaker in SPEAKERS}
        for file in folder.rglob("*"):
            content = file.read_bytes() if file.is_file() else b""
            for speaker in SPEAKERS:
                if speaker.encode() in content or speaker in file.name:
                    held[speaker].add("name")
                for name in self.names(speaker):
                    samples = np.random.default_rng(self._number(name[:-4])).integers(
                        -9000, 9000, 8000, np.int16
                    )
                    starts = range(0, len(samples) - 8, 80)
                    if any(samples[start : start + 8].tobytes() in content for start in starts):
                        held[speaker].add("sound")
        return {speaker: things for speaker, things in held.items() if things}


BOTH = {"name", "sound"}
ALL = dict.fromkeys(SPEAKERS, BOTH)
OTHERS = dict.fromkeys(SPEAKERS[1:], BOTH)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return Corpus(tmp_path / "data")


def prune() -> None:
    assert sbkit(["cache", "prune"]) == 0


def by_prune(corpus: Corpus) -> None:
    corpus.list(*SPEAKERS[1:])
    prune()


def by_prune_after_a_start(corpus: Corpus) -> None:
    corpus.list(*SPEAKERS[1:])
    corpus.prepare()
    prune()


def by_table(corpus: Corpus) -> None:
    assert sbkit(["cache", "forget", str(corpus.write("hers", "anna"))]) == 0
    corpus.list(*SPEAKERS[1:])


def by_files(corpus: Corpus) -> None:
    corpus.delete("anna")
    files = [str(corpus.folder / name) for name in corpus.names("anna")]
    assert sbkit(["cache", "forget", *files]) == 0
    corpus.list(*SPEAKERS[1:])


WAYS: list[Callable[[Corpus], None]] = [by_prune, by_prune_after_a_start, by_table, by_files]


@pytest.mark.parametrize("forget", WAYS)
def test_no_byte_of_a_person_is_left_and_the_others_are_not_decoded_again(
    forget: Callable[[Corpus], None], corpus: Corpus, own_cache: Path, opened: list[str]
) -> None:
    before = corpus.prepare()
    assert corpus.held_in(own_cache) == ALL
    forget(corpus)
    assert corpus.held_in(own_cache) == OTHERS
    opened.clear()
    for _ in range(2):
        prune()  # has nothing more to do
        corpus.assert_prepared(*SPEAKERS[1:])
    assert opened == []
    assert corpus.held_in(own_cache) == OTHERS
    (name,) = find_forgotten({"train": before.fingerprints["train"][:12]})
    assert name == "train" and not find_forgotten(corpus.prepare().fingerprints)


@pytest.mark.parametrize("can_link", [True, False])
def test_shard_that_folders_share_is_written_anew_in_all_of_them(
    can_link: bool, corpus: Corpus, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_link:
        error = Mock(side_effect=PermissionError(1, "no links"))
        monkeypatch.setattr(Path, "hardlink_to", error)
    corpus.prepare()
    other = {"columns": {"text": "text"}}
    dataset = corpus.prepare(**other).train  # which a run reads all the time
    shards = [*own_cache.rglob("train-*.clips")]
    assert len(shards) == 2 and shards[0].samefile(shards[1]) == can_link
    size = shards[0].stat().st_size
    by_prune(corpus)
    assert corpus.held_in(own_cache) == OTHERS
    assert shards[0].samefile(shards[1]) == can_link
    assert [shard.stat().st_size for shard in shards] == [size] * 2
    assert [row["id"] for row in read_rows(dataset, range(4, 12))] == dataset["id"][4:]
    corpus.assert_prepared(*SPEAKERS[1:])
    corpus.list("carla")  # of the same shards, once more
    prune()
    assert corpus.held_in(own_cache) == {"carla": BOTH}
    corpus.assert_prepared("carla", **other)


def test_clip_stays_while_any_table_lists_it(corpus: Corpus, own_cache: Path) -> None:
    corpus.prepare()
    table = str(corpus.write("other", "anna"))
    settings = {**KEYS, "manifest": {"train": table, "dev": table}}
    prepare_audio(settings)
    corpus.list(*SPEAKERS[1:])
    prune()
    assert corpus.held_in(own_cache)["anna"] == BOTH
    assert len(prepare_audio(settings).train) == 4
    Path(table).unlink()
    prune()
    assert corpus.held_in(own_cache) == OTHERS


def unmount(corpus: Corpus) -> None:
    """Leave an empty folder."""
    corpus.folder.rename(corpus.folder.parent / "disk")
    corpus.folder.mkdir()


def unmount_above(corpus: Corpus) -> None:
    corpus.folder.parent.rename(corpus.folder.parents[1] / "disk")


def spoil_table(corpus: Corpus) -> None:
    (corpus.folder / "train.csv").write_text('path,text\n"')


def empty_table(corpus: Corpus) -> None:
    (corpus.folder / "train.csv").write_text("path,text,speaker\n")


def remove_one_table(corpus: Corpus) -> None:
    (corpus.folder / "dev.csv").unlink()


def remove_audio(corpus: Corpus) -> None:
    for file in corpus.folder.glob("*.wav"):
        file.unlink()


LOSSES = [unmount, unmount_above, spoil_table, empty_table, remove_one_table, remove_audio]


@pytest.mark.parametrize("lose", LOSSES)
def test_tables_that_cannot_be_read_list_what_they_listed(
    lose: Callable[[Corpus], None], tmp_path: Path, own_cache: Path, opened: list[str]
) -> None:
    corpus = Corpus(tmp_path / "mount" / "data")
    corpus.prepare()
    corpus.list(*SPEAKERS[1:])
    corpus.prepare()
    copy = shutil.copytree(corpus.folder, tmp_path / "copy")
    lose(corpus)
    for _ in range(2):
        prune()
        assert corpus.held_in(own_cache) == OTHERS
    shutil.rmtree(corpus.folder, ignore_errors=True)
    corpus.folder.parent.mkdir(exist_ok=True)
    copy.rename(corpus.folder)
    opened.clear()
    corpus.assert_prepared(*SPEAKERS[1:])
    assert opened == []


def test_shards_of_an_interrupted_preparation_stay(
    corpus: Corpus, own_cache: Path, opened: list[str]
) -> None:
    corpus.prepare()
    (folder,) = (own_cache / "corpora").glob("[!.]*")
    for file in (*folder.glob("*.json"), *folder.glob("*.arrow")):
        if file.name != "corpus.json":
            file.unlink()
    (folder / "dev-0.clips").write_bytes(b"half written")
    prune()
    assert not (folder / "dev-0.clips").exists()
    opened.clear()
    corpus.assert_prepared(*SPEAKERS)
    assert opened == []


def test_dry_run_changes_nothing(corpus: Corpus, tmp_path: Path, own_cache: Path) -> None:
    out = tmp_path / "out"
    tables = f"--manifest={{train: {corpus.folder}/train.csv, dev: {corpus.folder}/dev.csv}}"
    assert sbkit(["prepare", YAML, tables, f"--out={out}"]) == 0
    corpus.prepare()
    prepare_audio({**KEYS, "data_folder": str(out)})
    before = [contents_of(tmp_path), times_of(tmp_path)]
    words = ["cache", "forget", str(corpus.folder / "anna-1.wav"), "--out", str(out)]
    assert sbkit([*words, "--dry-run"]) == 0
    assert [contents_of(tmp_path), times_of(tmp_path)] == before
    assert sbkit(words) == 0
    assert [contents_of(tmp_path), times_of(tmp_path)] != before


def test_person_is_removed_from_a_corpus_of_out(
    tmp_path: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, out = Corpus(tmp_path / "data", count=8), tmp_path / "out"
    tables = f"--manifest={{train: {corpus.folder}/train.csv, dev: {corpus.folder}/dev.csv}}"
    (corpus.folder / "anna-7.wav").write_bytes(b"RIFF")  # is left out, and named
    assert sbkit(["prepare", YAML, tables, f"--out={out}"]) == 0
    settings = {**KEYS, "data_folder": str(out)}
    before = prepare_audio(settings)
    assert corpus.held_in(tmp_path / "out") == ALL
    assert sbkit(["cache", "forget", str(corpus.write("hers", "anna")), f"--out={out}"]) == 0
    assert corpus.held_in(out) == OTHERS
    assert not {"anna"} & {*corpus.held_in(own_cache)}
    assert sbkit(["prepare", "--verify", str(out)]) == 0
    train = prepare_audio(settings).train
    assert [row["id"] for row in read_rows(train, range(16))] == before.train["id"][7:]
    assert find_forgotten(before.fingerprints) == ["train", "dev"]
    capsys.readouterr()
    assert sbkit(["cache", "forget", str(corpus.folder / "hers.csv"), f"--out={out}"]) == 0
    assert "erasing 0 clips" in capsys.readouterr().out
    assert prepare_audio(settings).train["id"][:] == before.train["id"][7:]


def by_other_form(corpus: Corpus, form: str, *speakers: str) -> dict[str, Any]:
    """Write the rows with their audio in the table, as spans of one file, or with durations."""
    rows = corpus.rows(*speakers)
    if form == "parquet":
        for row in rows:
            row["audio"] = Path(row.pop("path")).read_bytes()
        for name in ("train", "dev"):
            pq.write_table(pa.Table.from_pylist(rows), corpus.folder / f"{name}.parquet")
        suffix, more = "parquet", {}
    else:
        for row in rows:
            row |= {"duration_ms": "500"} if form == "lazy" else {"start": "0", "end": "0.5"}
        for name in ("train", "dev"):
            pd.DataFrame(rows).to_csv(corpus.folder / f"{name}.csv", index=False)
        suffix, more = "csv", {"audio_store": "lazy"} if form == "lazy" else {}
    tables = {name: str(corpus.folder / f"{name}.{suffix}") for name in ("train", "dev")}
    return {**KEYS, "manifest": tables, **more}


@pytest.mark.parametrize("form", ["parquet", "spans", "lazy"])
def test_rows_of_other_forms_are_forgotten(form: str, corpus: Corpus, own_cache: Path) -> None:
    prepare_audio(by_other_form(corpus, form, *SPEAKERS))
    things = {"name"} if form == "lazy" else BOTH
    assert corpus.held_in(own_cache) == dict.fromkeys(SPEAKERS, things)
    settings = by_other_form(corpus, form, *SPEAKERS[1:])
    prune()
    # A table with audio is one unit: its rows are decoded again.
    kept = {} if form != "spans" else OTHERS
    assert corpus.held_in(own_cache) == kept
    assert len(prepare_audio(settings).train) == 8
    assert corpus.held_in(own_cache) == dict.fromkeys(SPEAKERS[1:], things)
    names = ["train.parquet", "dev.parquet"] if form == "parquet" else corpus.names("ben")
    assert sbkit(["cache", "forget", *(str(corpus.folder / name) for name in names)]) == 0
    assert corpus.held_in(own_cache) == ({"carla": BOTH} if form == "spans" else {})


def test_files_of_runs_that_name_a_person_are_listed(
    corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus.prepare()
    run = tmp_path / "runs/a"
    (run / "tensorboard").mkdir(parents=True)
    (run / "train.log").touch()
    (run / "report.html").write_text("<td>anna-1</td>")
    (run / "utterances_test.jsonl").write_text('{"id": "anna-12"}')  # another one's
    (run / "tensorboard/events.1").write_bytes(b"\x0aSentence 1 as anna read it.\x12")
    (run / "model.safetensors").write_bytes(b"anna-1")
    words = ["cache", "forget", "--dry-run", str(corpus.folder / "anna-1.wav")]
    capsys.readouterr()
    assert sbkit([*words, "--runs", str(tmp_path / "runs")]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines == [
        "These files have names or texts of the clips:",
        str(run / "report.html"),
        str(run / "tensorboard/events.1"),
    ]


def test_rows_that_python_gave_are_forgotten(corpus: Corpus, own_cache: Path) -> None:
    for speaker in ("anna", "ben"):
        store_rows([{"audio": row["path"], "text": row["text"]} for row in corpus.rows(speaker)])
    prune()
    assert corpus.held_in(own_cache) == {"anna": {"name"}, "ben": {"name"}}
    assert sbkit(["cache", "forget", str(corpus.folder / "anna-1.wav")]) == 0
    assert corpus.held_in(own_cache) == {"ben": {"name"}}


def test_commands_of_the_page_delete_a_person(
    corpus: Corpus, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tables = f"--manifest={{train: {corpus.folder}/train.csv, dev: {corpus.folder}/dev.csv}}"
    assert sbkit(["prepare", YAML, tables, "--out=shared-corpus"]) == 0
    assert sbkit(["prepare", YAML, tables, "--min_seconds=0"]) == 0
    assert corpus.held_in(own_cache) == corpus.held_in(tmp_path / "shared-corpus") == ALL
    corpus.write("hers", "anna").rename("hers.csv")
    page = (ROOT / "docs/security.md").read_text("utf-8")
    (block,) = re.findall(r"(?s)```sh\n(sbkit cache forget.*?)```", page)
    for command in block.splitlines():
        assert sbkit(command.split()[1:]) == 0
    assert corpus.held_in(own_cache) == corpus.held_in(tmp_path / "shared-corpus") == OTHERS


def test_options_of_forget_are_for_forget() -> None:
    with pytest.raises(ConfigError, match="are for `sbkit cache forget`"):
        sbkit(["cache", "prune", "--dry-run"])
    with pytest.raises(ConfigError, match="Name the clips"):
        sbkit(["cache", "forget"])


def test_corpus_without_tables_is_read_again(
    corpus: Corpus, tmp_path: Path, own_cache: Path, opened: list[str]
) -> None:
    """Its rows for another start stay beside each other; a folder on no disk has no splits."""
    for split in ("train", "dev"):
        for row in corpus.rows(*SPEAKERS):
            chapter = tmp_path / "libri" / split / row["speaker"] / "1"
            chapter.mkdir(parents=True, exist_ok=True)
            file = Path(shutil.copy(row["path"], chapter))
            with (chapter / "1.trans.txt").open("a") as texts:
                texts.write(f"{file.stem} {row['text']}\n")
    settings = {**KEYS, "data_folder": str(tmp_path / "libri")}
    prepare_audio(settings)
    for split in ("train", "dev"):
        shutil.rmtree(tmp_path / "libri" / split / "anna")
    for _ in range(2):
        prune()
        assert corpus.held_in(own_cache) == OTHERS
        (tmp_path / "libri").rename(tmp_path / "away")
        (tmp_path / "libri").mkdir()
        prune()
        (tmp_path / "libri").rmdir()
        (tmp_path / "away").rename(tmp_path / "libri")
        opened.clear()
        assert len(prepare_audio(settings).train) == 8
        assert opened == []


def test_corpora_of_earlier_versions_are_removed_and_of_later_ones_kept(
    corpus: Corpus, own_cache: Path
) -> None:
    corpus.prepare()
    (file,) = own_cache.rglob("corpus.json")
    corpus.list(*SPEAKERS[1:])
    record = json.loads(file.read_text())
    for step, expected in ((1, ALL), (-2, {})):
        record["made_from"]["code"]["rows"] += step
        file.write_text(json.dumps(record))
        prune()
        assert corpus.held_in(own_cache) == expected
