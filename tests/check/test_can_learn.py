"""`sbkit check` names what keeps a recognizer from learning; `--learn` tries it on eight clips."""

import json
import os
import random
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import soundfile

from sbkit.audio.augment import SpecAugment
from sbkit.base.errors import ConfigError
from sbkit.check import can_learn
from sbkit.check.can_learn import check_causes, check_learning, masked_share
from sbkit.check.check import check_run
from sbkit.check.data import check_alignment
from sbkit.commands.cli import run as sbkit
from sbkit.text.tokenizer import ensure_tokenizer
from tests.check.harness import checked_run, declared_run
from tests.runs import ROOT, TINY_VOICE, Workplace, make_workplace, one_thread, rows_of, write_tsv

LARGER = ("--d_model=96", "--d_ffn=192", "--cnn_channels=96", "--num_decoder_layers=0")
LARGER += ("--ctc_weight=1.0", "--dropout=0.0")
COUNTS = {"train": 1, "dev": 4, "test": 2}
NUM_CLIPS, MAX_SECONDS = 100, 5.0
MASKS = ("--time_masks=10", "--time_width=3000", "--max_time_fraction=1.0")


@pytest.fixture(scope="module")
def speech(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Make a release with clips of many lengths, which can be compared with their texts."""
    workplace = make_workplace(asterisk_english, tmp_path_factory.mktemp("speech"), COUNTS)
    pairs = []
    for row in rows_of(asterisk_english / "train.tsv"):
        clip = asterisk_english / "clips" / row["path"]
        if len(pairs) < NUM_CLIPS and soundfile.info(clip).duration < MAX_SECONDS:
            shutil.copy2(clip, workplace.release / "clips")
            pairs.append((clip.name, row["sentence"]))
    write_tsv(workplace.release, "train", pairs)
    return workplace


def shuffle(speech: Workplace, folder: Path) -> Workplace:
    """Copy a release, and give each training clip the transcript of another."""
    shutil.copytree(speech.release, folder / "release")
    rows = rows_of(folder / "release/train.tsv")
    texts = [row["sentence"] for row in rows]
    random.Random(0).shuffle(texts)
    pairs = [(row["path"], text) for row, text in zip(rows, texts, strict=True)]
    write_tsv(folder / "release", "train", pairs)
    return Workplace(folder / "release", speech.cache)


def with_many_tokens(speech: Workplace, folder: Path) -> Workplace:
    """Put the tokenizer of a large vocabulary, as of another corpus, into the run folder."""
    texts = ["".join(letters) for letters in product("abcdefgh", "ijklmnop", "qrstuvwx")]
    sentences = [row["sentence"].lower() for row in rows_of(speech.release / "train.tsv")]
    ensure_tokenizer(
        model_file=folder / "run/tokenizer.model",
        kind="bpe",
        vocab_size=300,
        texts=lambda: [*texts, *sentences],
    )
    return speech


@pytest.mark.parametrize(
    ("options", "edit", "key", "words"),
    [
        (["--lr=1e-6"], None, "lr", "The peak learning rate of 1e-06 is about 1,000 times too low"),
        (["--lr=1.0"], None, "lr", "of 1 is about 1,000 times too high"),
        ([], with_many_tokens, "token_type", "The vocabulary of 300 tokens is large for"),
        (MASKS, None, "spec_augment", "The masks of training hide 9"),
        (["--dropout=0.95"], None, "dropout", "Dropout hides 95% of the model"),
        ([], None, "", ""),
    ],
    ids=["rate 1e-6", "rate 1", "vocabulary", "masks", "dropout", "healthy"],
)
def test_cause_is_noted_at_its_key(
    options: list[str],
    edit: Callable[[Workplace, Path], Workplace] | None,
    key: str,
    words: str,
    speech: Workplace,
    tmp_path: Path,
) -> None:
    workplace = edit(speech, tmp_path) if edit else speech
    with declared_run(workplace, tmp_path / "run", *options) as declared:
        findings = check_run(declared, checks=(check_causes,)).findings
        assert [finding.where for finding in findings] == ([declared.place(key)] if key else [])
    assert all(words in finding.problem and not finding.stops for finding in findings)


@pytest.mark.slow(10)
def test_check_names_shuffled_transcripts_once(speech: Workplace, tmp_path: Path) -> None:
    with declared_run(shuffle(speech, tmp_path), tmp_path / "run") as declared:
        (finding,) = check_run(declared, checks=(check_alignment, check_causes)).findings
        (cause,) = check_run(declared, checks=(check_causes,)).findings
    assert finding.stops
    assert "CTC cannot align" in finding.problem
    assert "do not seem to belong to their clips" in cause.problem


def test_share_of_masks_counts_all_of_them() -> None:
    both = {"mask_time_prob": 0.65, "mask_channel_prob": 0.5}
    assert masked_share(both) == pytest.approx(0.683, abs=0.001)
    masks = SpecAugment(time_masks=0, freq_masks=1, freq_width=80)
    assert masked_share({"spec_augment": masks, "n_mels": 80}) == pytest.approx(0.5, abs=0.1)
    assert masked_share({"spec_augment": masks}) == pytest.approx(0.5, abs=0.1)
    assert masked_share({"spec_augment": None}) == 0
    # A YAML with one of the two
    assert masked_share({"mask_time_prob": 0.65}) == pytest.approx(0.478, abs=0.001)


@pytest.mark.slow
def test_learning_is_tried_and_printed_without_touching_the_run(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = workplace.arguments(tmp_path / "run", *LARGER, "--time_masks=10")
    with patch.dict(os.environ, {"SBKIT_CACHE": str(workplace.cache)}), one_thread():
        assert sbkit(["check", *command, "--learn"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1].startswith("--learn passed: 8 clips without masks or augmentation, ")
        assert sbkit(["check", *command, "--learn", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)["learn"]
    assert record["outcome"] == "passed"
    assert record["values"]["CER"] <= 0.2
    assert record["losses"][-1] < record["losses"][0] / 2
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_clips_that_are_not_learned_are_reported_with_the_evident_cause(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(can_learn, "MAX_STEPS", 20)
    with checked_run(workplace, tmp_path / "run", *LARGER, "--lr=1e-6") as run:
        (finding,) = check_learning(run)
        assert run.measured.learning is not None
        assert run.measured.learning.outcome == "failed"
    assert finding.stops
    assert finding.where == "override of lr"
    assert "about 1,000 times too low. Try `lr: 0.001`." in finding.fix


@pytest.mark.slow
def test_loss_of_another_task_must_fall(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(can_learn, "MAX_STEPS", 25)
    yaml = ROOT / "hparams/tts.yaml"
    with checked_run(workplace, tmp_path / "run", recipe=None, yaml=yaml, tiny=TINY_VOICE) as run:
        assert [*check_learning(run)] == []
        assert run.measured.learning is not None
        assert run.measured.learning.outcome == "passed"


def test_another_machine_cannot_be_tried(workplace: Workplace, tmp_path: Path) -> None:
    command = ["check", *workplace.arguments(tmp_path / "run"), "--learn", "--target=cuda:2"]
    with pytest.raises(ConfigError, match="`--learn` trains on this machine, but --target names"):
        sbkit(command)
