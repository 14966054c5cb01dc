"""Advice in the log of a run that does not learn, with small models on real speech."""

import random
import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import soundfile

from sbkit.audio.augment import SpecAugment
from sbkit.check.check import check_planned_run
from sbkit.check.data import check_alignment
from sbkit.check.learn import _find_mask_causes, check_causes, masked_share
from sbkit.text.tokenizer import ensure_tokenizer
from tests.check.harness import planned_run
from tests.runs import Workplace, make_workplace, records_of, rows_of, stopped_after, write_tsv

COUNTS = {"train": 1, "dev": 4, "test": 2}
NUM_CLIPS, MAX_SECONDS = 100, 5.0
OPTIONS = ("--ctc_weight=1.0", "--num_decoder_layers=0", "--log_every=5", "--check=False")
# More than `EARLY_STEPS` after the third epoch.
OPTIONS += ("--number_of_epochs=3", "--inter_ctc_weight=0", "--speeds=[1.0]", "--concat_prob=0")
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


def advice_of(run: Path) -> list[str]:
    return re.findall(r"advice: .*", (run / "train.log").read_text("utf-8"))


@pytest.mark.parametrize(
    ("options", "edit", "words"),
    [
        (["--lr=1e-6"], None, "(1) The peak learning rate of 1e-06 is about 1,000 times too low."),
        (["--lr=1.0"], None, "of 1 is about 1,000 times too high. Try `lr: 0.001`."),
        # Half the clips are left out, since their new transcripts are too long for them.
        (["--batch_seconds=16"], shuffle, "(1) The transcripts do not seem to belong to their"),
        ([], with_many_tokens, "(1) The vocabulary of 300 tokens is large for"),
        (MASKS, None, "(1) The masks of training hide 9"),
    ],
    ids=["rate 1e-6", "rate 1", "shuffled", "vocabulary", "masks"],
)
@pytest.mark.slow(30)
def test_failing_run_is_advised_once_of_its_cause(
    options: list[str],
    edit: Callable[[Workplace, Path], Workplace] | None,
    words: str,
    speech: Workplace,
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    workplace = edit(speech, tmp_path) if edit else speech
    assert workplace.train_here(run, *OPTIONS, *options) == 0
    (advice,) = advice_of(run)
    assert words in advice


@pytest.mark.slow(10)
def test_resumed_run_is_not_advised_again_and_healthy_run_never(
    speech: Workplace, tmp_path: Path
) -> None:
    failing = (*OPTIONS, "--lr=1e-6", "--number_of_epochs=5")
    with stopped_after(170):
        assert speech.train_here(tmp_path / "failing", *failing) == 75
    assert len(advice_of(tmp_path / "failing")) == 1
    assert speech.train_here(tmp_path / "failing", *failing) == 0
    assert len(advice_of(tmp_path / "failing")) == 1
    assert speech.train_here(tmp_path / "healthy", *OPTIONS, "--log_every=500") == 0
    assert not advice_of(tmp_path / "healthy")
    (*_, last) = records_of(tmp_path / "healthy", "epoch")
    assert 0 <= last["blank_frames"] <= 1
    assert last["tokens_written"] >= 0
    (first, *_) = records_of(tmp_path / "failing", "epoch")
    assert first["tokens_written"] > 0.05


def test_share_of_masks_counts_all_of_them() -> None:
    assert masked_share({"mask_time_prob": 0.65, "mask_channel_prob": 0.5}) == pytest.approx(
        0.683, abs=0.001
    )
    masks = SpecAugment(time_masks=0, freq_masks=1, freq_width=80)
    assert masked_share({"spec_augment": masks, "n_mels": 80}) == pytest.approx(0.5, abs=0.1)
    assert masked_share({"spec_augment": masks}) == pytest.approx(0.5, abs=0.1)
    assert masked_share({"spec_augment": None}) == 0


@pytest.mark.parametrize("key", ["mask_time_prob", "mask_channel_prob"])
def test_yaml_with_one_kind_of_mask_is_advised_on_that_kind(key: str) -> None:
    assert masked_share({key: 0.65}) == pytest.approx(0.478, abs=0.001)
    (cause,) = _find_mask_causes({key: 0.65, "mask_feature_prob": None})
    assert (cause.key, cause.fix) == (key, f"Try `{key}: 0`.")


@pytest.mark.parametrize(("rate", "is_cause"), [(1e-6, True), (1.0, False)])
def test_warm_up_is_no_cause_if_the_rate_is_too_high(
    rate: float, is_cause: bool, speech: Workplace, tmp_path: Path
) -> None:
    with planned_run(speech, tmp_path / "run", f"--lr={rate}") as planned:
        brain = planned.make_cpu_brain()
        planned.make_optimizers()
        first, *others = brain.likely_causes()
    assert first.key == "lr"
    assert ("warmup_fraction" in [cause.key for cause in others]) == is_cause


@pytest.mark.slow(10)
def test_check_names_shuffled_transcripts_once(speech: Workplace, tmp_path: Path) -> None:
    with planned_run(shuffle(speech, tmp_path), tmp_path / "run") as planned:
        (finding,) = check_planned_run(planned, (check_alignment, check_causes))
        (cause,) = check_planned_run(planned, (check_causes,))
    assert finding.stops
    assert "CTC cannot align" in finding.problem
    assert "do not seem to belong to their clips" in cause.problem
