"""A person asks to be deleted: her sound and her name are nowhere in the cache afterwards."""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import soundfile

from recipes.prepare import prepare_audio
from sbkit.base.errors import ConfigError
from sbkit.commands.cli import run as sbkit
from sbkit.data.forgetting import find_forgotten
from sbkit.data.shard import read_rows
from sbkit.data.splits import Splits
from tests.runs import ROOT, contents_of

SPEAKERS = ("anna", "ben", "carla")
KEYS = {"language": "en", "sample_rate": 16_000, "min_seconds": 0.0, "max_seconds": 9.0}


@dataclass
class Corpus:
    """A table of three speakers, with four clips of noise each."""

    folder: Path
    form: str = "csv"

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        for number, name in enumerate(name for speaker in SPEAKERS for name in self.names(speaker)):
            samples = np.random.default_rng(number).integers(-9000, 9000, 8000, np.int16)
            soundfile.write(self.folder / name, samples, 16_000)
        self.list(*SPEAKERS)

    def names(self, speaker: str) -> list[str]:
        return [f"{speaker}-{number}.wav" for number in range(4)]

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
        assert {row["id"] for row in rows} == {name[:-4] for s in speakers for name in self.names(s)}
        for row in rows:
            expected = np.random.default_rng(self._number(row["id"]))
            assert np.array_equal(row["audio"], expected.integers(-9000, 9000, 8000, np.int16))

    def _number(self, id: str) -> int:
        speaker, number = id.split("-")
        return 4 * SPEAKERS.index(speaker) + int(number)

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
                    starts = range(0, len(samples) - 8, 8)
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
    # A run that reads its rows goes on with the other clips.
    (name,) = find_forgotten({"train": before.fingerprints["train"][:12]})
    assert name == "train" and not find_forgotten(corpus.prepare().fingerprints)
