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
from sbkit.check.data import (
    check_alignment,
    check_labels,
    check_report,
    check_silence,
    transcripts_of,
)
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.data.manifest import Excluded
from sbkit.data.splits import Splits
from sbkit.text.normalization import normalize
from sbkit.text.vocabulary import ensure_labels
from tests.runs import ROOT
from tests.stores import Utterance, make_store

NOBODY = ("", "", "")
TONE = (3000 * np.sin(np.arange(64_000) / 5)).astype("<i2")


def splits_of(*speakers: str) -> Splits:
    """Make splits of three different sentences of the same letters, each split of a speaker."""
    train, dev, test = (
        make_store(
            Utterance(f"{split}{n}", text, text, speaker, len(TONE), (TONE // divisor).tobytes())
            for n in range(3)
            for text in [f"the quick brown fox {split} x{'o' * n}"]
        )
        for divisor, (split, speaker) in enumerate(
            zip(("train", "dev", "test"), speakers, strict=True), start=1
        )
    )
    return Splits(train, {"dev": dev}, {"test": test})


def subject_of(splits: Splits, run: Path) -> PlannedRun:
    recipe = replace(ASR, prepare_splits=lambda knobs: splits)
    knobs = {"output_folder": str(run), "d_model": 16, "d_ffn": 16, "nhead": 2}
    return PlannedRun(ROOT / "hparams/ctc.yaml", knobs, recipe=recipe)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with patch.dict(os.environ, {"SBKIT_CACHE": str(tmp_path / "cache")}):
        yield tmp_path


@pytest.mark.parametrize(("rows", "advice"), [(60, "need nothing done"), (3, "Correct these")])
def test_a_rare_foreign_character_is_no_fault_of_a_corpus(
    rows: int, advice: str, folder: Path
) -> None:
    texts = ["the fox café", *["the quick fox"] * (rows - 1)]
    test = make_store(
        Utterance(f"test{n}", text, text, "", len(TONE), TONE.tobytes())
        for n, text in enumerate(texts)
    )
    splits = replace(splits_of(*NOBODY), valid={}, test={"test": test})
    with subject_of(splits, folder / "run") as planned:
        (finding,) = check_labels(planned)
    assert f"1 of {rows} in test" in finding.effect
    assert advice in finding.fix
    assert not finding.stops


def test_what_is_left_out_is_counted_with_its_reason(folder: Path) -> None:
    lost = [Excluded(f"bad{n}", "unreadable audio", "it is empty", "train") for n in range(2)]
    outside = [Excluded(f"long{n}", "longer than 9 s", "12.00 s", "train") for n in range(8)]
    splits = replace(splits_of(*NOBODY), excluded=lost, out_of_range=outside)
    with subject_of(splits, folder / "run") as planned:
        unusable, long = check_report(planned)
    assert unusable.effect.startswith(
        "2 rows are left out (unreadable audio): bad0 (it is empty), bad1"
    )
    assert long.effect.startswith("8 rows are left out (longer than 9 s): long0 (12.00 s), ")
    assert long.where == planned.place("max_seconds")


@pytest.mark.parametrize(
    ("sentence", "language", "replaced", "advice"),
    [
        ("In beiden Händen in Kopfho\u0308he, Straße", "en", "ä", "tables have these letters: de."),
        ("¿Cuántos niños están aquí?", "en", "á", "Pass --language=es"),
        ("Très bien, vous êtes déjà là, ça va?", "en", "ê", "Pass --language=fr"),
        ("In beiden Händen in Kopfhöhe, Straße", "de", "", ""),
        ("Ёлка и ещё решётка", "ru", "ё", "need nothing done"),
        (
            "The naïve fox has a café " + "by the old river in the wide valley " * 99,
            "en",
            "é",
            "Loan words",
        ),
    ],
)
def test_letters_of_another_language_are_an_error_that_names_it(
    sentence: str, language: str, replaced: str, advice: str, folder: Path
) -> None:
    text = normalize(sentence, language)
    rows = (Utterance(f"a{n}", text, sentence, "", len(TONE), TONE.tobytes()) for n in range(30))
    splits = replace(splits_of(*NOBODY), train=make_store(rows), valid={}, test={})
    with subject_of(splits, folder / "run") as planned:
        found = [finding for finding in check_report(planned) if "text table" in finding.declared]
    assert [replaced in finding.effect and advice in finding.fix for finding in found] == (
        [True] if replaced else []
    )
    assert all(finding.stops == ("--language" in finding.fix) for finding in found)


def test_labels_of_no_text_have_no_check_of_transcripts(folder: Path) -> None:
    with subject_of(splits_of(*NOBODY), folder / "run") as planned:
        names = ensure_labels(folder / "labels.txt", ["en", "fr"])
        planned.results["labels"] = names  # though there is text, and `encode`
        assert list(check_labels(planned)) == []
        with pytest.raises(MissingPartError, match="transcripts"):
            transcripts_of(planned)


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
    with subject_of(splits_of(*speakers), folder / "run") as planned:
        findings = list(check_report(planned))
    assert len(findings) == found
    assert all("speaker" in finding.effect and not finding.stops for finding in findings)


def test_the_default_corpus_has_nothing_to_tell(asterisk_english: Path, tmp_path: Path) -> None:
    knobs = {"output_folder": str(tmp_path / "run"), "data_folder": str(asterisk_english)}
    checks = (check_labels, check_alignment, check_report, check_silence)
    with PlannedRun(ROOT / "hparams/ctc.yaml", knobs, recipe=ASR) as planned:
        assert check_planned_run(planned, checks) == []
