"""Several processes are as exact as one, and all of them end."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from sbkit.base.errors import ASKED_TO_STOP, BAD_INPUT, FAILED
from tests import processes
from tests.faulty import noisy_clip, noisy_workplace, write_fragile
from tests.ranks import ACCUMULATIONS
from tests.runs import ROOT, Workplace, last_parameters, read_json, records_of, rows_of, times_of
from tests.runtime.bundles import parity_report

pytestmark = [pytest.mark.slow, pytest.mark.ddp]

# Plain gradient descent shows a gradient with the wrong scale; AdamW would not. Dropout is off,
# because each rank draws its own. Joins, speeds, masks and noise are on.
NO_DROPOUT = ("--dropout=0.0", "--log_every=1", "--check=false")
NOISE = """
add_noise: !new:sbkit.audio.augment.AddNoise
    folder: {folder}
wave_augment: !new:sbkit.audio.augment.Compose
    parts: [!ref <add_noise>, !ref <add_pauses>]
"""
SGD = ("--lr=0.05", "--max_grad_norm=1000.0", "--number_of_epochs=2", "--average_checkpoints=1")
SGD += ("--ema_decay=0.5",)


def run_scenario(
    scenario: str, world_size: int, folder: Path, arguments: list[str], workplace: Workplace
) -> subprocess.CompletedProcess[str]:
    """Run a scenario of tests/ranks.py, which chooses the output folders."""
    arguments = [word for word in arguments if not word.startswith("--output_folder=")]
    command = ["-m", "tests.ranks", scenario, folder, *arguments]
    return processes.run(command, ranks=world_size, SBKIT_CACHE=workplace.cache)


def write_sgd_with_noise(folder: Path) -> str:
    """Write ctc.yaml with SGD, noise from a file, and a Brain that runs the model twice a step."""
    text = (ROOT / "hparams" / "ctc.yaml").read_text(encoding="utf-8")
    sgd = "opt_class: !name:torch.optim.SGD\n    lr: !ref <lr>\n"
    text = re.sub(r"^opt_class: (.+\n)(    .+\n)+", sgd, text, flags=re.M)
    noise = np.random.default_rng(0).normal(0, 0.1, 50_000)
    soundfile.write(folder / "noise.wav", noise, 16_000)
    yaml = folder / "sgd.yaml"
    text = text.replace("recipes.asr.recipe.AsrRecipe", "docs.examples.two_views.TwoViews")
    text = text.replace("wave_augment: ", "add_pauses: ")
    keys = "consistency_weight: 0.5\nfind_unused_parameters: False\n"
    yaml.write_text(f"{text}\n{keys}{NOISE.format(folder=folder)}")
    return str(yaml)


def test_two_and_three_processes_and_any_accumulation_take_the_steps_of_one(
    workplace: Workplace, tmp_path: Path
) -> None:
    yaml = write_sgd_with_noise(tmp_path)
    # Freezing ends within an epoch, at the step where `signal_rank_1` stops two ranks.
    options = (*NO_DROPOUT, *SGD, "--freeze={Transformer: 9}")
    for accumulation in ACCUMULATIONS:
        run = tmp_path / f"1x{accumulation}"
        # Validations within an epoch change no step.
        interval = f"--valid_interval_steps={3 * (accumulation == 1)}"
        accumulated = f"--grad_accumulation_factor={accumulation}"
        assert workplace.train_here(run, *options, accumulated, interval, yaml=yaml) == 0
    one_rank = tmp_path / "1x1"
    interval = "--valid_interval_steps=3"
    arguments = [str(one_rank), *workplace.arguments(one_rank, *options, interval, yaml=yaml)]
    for world_size in (2, 3):
        process = run_scenario("exact", world_size, tmp_path, arguments, workplace)
        assert process.returncode == 0, process.stderr
        resumed_runs = 3 * (world_size == 2)
        num_runs = len(ACCUMULATIONS) + 1 + resumed_runs
        assert process.stdout.count("train: 16 utterances") == num_runs
        assert process.stdout.count("Stopped at") == 2 * bool(resumed_runs)  # by both ranks
    assert torch.equal(*(flat_parameters(tmp_path / name) for name in ("whole", "resumed")))

    expected, expected_losses = flat_parameters(one_rank), step_losses(one_rank)
    assert len(expected_losses) >= 10
    rows = rows_of(workplace.release / "train.tsv")
    clips = [soundfile.info(workplace.release / "clips" / row["path"]) for row in rows]
    seconds = 2 * sum(clip.duration for clip in clips)  # two epochs
    assert read_json(one_rank / "summary.json")["audio_seconds"] == pytest.approx(seconds, abs=0.1)
    for world_size in (1, 2, 3):
        for accumulation in ACCUMULATIONS:
            run = tmp_path / f"{world_size}x{accumulation}"
            difference = (flat_parameters(run) - expected).norm() / expected.norm()
            assert difference <= 1e-6, (run.name, float(difference))
            assert step_losses(run) == pytest.approx(expected_losses, rel=1e-5), run.name
            if (world_size, accumulation) != (1, 4):
                validated = pytest.approx(validated_in(one_rank), rel=1e-5)
                assert validated_in(run) == validated, run.name
    assert [*validated_in(one_rank)] == [3, 6, 9, 12, 13]

    runs = (tmp_path / name for name in ("1x1", "test-2", "test-3"))
    scores = [read_json(run / "summary.json")["test"] for run in runs]
    assert scores[0] == scores[1] == scores[2]
    mean_losses = [read_json(file) for file in sorted(tmp_path.glob("loss-*.json"))]
    assert len(mean_losses) == 5
    assert all(mean == mean_losses[0] for mean in mean_losses)


def flat_parameters(run: Path) -> torch.Tensor:
    return torch.cat([value.double().flatten() for value in last_parameters(run).values()])


def validated_in(run: Path) -> dict[int, float]:
    """Return the loss of each validation by its step."""
    return {record["step"]: record["valid_loss"] for record in records_of(run, "epoch")}


def step_losses(run: Path) -> list[float]:
    return [record["loss"] for record in records_of(run, "step")]


def test_rank_that_is_to_stop_takes_others_along(asterisk_english: Path, tmp_path: Path) -> None:
    """First in training, then while it scores its share of the test set.

    A batch with noise on one rank: both ranks skip that step.
    """
    noisy = noisy_workplace(asterisk_english, tmp_path)
    run, fragile = tmp_path / "run", write_fragile(tmp_path)
    options = ("--check=false", "--eval_batch_seconds=2", "--export_formats=[onnx]")
    arguments = noisy.arguments(run, *options, yaml=fragile)
    process = run_scenario("signal_rank_1", 2, tmp_path, arguments, noisy)
    assert process.returncode == 0, process.stderr
    assert records_of(run, "epoch")[0]["skipped_steps"] == 1
    (line,) = re.findall(r"step \d was skipped: its loss is not finite.*", process.stderr)
    assert noisy_clip(noisy).stem in line
    assert all(value.isfinite().all() for value in last_parameters(run).values())
    codes = [(tmp_path / f"codes-{rank}").read_text() for rank in (0, 1)]
    assert codes == [f"{ASKED_TO_STOP} {ASKED_TO_STOP}"] * 2
    assert process.stdout.count("Stopped at") == 2
    steps = [record["step"] for record in records_of(run, "step")]
    assert steps == list(range(1, len(steps) + 1))
    assert [record["epoch"] for record in records_of(run, "epoch")] == [1, 2, 3, 4]
    # Rank 0 has compared the format on the clips of both ranks.
    compared = parity_report(run / "bundle", "onnx")["fp32"]["test_sets"]
    assert compared["error_rates"]["utterances"] == 4
    assert not [*run.glob("*_test.*"), *run.glob("summary*"), *run.glob("report.html")]

    times = times_of(run / "bundle")
    assert noisy.train_here(run, *options, yaml=fragile) == 0  # tests in one process
    assert times_of(run / "bundle") == times
    assert records_of(run, "step")[-1]["step"] == steps[-1]
    assert read_json(run / "summary.json")["test"]["test"]["utterances"] == 4


def test_full_disk_stops_every_rank_with_one_sentence(workplace: Workplace, tmp_path: Path) -> None:
    arguments = workplace.arguments(tmp_path, "--check=false")
    process = run_scenario("fill_disk", 2, tmp_path, arguments, workplace)
    assert process.stderr.count("Writing a checkpoint to") == 1
    assert (tmp_path / "codes-1").read_text() == str(BAD_INPUT)


def test_ranks_wait_for_one_whose_store_is_away(workplace: Workplace, tmp_path: Path) -> None:
    options = ("--check=false", "--num_workers=1", "--stall_seconds=10")
    arguments = workplace.arguments(tmp_path, *options)
    process = run_scenario("store_away", 2, tmp_path, arguments, workplace)
    assert process.returncode == 0, process.stderr
    assert "Timeout" not in process.stderr
    assert "/nfs/x'. Retrying for up to 600 s." in process.stdout + process.stderr
    assert records_of(tmp_path / "run", "test")


def test_hanging_rank_is_reported_and_ends_the_job(workplace: Workplace, tmp_path: Path) -> None:
    options = ("--check=false", "--stall_seconds=20", "--store_patience=0")
    arguments = workplace.arguments(tmp_path, *options)
    process = run_scenario("hang_rank_1", 2, tmp_path, arguments, workplace)
    assert process.returncode == FAILED
    report = (tmp_path / "run" / "heartbeat-1").read_text()
    position, stacks = report.split("\n", maxsplit=1)
    assert re.fullmatch(r"since \d\d:\d\d:\d\d in step after step 2 on \S+.*", position)
    assert stacks.startswith("Timeout (0:00:20)!\n") and "in hang_rank_1\n" in stacks
    assert "in hang_rank_1\n" in process.stderr
