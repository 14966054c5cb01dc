"""A second task: utterances are classified by a column, with everything that training has."""

import csv
import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from recipes.classification.recipe import prepare_labeled
from sbkit.base.errors import BAD_INPUT, FILES_FAILED, SbkitError
from sbkit.commands.cli import run as sbkit
from sbkit.logs.run_log import read_log
from tests.runs import Workplace, prompts, read_json

COUNTS = {"train": 12, "dev": 4, "test": 4}
TINY = (
    *("--device=cpu", "--batch_seconds=6", "--number_of_epochs=2", "--check=False"),
    *("--cnn_channels=16", "--d_model=16", "--nhead=2", "--d_ffn=32", "--attention_dim=8"),
    *("--num_encoder_layers=1", "--language=[en]", "--label=pace"),
)


@pytest.fixture(scope="module")
def release(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a release whose clips are quick or slow, by the seconds per letter."""
    folder = tmp_path_factory.mktemp("paced") / "release"
    (folder / "clips").mkdir(parents=True)
    for split, count in COUNTS.items():
        clips = [*islice(prompts(asterisk_english, split), count)]
        pace = {clip: soundfile.info(clip).duration / len(text) for clip, text in clips}
        middle = sorted(pace.values())[count // 2]
        with (folder / f"{split}.tsv").open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file, delimiter="\t", quoting=csv.QUOTE_NONE, quotechar=None)
            table.writerow(["path", "sentence", "pace"])
            for clip, text in clips:
                table.writerow([clip.name, text, "quick" if pace[clip] < middle else "slow"])
                shutil.copy2(clip, folder / "clips")
    return folder


def train_here(release: Path, run: Path, *options: str) -> int:
    workplace = Workplace(release, release.parent / "cache")
    return workplace.train_here(run, *options, yaml="hparams/language_id.yaml", tiny=TINY)


@pytest.fixture(scope="module")
def finished(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished")
    assert train_here(release, run, "--check=True") == 0
    return run


@pytest.mark.slow
def test_run_writes_accuracy_and_confusion(finished: Path) -> None:
    test = read_json(finished / "summary.json")["test"]["test"]
    assert test["utterances"] == COUNTS["test"]
    assert test["accuracy"] == test["right"] / test["utterances"]
    rows = (finished / "confusion_test.tsv").read_text().splitlines()
    counts = [list(map(int, row.split("\t")[1:])) for row in rows[1:]]
    assert rows[0] == "right / found\tquick\tslow"
    assert sum(map(sum, counts)) == COUNTS["test"]
    assert sum(counts[n][n] for n in range(2)) == test["right"]
    assert (finished / "confusion_test.png").read_bytes().startswith(b"\x89PNG")
    epochs = [row for row in read_log(finished / "train_log.jsonl") if row["kind"] == "epoch"]
    assert all(0 <= epoch["accuracy"] <= 1 for epoch in epochs)


@pytest.mark.slow
def test_score_repeats_the_test_of_a_run(
    finished: Path, release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["score", str(finished), str(tmp_path / "test.csv"), "--out", str(tmp_path / "out")]
    rows = [row.split("\t") for row in (release / "test.tsv").read_text().splitlines()[1:]]
    lines = [f"{release / 'clips' / clip},{pace}\n" for clip, _, pace in rows]
    (tmp_path / "test.csv").write_text(f"path,pace\n{''.join(lines)}")
    with pytest.raises(SbkitError, match="needs `label`, the column with the right answers"):
        sbkit(command)
    with pytest.raises(SbkitError, match=r"`language` has none of the model's classes \(quick, s"):
        sbkit([*command, "--label", "language"])
    with pytest.raises(SbkitError, match="`--label` must name .* but test has no `length`. It has"):
        sbkit([*command, "--label", "length"])
    with pytest.raises(SbkitError, match="cannot run this kind of bundle: speech classifier"):
        sbkit(["tune", str(finished)])
    assert sbkit([*command, "--label", "pace"]) == 0
    scored = read_json(tmp_path / "out/summary.json")["test"]["test"]
    trained = read_json(finished / "summary.json")["test"]["test"]
    assert scored == trained
    right = f"({trained['right']} / {trained['utterances']}; "
    assert right in capsys.readouterr().out
    head, *answers = (tmp_path / "out/answers_test.tsv").read_text().splitlines()
    assert head == "id\tright\tfound"
    pairs = [answer.split()[1:] for answer in answers]
    assert sum(right == predicted for right, predicted in pairs) == trained["right"]


@pytest.mark.slow
def test_bundle_classifies_and_does_not_transcribe(
    finished: Path, release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clips = [str(clip) for clip in sorted((release / "clips").iterdir())[:3]]
    assert sbkit(["export", str(finished), "--out", str(tmp_path / "bundle")]) == 0
    capsys.readouterr()
    assert sbkit(["classify", str(tmp_path / "bundle"), *clips]) == 0
    results = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [file for file, _, _ in results] == clips
    assert all(label in ("quick", "slow") for _, label, _ in results)
    assert all(0.5 <= float(probability) <= 1 for *_, probability in results)
    assert sbkit(["classify", str(tmp_path / "bundle"), clips[0], "--format", "json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (plain["file"], plain["label"], plain["probability"] >= 0.5) == (*results[0][:2], True)
    assert plain["seconds"] == pytest.approx(soundfile.info(clips[0]).duration, abs=0.1)
    errors = tmp_path / "errors.jsonl"
    words = ["classify", str(tmp_path / "bundle"), "gone.wav", clips[0], "--errors", str(errors)]
    assert sbkit(words) == FILES_FAILED
    assert capsys.readouterr().err.endswith(f"1 written, 1 failed; the errors are in {errors}\n")
    assert json.loads(errors.read_text())["file"] == "gone.wav"
    assert sbkit(["doctor", str(tmp_path / "bundle")]) == 0
    assert "torch fp32: runs on torch, cpu" in capsys.readouterr().out
    with pytest.raises(SbkitError, match="Use: sbkit classify"):
        sbkit(["transcribe", str(tmp_path / "bundle"), clips[0]])


@pytest.mark.slow
def test_label_that_is_no_column_is_refused(
    release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_here(release, tmp_path, "--label=colour") == BAD_INPUT
    assert "which is not a column of" in capsys.readouterr().err


@pytest.mark.slow
def test_clips_without_a_label_are_left_out_and_reported(
    release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(release, tmp_path / "release")
    for split, last in COUNTS.items():
        file = tmp_path / "release" / f"{split}.tsv"
        lines = file.read_text().splitlines()
        lines[last] = lines[last].rpartition("\t")[0] + "\t"
        file.write_text("\n".join(lines) + "\n")
    run = tmp_path / "run"
    assert train_here(tmp_path / "release", run, "--number_of_epochs=1", "--check=True") == 0
    assert "train is without 1 row (no label)" in capsys.readouterr().out
    left_out = (run / "left_out.tsv").read_text().splitlines()[1:]
    assert [line.split("\t")[0] for line in left_out] == [*COUNTS]
    assert all(line.endswith("\tno label\tpace is empty") for line in left_out)
    assert (run / "labels.txt").read_text() == "quick\nslow\n"
    assert read_json(run / "summary.json")["test"]["test"]["utterances"] == COUNTS["test"] - 1
    command = ["score", str(run), str(tmp_path / "release/test.tsv"), "--label", "pace"]
    assert sbkit(command) == 0
    assert "3 utterances, without 1 whose pace is empty" in capsys.readouterr().out


def knobs_of(folder: Path, **tables: str) -> dict[str, Any]:
    """Write tables `CLIP,pace`, a line for each word of ``tables``, and clips of 0.1 s."""
    manifest: dict[str, Any] = {"train": {}, "dev": {}, "test": {}}
    for name, rows in tables.items():
        file = folder / f"{name}.csv"
        lines = []
        for row in rows.split():
            clip, _, pace = row.partition("=")
            soundfile.write(folder / f"{clip}.wav", np.full(1600, 0.1), 16_000)
            lines.append(f"{clip}.wav,{pace}" if "=" in rows else f"{clip}.wav")
        head = "path,pace" if "=" in rows else "path"
        file.write_text("\n".join([head, *lines]) + "\n")
        manifest[name.rstrip("2")][name] = str(file)
    knobs = {"manifest": manifest, "text_column": False, "language": "en", "sample_rate": 16_000}
    return {**knobs, "label": "pace", "min_seconds": 0.0, "max_seconds": 9.0}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cache")
def test_other_labels_change_the_fingerprint(tmp_path: Path) -> None:
    fingerprints = []
    for last in ("quick", "slow", "quick"):
        knobs = knobs_of(tmp_path, train=f"a=quick b=slow c={last}", dev="d=slow")
        fingerprints.append(prepare_labeled(knobs).fingerprints)
    assert fingerprints[0] == fingerprints[2] != fingerprints[1]


@pytest.mark.usefixtures("cache")
def test_label_found_only_in_test_set_is_refused_before_training(tmp_path: Path) -> None:
    knobs = knobs_of(tmp_path, train="a=quick b=slow", dev="c=slow", test="d=slow e=fast")
    with pytest.raises(SbkitError, match=r"e of test has the label 'fast', .* 2 .*quick, slow\)"):
        prepare_labeled(knobs)
