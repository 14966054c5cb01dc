"""`sbkit check` names what keeps a recognizer from learning."""

import random
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import soundfile

from sbkit.audio.augment import SpecAugment
from sbkit.check.causes import check_causes, masked_share
from sbkit.check.check import check_run
from sbkit.check.data import check_alignment
from sbkit.text.tokenizer import ensure_tokenizer
from tests.check.harness import declared_run
from tests.runs import Workplace, make_workplace, rows_of, write_tsv

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
