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
from sbkit.check.data.speech import SAMPLED, check_speech, measure_levels, sampled_rows
from sbkit.check.data.utterances import transcripts_of
from sbkit.check.finding import Finding, write_listings
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
        said_of = [each.effect for each in check_speech(planned)]
    assert said_of[0].startswith("9 of 9 sentences in dev are in train, too: ")
    assert said_of[1:] == [
        f"1 of 4 sentences in test is in {name}, too: {train_rows[0].text}"
        for name in ("train", "dev")
    ]
    assert not (folder / "run").exists()


def test_a_run_that_starts_lists_what_a_sentence_does_not_name(folder: Path) -> None:
    items = tuple(Excluded("train", f"clip{n}", "too fast", "") for n in range(6))
    words = {"check": "data", "declared": "a", "effect": "b", "where": "c", "fix": "d"}
    few, many = (Finding(**words, utterances=items[:n]) for n in (5, 6))
    assert list(write_listings([few, many], None)) == [None, None]
    listed = list(write_listings([few, many], folder))
    assert listed == [None, folder / "check" / "too_fast.tsv"]
    head, *rows = (folder / "check" / "too_fast.tsv").read_text().splitlines()
    assert head.split("\t")[:3] == ["split", "id", "reason"]
    assert rows == [f"train\tclip{n}\ttoo fast\t" for n in range(6)]


def texts(*values: str, ids: str = "clip") -> list[Utterance]:
    """Say each text in a clip of its own."""
    return [
        Utterance(f"{ids}{n}", text, text, "", 24_000 + n, (TONE + n).tobytes())
        for n, text in enumerate(values)
    ]


def found_in(folder: Path, train_rows: list[Utterance]) -> list[Finding]:
    splits = splits_of(train=train_rows, dev=said("dev", 2), test=said("test", 2))
    with subject_of(splits, folder / "run") as planned:
        return list(check_speech(planned))


def test_letters_of_another_script_are_found(folder: Path) -> None:
    sentences = [TEXT, "привет", f"{TEXT} 你好", f"{TEXT} again"]
    (finding,) = found_in(folder, texts(*sentences))
    assert "the script of train, LATIN" in finding.declared
    assert "2 of 4 in train hold letters of another" in finding.effect
    assert "clip1 (привет), clip2 (你好)" in finding.effect
    assert "'п' x 1" in finding.effect


def test_copied_clips_are_found(folder: Path) -> None:
    rows = texts(TEXT, f"{TEXT} b", f"{TEXT} c")
    copy = replace(rows[0], id="copy")
    other = replace(rows[1], id="other", audio=TONE[::-1].tobytes())  # the same text and length
    (copied,) = found_in(folder, [*rows, copy, other])
    assert "1 of 5 in train is equal" in copied.effect
    assert copied.ids == ("copy",)
    assert "of clip0" in copied.effect


def test_transcripts_of_other_clips_are_found(folder: Path) -> None:
    rng = np.random.default_rng(1)
    sentences = [f"{TEXT} {'ab ' * n}".strip() for n in rng.permutation(60)]
    clips = [
        Utterance(f"clip{n}", text, text, "", 16_000 + 1600 * len(text), (TONE + n).tobytes())
        for n, text in enumerate(sentences)
    ]
    assert not any("longer transcripts" in each.declared for each in found_in(folder, clips))
    lengths = [clips[n - 7].samples for n in range(60)]
    moved = [replace(clip, samples=count) for clip, count in zip(clips, lengths, strict=True)]
    findings = found_in(folder / "moved", moved)
    assert any("longer transcripts" in each.declared for each in findings)
    assert any("rows may be shifted" in each.fix for each in findings)


def test_what_is_left_out_is_counted_among_all_rows_with_its_reason(folder: Path) -> None:
    splits = splits_of(train=said("train", 5), dev=said("dev", 2), test=said("test", 2))
    lost = [Excluded("train", f"bad{n}", "unreadable audio", "it is empty") for n in range(2)]
    outside = [Excluded("train", f"long{n}", "longer than 9 s", "12.00 s") for n in range(8)]
    splits = replace(splits, excluded=lost, out_of_range=outside)
    with subject_of(splits, folder / "run") as planned:
        unusable, long = check_speech(planned)
    assert "2 of 15 rows in train cannot be used" in unusable.effect
    assert "bad0 (it is empty)" in unusable.effect
    assert "8 of 15 rows in train are not, and are left out" in long.effect


def test_clips_that_are_longer_than_their_rows_say_are_found(folder: Path) -> None:
    seconds = {"train": ["4.0", "1.5", "", "4000"], "dev": ["?"], "test": ["5.1"]}  # of 4
    splits = {
        name: make_store(map(filled, said(name, len(each)))).add_column("duration", each)
        for name, each in seconds.items()
    }
    wanted = Splits(splits["train"], {"dev": splits["dev"]}, {"test": splits["test"]})
    with subject_of(wanted, folder / "run") as planned:
        (finding,) = check_speech(planned)
    assert "1 of 4 in train is longer, and read whole: train1 (4.00 s for 1.5)" in finding.effect


class OwnLabels:
    """Labels of text that are none of sbkit's tokenizers; all of them are too large."""

    vocabulary = Vocabulary(size=5, blank=0, unk=1, bos=2, eos=3)

    def encode(self, text: str) -> list[int]:
        return [9] * len(text)


def test_labels_of_text_are_checked_whatever_makes_them(folder: Path) -> None:
    rows = {split: said(split, 2) for split in ("train", "dev", "test")}
    with subject_of(splits_of(**rows), folder / "run") as planned:
        planned.parts["labels"] = OwnLabels()
        (finding,) = check_labels(planned)
    assert finding.effect.startswith("2 of 2 in train, 2 of 2 in dev and 2 of 2 in test hold")
    assert "train0 (9)" in finding.effect


def test_labels_of_no_text_have_no_check_of_transcripts(folder: Path) -> None:
    rows = {split: said(split, 2) for split in ("train", "dev", "test")}
    with subject_of(splits_of(**rows), folder / "run") as planned:
        names = ensure_labels(folder / "labels.txt", ["en", "fr"])
        planned.parts["labels"] = names  # though there is text, and `encode`
        assert list(check_labels(planned)) == []
        with pytest.raises(MissingPartError, match="transcripts"):
            transcripts_of(planned)


def test_a_clean_check_writes_nothing(folder: Path) -> None:
    rows = {split: said(split, 5) for split in ("train", "dev", "test")}
    with subject_of(splits_of(**rows), folder / "run") as planned:
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
    with subject_of(splits_of(**rows), folder / "run") as planned:
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
    loudest, share = measure_levels(samples)
    assert loudest == pytest.approx(peak, abs=1)
    assert share == at_top


def test_the_default_corpus_has_nothing_to_tell(asterisk_english: Path, tmp_path: Path) -> None:
    knobs = {"output_folder": str(tmp_path / "run"), "data_folder": str(asterisk_english)}
    checks = (check_labels, check_alignment, check_speech)
    with PlannedRun(ROOT / "hparams/ctc.yaml", knobs, recipe=ASR) as planned:
        assert check_planned_run(planned, checks) == []


def test_a_yaml_of_speechbrains_names_no_data_to_check(tmp_path: Path) -> None:
    (tmp_path / "crdnn.yaml").write_text("seed: 1986\nsave_folder: save\nshape: !tuple (3, 3)\n")
    with PlannedRun(tmp_path / "crdnn.yaml", {}) as planned:
        assert check_planned_run(planned, [check_speech]) == []
