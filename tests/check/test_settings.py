"""Ranges, keys that nothing reads, the machine that is meant, and the run folder."""

import shutil
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from sbkit.base.errors import BAD_INPUT, SbkitError
from sbkit.check.check import check_run
from sbkit.check.checked_run import Finding
from sbkit.check.settings import check_run_folder, names_in_code
from sbkit.distributed.device import device_counter_for, resolve
from tests.check.harness import declared_run
from tests.checkpoint.saves import training
from tests.runs import ROOT, TINY, TINY_VOICE, Workplace, contents_of, times_of

OPTIONS = ("--number_of_epochs=2", "--average_checkpoints=2")
BRAIN = """
import own_helpers
from sbkit.train.brain import Brain

KEYS = ("listed",)

class OwnBrain(Brain):
    def on_stage_end(self, stage, stage_loss, epoch=None):
        print(own_helpers.describe(self.hparams), [getattr(self.hparams, key) for key in KEYS])
"""


def test_names_in_code_are_those_of_the_folder_of_a_brain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_brain.py").write_text(BRAIN)
    (tmp_path / "own_helpers.py").write_text("def describe(hparams):\n    return hparams.helped\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = names_in_code(import_module("own_brain").OwnBrain)
    assert names >= {"listed", "helped"}
    assert "num_epochs" not in names  # of sbkit.Brain's own code
    repl = ModuleType("repl")
    monkeypatch.setitem(sys.modules, "repl", repl)
    assert names_in_code(type("Typed", (), {"__module__": "repl"})) is None
    assert names_in_code(type("Unimported", (), {"__module__": "never_imported"})) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("yaml", "options"),
    [
        ("codec", ("--d_model=16", "--d_ffn=32")),
        ("ctc", TINY),
        ("ctc_large", (*TINY, "--vocab_size=50", "--num_workers=0", "--precision=fp32")),
        ("ctc_speechbrain", ()),
        ("ctc_streaming", TINY),
        ("tts", TINY_VOICE),
        ("vad", ()),
    ],
)
def test_every_yaml_passes_the_check_but_for_a_key_that_nothing_reads(
    yaml: str, options: tuple[str, ...], workplace: Workplace, tmp_path: Path
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"base: {ROOT / 'hparams' / yaml}.yaml\nforgotten_setting: 3\n")
    options = ("--device=cpu", "--batch_seconds=6", *options)
    with declared_run(
        workplace, tmp_path / "run", *options, recipe=None, yaml=file, tiny=()
    ) as declared:
        findings = check_run(declared).findings
        # The convolutions of SpeechBrain see padding, as ctc_speechbrain.yaml says itself.
        (finding,) = (finding for finding in findings if finding.check != "padding")
        assert finding.where == f"{file}:2"


def test_target_counts_as_the_machine() -> None:
    for target, device, placed in (
        ("cuda:8", None, "cuda:0"),
        ("cuda:8", "cuda:7", "cuda:7"),
        ("cpu", None, "cpu"),
    ):
        assert str(resolve(device, "fp32", count=device_counter_for(target)).device) == placed
    with pytest.raises(SbkitError, match="but the target has"):
        resolve("mps", "fp32", count=device_counter_for("cuda:8"))
    for target in ("cuda:0", "gpu"):
        with pytest.raises(SbkitError, match="`--target` "):
            device_counter_for(target)


@pytest.fixture(scope="module")
def trained(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    assert workplace.train_here(run, *OPTIONS) == 0
    return run


def check_resumed(workplace: Workplace, run: Path, *options: str) -> list[Finding]:
    with declared_run(workplace, run, *OPTIONS, *options) as declared:
        return check_run(declared, checks=[check_run_folder]).findings


@pytest.mark.slow
def test_run_resumed_with_more_epochs_is_healthy_and_untouched(
    workplace: Workplace, trained: Path
) -> None:
    before = times_of(trained)
    assert check_resumed(workplace, trained, "--number_of_epochs=3") == []
    assert times_of(trained) == before


@pytest.mark.slow
def test_replaced_tokenizer_is_found(workplace: Workplace, trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    model = (run / "tokenizer.model").read_bytes()
    swapped = bytearray(model)
    first, second = model.index(b"\n\x01e") + 2, model.index(b"\n\x01t") + 2
    swapped[first], swapped[second] = model[second], model[first]  # the letters under other ids
    (run / "tokenizer.model").write_bytes(swapped)
    (finding,) = check_resumed(workplace, run)
    assert "the file of labels: " in finding.problem
    assert finding.stops
    before = contents_of(run, "lm.*")
    models = ("--word_lm_order=2", "--token_lm_order=2")
    assert workplace.train_here(run, *OPTIONS, *models) == BAD_INPUT
    assert contents_of(run, "lm.*") == before


@pytest.mark.slow
def test_finished_run_refuses_another_corpus_and_keeps_its_results(
    workplace: Workplace, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release = Path(shutil.copytree(workplace.release, tmp_path / "release"))
    other = Workplace(release, workplace.cache)
    before = contents_of(trained)
    assert other.train_here(trained, *OPTIONS) == 0  # the same corpus has moved
    assert "stay as they are" in capsys.readouterr().out
    after = contents_of(trained)
    for name in ("summary.json", "wer_test.txt", "train_log.jsonl"):
        assert after[name] == before[name]

    lines = (release / "train.tsv").read_text().splitlines()
    (release / "train.tsv").write_text("\n".join(lines[:-2]) + "\n")
    for check_first in ("True", "False"):
        assert other.train_here(trained, *OPTIONS, f"--check={check_first}") == BAD_INPUT
        error = capsys.readouterr().err
        assert "the data of `train`: " in error
        assert contents_of(trained) == after


@pytest.mark.slow
def test_second_run_in_a_held_folder_is_refused_and_writes_nothing(
    workplace: Workplace, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    before = times_of(run)
    with training(run):
        assert workplace.train_here(run, *OPTIONS, "--max_seconds=3") == BAD_INPUT
    assert "Only one run at a time" in capsys.readouterr().err
    assert times_of(run) == before
