"""A batch that is not finite is skipped, named, and can be looked at again."""

import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sbkit.audio.augment import SpeedGroup
from sbkit.base.errors import BAD_INPUT, SbkitError
from sbkit.checkpoint.rng import torch_state
from sbkit.cli import run as sbkit
from sbkit.data.batches.batch import Batch, TextBatch
from sbkit.data.batches.sampler import TrainSampler
from sbkit.logs.log import read_log
from sbkit.train.nonfinite import NonFiniteRecorder
from tests import processes
from tests.faulty import noisy_clip, noisy_workplace, write_fragile
from tests.runs import ROOT, Workplace, last_parameters, read_json
from tests.shortage import largest_file

pytestmark = pytest.mark.slow

IMPORT = ("--import", "tests.faulty")  # a part of its own is in the YAML
NO_CHECK = "--check=false"


@pytest.fixture(scope="module")
def workplace(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A release in which one training clip is noise at full scale."""
    return noisy_workplace(asterisk_english, tmp_path_factory.mktemp("nonfinite"))


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A YAML whose front-end cannot stand such noise."""
    return write_fragile(tmp_path_factory.mktemp("yaml"))


@pytest.fixture(scope="module")
def finished(workplace: Workplace, fragile: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished")
    assert workplace.train_here(run, "--number_of_epochs=2", NO_CHECK, yaml=fragile) == 0
    return run


def test_the_step_is_skipped_and_counted_and_training_goes_on(finished: Path) -> None:
    records = read_log(finished / "train_log.jsonl")
    epochs = [record for record in records if record["kind"] == "epoch"]
    assert [record["skipped"] for record in epochs] == [1, 1]
    steps = [record for record in records if record["kind"] == "step"]
    assert sum(record["skipped"] for record in steps) == 2
    assert all(
        np.isfinite(record["loss"]) for record in (*epochs, *(s for s in steps if not s["skipped"]))
    )
    assert all(value.isfinite().all() for value in last_parameters(finished).values())


def test_the_batch_is_written_down_with_its_utterances(
    finished: Path, workplace: Workplace
) -> None:
    files = sorted((finished / "nonfinite").glob("*.json"))
    assert len(files) == 2
    for file in files:
        record = read_json(file)
        (batch,) = record["micro_batches"]
        assert (record["what"], batch["loss_is_finite"]) == ("loss", False)
        heard = [name for each in batch["ids"] for name in each.split("+")]
        assert noisy_clip(workplace).stem in heard
        assert len(batch["ids"]) == len(batch["samples"]) == len(batch["labels"])
        assert record["replay"].endswith(f" && sbkit replay {file}")


def test_a_replay_names_the_utterance_and_the_module(
    finished: Path, workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    file = next((finished / "nonfinite").glob("*.json"))
    assert sbkit(["replay", str(file), *IMPORT]) == 1
    whole, *blamed = capsys.readouterr().out.splitlines()
    assert "the output of model.0.overflow" in whole
    (one,) = blamed
    assert noisy_clip(workplace).stem in one
    assert "alone, not finite: the output of model.0.overflow" in one


def test_a_recipe_whose_loss_is_a_mean_is_replayed_in_the_epoch_that_it_was_in(
    workplace: Workplace, fragile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--recipe=tests.faulty.MEAN", "--number_of_epochs=1", NO_CHECK)
    assert workplace.train_here(tmp_path, *options, yaml=fragile) == 0
    file = next((tmp_path / "nonfinite").glob("*.json"))
    capsys.readouterr()
    assert (sbkit(["replay", str(file), *IMPORT]), read_json(file)["epoch"]) == (1, 1)
    whole, one = capsys.readouterr().out.splitlines()
    assert "then the loss of 1 of 1" in whole
    assert noisy_clip(workplace).stem in one


def test_too_many_of_them_stop_the_run_with_its_checkpoint_intact(
    workplace: Workplace,
    fragile: str,
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--nonfinite_patience=0", NO_CHECK)
    code = workplace.train_here(tmp_path, *options, yaml=fragile)
    assert code == BAD_INPUT
    assert "`nonfinite_patience`" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train_log.jsonl", "nowhere.json"])
def test_what_is_no_record_of_a_batch_is_refused(finished: Path, name: str) -> None:
    with pytest.raises(SbkitError, match=r"must be (readable|one of the \.json files)"):
        sbkit(["replay", str(finished / name), *IMPORT])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda saved: saved["micro_batches"][0].update(plan=[[[10**6], 1, 100, 1]]), "made again"),
        (lambda saved: saved["micro_batches"][0].update(ids=["x"]), "cannot be made again (Value"),
        (lambda saved: saved["modules"].clear(), "must be those of the declared model"),
        (lambda saved: saved.pop("modules"), "cannot be read (KeyError: 'modules')"),
    ],
)
def test_a_part_of_a_record_is_refused(
    spoil: Callable[[Any], Any], said: str, finished: Path
) -> None:
    whole = next((finished / "nonfinite").glob("*.json"))
    file = whole.with_name("spoiled.json")
    shutil.copy(whole, file)
    saved = torch.load(whole.with_suffix(".pt"), weights_only=True)
    spoil(saved)
    torch.save(saved, file.with_suffix(".pt"))
    try:
        with pytest.raises(SbkitError, match=re.escape(said)):
            sbkit(["replay", str(file), *IMPORT])
    finally:
        file.unlink()
        file.with_suffix(".pt").unlink()


def test_the_command_in_a_record_works_from_anywhere(
    workplace: Workplace, fragile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--number_of_epochs=1", NO_CHECK)
    monkeypatch.chdir(ROOT)
    run = Path(os.path.relpath(tmp_path / "run", ROOT))
    assert workplace.train_here(run, *options, yaml=fragile) == 0
    command = read_json(next((tmp_path / "run" / "nonfinite").glob("*.json")))["replay"]
    elsewhere = tmp_path.joinpath(*ROOT.parts[1:])  # deeper than where the run was started
    elsewhere.mkdir(parents=True)
    to, folder, then, program, *words = shlex.split(command)
    assert (to, then, program) == ("cd", "&&", "sbkit")
    done = processes.run(["-m", "sbkit", *words, *IMPORT], cwd=elsewhere / folder)
    assert "alone, not finite: the output of model.0.overflow" in done.stdout, done.stderr


# -- what is kept ----------------------------------------------------------------------------------


def a_batch() -> Batch:
    return TextBatch(
        ids=["clip"],
        columns={},
        texts=["hello"],
        audio=torch.zeros(1, 160, dtype=torch.int16),
        audio_lengths=torch.tensor([160]),
        tokens=torch.ones(1, 2, dtype=torch.int64),
        token_lengths=torch.tensor([2]),
        weights=torch.ones(1),
        speed_groups=(SpeedGroup(100, utterances=1, longest=160),),
        seconds=0.01,
    )


def a_bad_step(watch: NonFiniteRecorder, step: int) -> int:
    """Let a loss be lost; return how many bad steps are seen."""
    watch.begin_epoch(TrainSampler(samples=[160], batch_seconds=1.0, seed=0), epoch=1)
    watch.record(a_batch(), torch_state(torch.device("cpu")), torch.tensor(torch.nan), 1)
    watch.end_step(step, torch.tensor([1.0, 1.0]))
    return watch.flush(overflow_is_usual=False)[1]


def test_only_the_newest_steps_keep_the_model_and_all_their_names(tmp_path: Path) -> None:
    watch = NonFiniteRecorder(tmp_path, nn.Linear(2, 2))
    for step in (900, 1, 2, 10):  # the first is of a run that went on from before it
        assert a_bad_step(watch, step) == 1
    kept = {file.stem for file in (tmp_path / "nonfinite").glob("*.pt")}
    assert kept == {f"step-{step}-rank-0" for step in (1, 2, 10)}
    assert len(list((tmp_path / "nonfinite").glob("*.json"))) == 4
    assert len(list((tmp_path / "nonfinite").iterdir())) == 7


def test_a_full_disk_is_said_and_the_step_is_skipped_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = NonFiniteRecorder(tmp_path, nn.Linear(100, 100))
    with largest_file(2_000):  # room for the record, not for the model
        assert a_bad_step(watch, 1) == 1
    (file,) = (tmp_path / "nonfinite").iterdir()
    assert read_json(file)["replay"] is None
    assert f"{file.with_suffix('.pt')} could not be written" in capsys.readouterr().err

    (tmp_path / "other").touch()
    assert a_bad_step(NonFiniteRecorder(tmp_path / "other", nn.Linear(2, 2)), 1) == 1
    assert "could not be written ([Errno 20]" in capsys.readouterr().err
