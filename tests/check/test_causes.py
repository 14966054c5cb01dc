"""`sbkit check` names a rate, batches or a vocabulary that keep a recognizer from learning."""

from itertools import product
from math import inf
from pathlib import Path
from unittest.mock import patch

import pytest

from recipes.asr import checks
from recipes.asr.checks import check_causes
from sbkit.check.check import check_run
from sbkit.check.settings import check_batches
from sbkit.text.tokenizer import ensure_tokenizer
from tests.check.harness import declared_run
from tests.runs import Workplace, rows_of


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("--lr=1e-6", "The peak learning rate of 1e-06 is about 1,000 times too low"),
        ("--lr=1.0", "The peak learning rate of 1 is about 1,000 times too high"),
        ("--lr=0.001", None),
    ],
)
def test_rate_is_noted(
    option: str, problem: str | None, workplace: Workplace, tmp_path: Path
) -> None:
    with declared_run(workplace, tmp_path / "run", option) as declared:
        findings = check_run(declared, checks=(check_causes,)).findings
        assert [finding.problem for finding in findings] == ([problem] if problem else [])
        assert all(f.where == declared.place("lr") and not f.stops for f in findings)


def test_epoch_of_few_steps_is_noted_with_its_seconds(workplace: Workplace, tmp_path: Path) -> None:
    with declared_run(workplace, tmp_path / "run", "--batch_seconds=60") as declared:
        (finding,) = check_run(declared, checks=(check_batches,)).findings
        assert finding.where == declared.place("batch_seconds") and not finding.stops
    assert "with batches of 60 s, its 26 s of train make" in finding.problem


def test_vocabulary_is_noted(workplace: Workplace, tmp_path: Path) -> None:
    """Its tokenizer is that of another corpus."""
    texts = ["".join(letters) for letters in product("abcdefgh", "ijklmnop", "qrstuvwx")]
    texts += [row["sentence"].lower() for row in rows_of(workplace.release / "train.tsv")]
    file = tmp_path / "run/tokenizer.model"
    ensure_tokenizer(model_file=file, token_type="bpe", vocab_size=300, texts=lambda: texts)
    with declared_run(workplace, tmp_path / "run") as declared:
        (finding,) = check_run(declared, checks=(check_causes,)).findings
        assert finding.where == declared.place("token_type")
        with patch.object(checks, "MIN_TOKEN_USES", 0):
            assert not check_run(declared, checks=(check_causes,)).findings
    with (
        patch.object(checks, "MIN_TOKEN_USES", inf),
        declared_run(workplace, tmp_path / "characters") as declared,
    ):
        assert not check_run(declared, checks=(check_causes,)).findings
    assert "The vocabulary of 300 tokens is large for" in finding.problem and not finding.stops
