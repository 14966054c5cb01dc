"""After a real run: it goes on from what it left, and refuses another declaration."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.asr.recipe import ASR
from sbkit.base.errors import BAD_INPUT
from sbkit.check.check import check_planned_run
from sbkit.check.existing_run import check_run_folder
from sbkit.check.finding import Finding
from sbkit.check.planned_run import PlannedRun
from sbkit.config.hparams import parse_command
from tests.check.harness import healthy_workplace
from tests.runs import ROOT, Workplace, one_thread

pytestmark = pytest.mark.slow

HOLDER = """
import sys, time
from pathlib import Path
from sbkit.checkpoint.folder import hold
hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(300)
"""
OPTIONS = ("--number_of_epochs=2", "--average_checkpoints=2")


@pytest.fixture(scope="module")
def workplace(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return healthy_workplace(asterisk_english, tmp_path_factory.mktemp("workplace"))


@pytest.fixture(scope="module")
def trained(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    assert workplace.train_here(run, *OPTIONS) == 0
    return run


def check(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, run: Path, *options: str
) -> list[Finding]:
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    command = parse_command(workplace.arguments(run, *OPTIONS, *options))
    with one_thread(), PlannedRun(*command, recipe=ASR) as planned:
        return check_planned_run(planned, [check_run_folder])


def test_a_run_that_goes_on_as_it_began_is_healthy(
    workplace: Workplace, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {file: file.stat().st_mtime_ns for file in trained.rglob("*")}
    assert check(workplace, monkeypatch, trained, "--number_of_epochs=3") == []
    assert {file: file.stat().st_mtime_ns for file in trained.rglob("*")} == before


def test_a_replaced_tokenizer_is_found(
    workplace: Workplace, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    model = (run / "tokenizer.model").read_bytes()
    swap = bytearray(model)
    first, second = model.index(b"\n\x01e") + 2, model.index(b"\n\x01t") + 2
    swap[first], swap[second] = swap[second], swap[first]  # the same letters under other ids
    (run / "tokenizer.model").write_bytes(swap)
    [finding] = check(workplace, monkeypatch, run)
    assert "the file of labels: " in finding.effect
    assert finding.stops
    before = {file: file.read_bytes() for file in run.glob("lm.*")}
    models = ("--check=False", "--word_lm_order=2", "--token_lm_order=2")
    assert workplace.train_here(run, *OPTIONS, *models) == BAD_INPUT
    assert {file: file.read_bytes() for file in run.glob("lm.*")} == before


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--d_model=48", "d_model: 32 before, 48 now"),
        ("--language=de", "language: en before, de now"),
        ("--batch_seconds=7", "batch_seconds: 6.0 before, 7.0 now"),
        ("--freeze=[CNN]", 'freeze: [] before, ["CNN"] now'),
    ],
)
def test_another_declaration_is_refused(
    workplace: Workplace, trained: Path, monkeypatch: pytest.MonkeyPatch, option: str, said: str
) -> None:
    findings = check(workplace, monkeypatch, trained, option)
    assert said in findings[0].effect
    assert findings[0].stops


def test_another_corpus_is_refused_and_nothing_is_written(
    workplace: Workplace, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finished run keeps its results, also from a run without a check."""
    release = Path(shutil.copytree(workplace.release, tmp_path / "release"))
    other = Workplace(release, workplace.cache)
    before = {file: file.read_bytes() for file in trained.rglob("*") if file.is_file()}
    assert other.train_here(trained, *OPTIONS, "--check=False") == 0  # the same corpus has moved
    assert "stay as they are" in capsys.readouterr().out
    kept = ("summary.json", "wer_test.txt")
    assert [(trained / name).read_bytes() for name in kept] == [
        before[trained / name] for name in kept
    ]

    before = {file: file.read_bytes() for file in trained.rglob("*") if file.is_file()}
    train_tsv = release / "train.tsv"
    train_tsv.write_text("\n".join(train_tsv.read_text().splitlines()[:-2]) + "\n")
    for check_first in ("True", "False"):
        code = other.train_here(trained, *OPTIONS, f"--check={check_first}")
        assert code == BAD_INPUT
        error = capsys.readouterr().err
        assert "the data of `train`: " in error
        assert "when it began" in error
        after = {file: file.read_bytes() for file in trained.rglob("*") if file.is_file()}
        assert after == before


def test_a_refused_second_run_writes_nothing(
    workplace: Workplace, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert workplace.train_here(run, *OPTIONS, "--max_seconds=3") == BAD_INPUT
        holder.kill()
    assert "One run at a time" in capsys.readouterr().err
    assert {file: file.stat().st_mtime_ns for file in run.rglob("*")} == before
