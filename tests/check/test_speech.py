"""Findings about the data at a larger scale than the table of mutations has."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from recipes.asr.recipe import ASR
from sbkit.check.alignment import check_alignment
from sbkit.check.audio_levels import SAMPLED, measure_audio, sampled_rows
from sbkit.check.check import check_planned_run
from sbkit.check.labels import check_labels
from sbkit.check.planned_run import PlannedRun
from sbkit.check.speech import check_speech
from sbkit.data.splits import Splits, read_excluded
from sbkit.data.store import Utterance, open_store, write_store
from tests.runs import ROOT
from tools import bench_check

TEXT = "the quick brown fox jumps over a lazy dog"
TONE = (3000 * np.sin(np.arange(24_000) / 5)).astype("<i2")


def splits_of(folder: Path, **rows: list[Utterance]) -> Splits:
    for split, utterances in rows.items():
        write_store(folder / split, utterances)
    stores = {split: open_store(folder / split) for split in rows}
    return Splits(stores["train"], {"dev": stores["dev"]}, {"test": stores["test"]})


def said(split: str, count: int, *, speaker: str = "", audio: np.ndarray = TONE) -> list[Utterance]:
    """Say different sentences of the same letters."""
    words = [f"{TEXT} {split} x{'o' * n}" for n in range(count)]
    return [
        Utterance(f"{split}{n}", text, text, speaker, 64_000, audio.tobytes())
        for n, text in enumerate(words)
    ]


def subject_of(splits: Splits, run: Path, **overrides: object) -> PlannedRun:
    recipe = replace(ASR, prepare_splits=lambda knobs: splits)
    knobs = {"output_folder": str(run), "d_model": 16, "d_ffn": 16, "nhead": 2, **overrides}
    return PlannedRun(ROOT / "hparams/ctc.yaml", knobs, recipe=recipe)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with patch.dict(os.environ, {"SBKIT_CACHE": str(tmp_path / "cache")}):
        yield tmp_path


def test_a_long_list_goes_into_a_file_of_the_run(folder: Path) -> None:
    train_rows, test_rows = said("train", 30), said("test", 3)
    leaked = [replace(each, id=f"dev{n}") for n, each in enumerate(train_rows[:9])]
    splits = splits_of(folder, train=train_rows, dev=leaked, test=test_rows)
    with subject_of(splits, folder / "run") as planned:
        (finding,) = check_speech(planned)
    assert "9 of 9 in dev have the sentence" in finding.effect
    assert "dev4 and 4 more (all in " in finding.effect
    assert finding.listing == str(folder / "run/check/sentence_in_another_split.tsv")
    listed = read_excluded(Path(finding.listing))
    assert tuple(item.id for item in listed) == finding.ids == tuple(f"dev{n}" for n in range(9))
    assert listed[0].detail == f"train: {train_rows[0].text}"


def test_a_clean_check_writes_nothing(folder: Path) -> None:
    rows = {split: said(split, 5) for split in ("train", "dev", "test")}
    with subject_of(splits_of(folder, **rows), folder / "run") as planned:
        assert [*check_labels(planned), *check_alignment(planned), *check_speech(planned)] == []
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("speakers", "found"),
    [
        (("ann", "ann", "ann"), 0),  # no split could part a single speaker
        (("", "", ""), 0),
        (("ann", "bob", "eve"), 0),
        (("ann", "bob", "bob"), 1),
        (("ann", "bob", ""), 0),
        (("ann", "ann", "bob"), 1),
    ],
)
def test_a_speaker_in_two_splits_is_told_where_there_are_others(
    folder: Path, speakers: tuple[str, str, str], found: int
) -> None:
    names = ("train", "dev", "test")
    rows = {
        split: said(split, 3, speaker=speaker)
        for split, speaker in zip(names, speakers, strict=True)
    }
    with subject_of(splits_of(folder, **rows), folder / "run") as planned:
        findings = list(check_speech(planned))
    assert len(findings) == found
    assert all("speaker" in finding.effect and not finding.stops for finding in findings)


def test_a_sample_is_spread_evenly_and_always_the_same() -> None:
    assert sampled_rows(3).tolist() == [0, 1, 2]
    assert sampled_rows(0).tolist() == []
    rows = sampled_rows(1_000_000)
    assert len(rows) == SAMPLED
    assert (rows[0], rows[-1]) == (0, 999_999)
    assert np.ptp(np.diff(rows)) <= 1
    assert rows.tolist() == sampled_rows(1_000_000).tolist()


@pytest.mark.parametrize(
    ("samples", "peak", "at_top"),
    [
        (np.zeros(0, np.int16), 0, 0.0),
        (np.array([-32768, 0, 0, 32767], np.int16), 32768, 0.5),
        (TONE, 3000, 0.0),
    ],
)
def test_levels_are_measured(samples: np.ndarray, peak: int, at_top: float) -> None:
    audio = measure_audio(samples)
    assert audio.peak == pytest.approx(peak, abs=1)
    assert audio.at_top == at_top


def test_the_default_corpus_has_nothing_to_tell(asterisk_english: Path, tmp_path: Path) -> None:
    knobs = {"output_folder": str(tmp_path / "run"), "data_folder": str(asterisk_english)}
    checks = (check_labels, check_alignment, check_speech)
    with PlannedRun(ROOT / "hparams/ctc.yaml", knobs, recipe=ASR) as planned:
        assert check_planned_run(planned, checks) == []


def test_the_benchmark_finds_its_own_data_sound(folder: Path) -> None:
    with subject_of(bench_check.make_splits(folder, 600), folder / "run") as planned:
        lines = list(bench_check.measure(planned))
    assert [line.split(":")[0] for line in lines] == [
        "check_labels",
        "check_alignment",
        "check_speech",
    ]
    assert all(line.endswith("0 findings") for line in lines)
