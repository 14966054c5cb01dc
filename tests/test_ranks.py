"""Several processes are as exact as one, and none of them is left behind."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from sbkit.base.errors import ASKED_TO_STOP, BAD_INPUT
from sbkit.logs.run_log import read_log
from tests import processes
from tests.faulty import noisy_clip, noisy_workplace, write_fragile
from tests.ranks import ACCUMULATIONS
from tests.runs import ROOT, Workplace, last_parameters, read_json

pytestmark = [pytest.mark.slow, pytest.mark.ddp]

# Plain gradient descent shows a gradient of the wrong scale; AdamW would not. Dropout, which a rank
# draws for itself, is off. Joins, speeds, masks and noise are on.
PLAIN = ("--dropout=0.0", "--log_every=1", "--check=false")
NOISE = "wave_augment: !new:sbkit.audio.augment.AddNoise\n    folder: {folder}\n"
SGD = ("--lr=0.05", "--max_grad_norm=1000.0", "--number_of_epochs=2", "--average_checkpoints=1")
SGD += ("--ema_decay=0.5",)


def start(
    world_size: int, scenario: str, folder: Path, arguments: list[str], workplace: Workplace
) -> subprocess.CompletedProcess[str]:
    """Run a scenario of tests/ranks.py."""
    command = ["-m", "tests.ranks", scenario, folder, *arguments]
    return processes.run(command, ranks=world_size, SBKIT_CACHE=workplace.cache)


def without_folder(arguments: list[str]) -> list[str]:
    return [each for each in arguments if not each.startswith("--output_folder=")]


def test_two_and_three_processes_and_any_accumulation_take_the_steps_of_one(
    workplace: Workplace, tmp_path: Path
) -> None:
    text = (ROOT / "hparams" / "ctc.yaml").read_text(encoding="utf-8")
    sgd = "opt_class: !name:torch.optim.SGD\n    lr: !ref <lr>\n"
    yaml = tmp_path / "sgd.yaml"
    text = re.sub(r"^opt_class: (.+\n)(    .+\n)+", sgd, text, flags=re.M)
    white = np.random.default_rng(0).normal(0, 0.1, 50_000)
    soundfile.write(tmp_path / "noise.wav", white, 16_000)
    noise = NOISE.format(folder=tmp_path)
    yaml.write_text(f"{text}\nfind_unused_parameters: False\n{noise}")
    # Freezing ends within an epoch, and where `signalled` stops and resumes two ranks.
    options = (*PLAIN, *SGD, "--freeze={Transformer: 9}")
    for accumulation in ACCUMULATIONS:
        more = f"--grad_accumulation_factor={accumulation}"
        folder = tmp_path / f"1x{accumulation}"
        assert workplace.train_here(folder, *options, more, yaml=str(yaml)) == 0
    one = tmp_path / "1x1"
    arguments = without_folder(workplace.arguments(one, *options, yaml=str(yaml)))
    for world_size in (2, 3):
        done = start(world_size, "exact", tmp_path, [str(one), *arguments], workplace)
        assert done.returncode == 0, done.stderr
        resumed = 3 * (world_size == 2)
        assert done.stdout.count("train: 16 utterances") == len(ACCUMULATIONS) + 1 + resumed
        assert done.stdout.count("Stopped at step") == bool(resumed)
    whole, resumed = (flat(last_parameters(tmp_path / name)) for name in ("whole", "resumed"))
    assert torch.equal(whole, resumed)

    wanted = flat(last_parameters(one))
    steps = losses(one)
    assert len(steps) >= 10
    for world_size in (1, 2, 3):
        for accumulation in ACCUMULATIONS:
            run = tmp_path / f"{world_size}x{accumulation}"
            difference = (flat(last_parameters(run)) - wanted).norm() / wanted.norm()
            assert difference <= 1e-6, (world_size, accumulation, float(difference))
            assert losses(run) == pytest.approx(steps, rel=1e-5), (world_size, accumulation)

    scores = [
        read_json(tmp_path / name / "summary.json")["test"] for name in ("1x1", "test-2", "test-3")
    ]
    assert scores[0] == scores[1] == scores[2]
    means = [read_json(file) for file in sorted(tmp_path.glob("loss-*.json"))]
    assert len(means) == 5
    assert all(mean == means[0] for mean in means)


def flat(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.double().flatten() for value in parameters.values()])


def losses(run: Path) -> list[float]:
    return [each["loss"] for each in read_log(run / "train_log.jsonl") if each["kind"] == "step"]


def test_a_rank_that_is_asked_to_stop_takes_the_others_along(
    asterisk_english: Path, tmp_path: Path
) -> None:
    """In a run whose noise only one rank hears: they skip that step together, too."""
    noisy = noisy_workplace(asterisk_english, tmp_path)
    run, fragile = tmp_path / "run", write_fragile(tmp_path)
    arguments = noisy.arguments(run, "--check=false", yaml=fragile)
    done = start(2, "signalled", tmp_path, without_folder(arguments), noisy)
    assert done.returncode == 0, done.stderr
    epochs = [each for each in read_log(run / "train_log.jsonl") if each["kind"] == "epoch"]
    assert epochs[0]["skipped"] == 1
    blamed = list((run / "nonfinite").glob("step-?-*.json"))
    assert blamed
    for file in blamed:  # one, or two where the noise also filled the other rank's empty share
        (batch,) = read_json(file)["micro_batches"]
        assert noisy_clip(noisy).stem in "+".join(batch["ids"])
    assert [(tmp_path / f"code-{rank}").read_text() for rank in (0, 1)] == [str(ASKED_TO_STOP)] * 2
    assert done.stdout.count("checkpoint saved") == 1

    assert noisy.train_here(run, "--check=false", yaml=fragile) == 0  # one process goes on
    steps = [each["step"] for each in read_log(run / "train_log.jsonl") if each["kind"] == "step"]
    assert steps == list(range(1, len(steps) + 1))


def test_a_full_disk_stops_every_rank_with_one_sentence(
    workplace: Workplace, tmp_path: Path
) -> None:
    arguments = without_folder(workplace.arguments(tmp_path, "--check=false"))
    done = start(2, "full", tmp_path, arguments, workplace)
    assert done.stderr.count("Writing a checkpoint to") == 1
    assert (tmp_path / "code-1").read_text() == str(BAD_INPUT)


def test_a_hang_is_named_by_every_rank_and_the_job_ends(
    workplace: Workplace, tmp_path: Path
) -> None:
    arguments = without_folder(workplace.arguments(tmp_path, "--check=false"))
    done = start(2, "hanging", tmp_path, arguments, workplace)
    assert done.returncode != 0
    for rank in (0, 1):
        assert f"Rank {rank}: a rank has not moved for 4 s." in done.stderr
    assert len(re.findall(r"rank 1 in step after step 2 on \S+", done.stderr)) == 2
    assert "in hanging" in done.stderr  # the function in which it sleeps, in the stack trace
    assert "stall_seconds" in done.stderr
