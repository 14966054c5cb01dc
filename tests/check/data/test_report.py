"""Findings about the data at a larger scale than the table of mutations has."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from recipes.asr.recipe import ASR
from sbkit.check.check import check_planned_run
from sbkit.check.data.alignment import check_alignment
from sbkit.check.data.labels import check_labels
from sbkit.check.data.report import check_report, check_silence
from sbkit.check.data.utterances import transcripts_of
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.data.corpora.splits import Excluded, Splits
from sbkit.text.labels import ensure_labels
from sbkit.text.vocabulary import Vocabulary
from tests.runs import ROOT
from tests.stores import Utterance, make_store

TEXT = "the quick brown fox jumps over a lazy dog"
TONE = (3000 * np.sin(np.arange(24_000) / 5)).astype("<i2")


def splits_of(**rows: list[Utterance]) -> Splits:
    stores = {split: make_store([*map(filled, utterances)]) for split, utterances in rows.items()}
    return Splits(stores["train"], {"dev": stores["dev"]}, {"test": stores["test"]})


def filled(utterance: Utterance) -> Utterance:
    """Repeat the audio until it has as many samples as are declared."""
    audio = np.resize(np.frombuffer(utterance.audio, "<i2"), utterance.samples)
    return replace(utterance, audio=audio.tobytes())


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


def test_sentences_in_two_splits_are_counted_and_nothing_is_written(folder: Path) -> None:
    train_rows, test_rows = said("train", 30), said("test", 3)
    leaked = [replace(each, id=f"dev{n}") for n, each in enumerate(train_rows[:9])]
    both = [*test_rows, replace(train_rows[0], id="test9")]  # in train, and in dev as well
    splits = splits_of(train=train_rows, dev=leaked, test=both)
    with subject_of(splits, folder / "run") as planned:
        said_of = [each.effect for each in check_report(planned)]
    assert said_of[0].startswith("9 of 9 sentences in dev are in train, too: ")
    assert said_of[1:] == [
        f"1 of 4 sentences in test is in {name}, too: {train_rows[0].text}"
        for name in ("train", "dev")
    ]
    assert not (folder / "run").exists()


def test_what_is_left_out_is_counted_with_its_reason(folder: Path) -> None:
    splits = splits_of(train=said("train", 5), dev=said("dev", 2), test=said("test", 2))
    lost = [Excluded("train", f"bad{n}", "unreadable audio", "it is empty") for n in range(2)]
    outside = [Excluded("train", f"long{n}", "longer than 9 s", "12.00 s") for n in range(8)]
    splits = replace(splits, excluded=lost, out_of_range=outside)
    with subject_of(splits, folder / "run") as planned:
        unusable, long = check_report(planned)
    assert unusable.effect.startswith("2 are left out (unreadable audio): bad0 (it is empty), bad1")
    assert long.effect.startswith("8 are left out (longer than 9 s): long0 (12.00 s), ")
    assert long.where == planned.place("max_seconds")


class OwnLabels:
    """Labels of text that are none of sbkit's tokenizers; all of them are too large."""

    vocabulary = Vocabulary(size=5, blank=0, unk=1, bos=2, eos=3)

    def encode(self, text: str) -> list[int]:
        return [9] * len(text)


def test_labels_of_text_are_checked_whatever_makes_them(folder: Path) -> None:
    rows = {split: said(split, 2) for split in ("train", "dev", "test")}
    with subject_of(splits_of(**rows), folder / "run") as planned:
        planned.made["labels"] = OwnLabels()
        (finding,) = check_labels(planned)
    assert finding.effect.startswith(
        "2 of 2 in train, 2 of 2 in dev, 2 of 2 in test do not: train0"
    )
    assert len(finding.ids) == 6


def test_labels_of_no_text_have_no_check_of_transcripts(folder: Path) -> None:
    rows = {split: said(split, 2) for split in ("train", "dev", "test")}
    with subject_of(splits_of(**rows), folder / "run") as planned:
        names = ensure_labels(folder / "labels.txt", ["en", "fr"])
        planned.made["labels"] = names  # though there is text, and `encode`
        assert list(check_labels(planned)) == []
        with pytest.raises(MissingPartError, match="transcripts"):
            transcripts_of(planned)


def test_a_clean_check_writes_nothing(folder: Path) -> None:
    rows = {split: said(split, 5) for split in ("train", "dev", "test")}
    with subject_of(splits_of(**rows), folder / "run") as planned:
        assert list(check_silence(planned)) == []
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("speakers", "found"),
    [
        (("ann", "ann", "ann"), 0),  # no split could part a single speaker
        (("ann", "bob", "bob"), 1),
        (("ann", "bob", ""), 0),
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
    with subject_of(splits_of(**rows), folder / "run") as planned:
        findings = list(check_report(planned))
    assert len(findings) == found
    assert all("speaker" in finding.effect and not finding.stops for finding in findings)


def test_the_default_corpus_has_nothing_to_tell(asterisk_english: Path, tmp_path: Path) -> None:
    knobs = {"output_folder": str(tmp_path / "run"), "data_folder": str(asterisk_english)}
    checks = (check_labels, check_alignment, check_report, check_silence)
    with PlannedRun(ROOT / "hparams/ctc.yaml", knobs, recipe=ASR) as planned:
        assert check_planned_run(planned, checks) == []
