"""The task of docs/guide/own-task.md, outside the checkout, as a user has it.

It is trained, resumed, tested, exported and run; sbkit does not know it.
"""

import csv
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sbkit.base.errors import ASKED_TO_STOP, BAD_INPUT, SbkitError
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.ranking import AveragedCheckpoints
from sbkit.checkpoint.run_config import read_description
from sbkit.commands.cli import run as sbkit
from sbkit.runtime.runtimes import load_bundle
from sbkit.tasks.asr.bundle import as_recognizer
from tests.processes import run_fresh
from tests.runs import Workplace, last_parameters, read_json, records_of, rows_of, stopped_after
from tests.runtime.bundles import ROOT

pytestmark = pytest.mark.slow
Captured = pytest.CaptureFixture[str]

MODULE = "language_id"
IMPORT = ("--import", MODULE)
TINY = ("--device=cpu", "--data_folder=null", "--batch_seconds=6", "--number_of_epochs=3")
SPLITS = ("train", "dev", "test")
BY_LOSS = """
from language_id import COLUMN, LanguageIdentification

from sbkit.bundle.task import Task
from sbkit.logs.metric import LOSS_METRIC


class ByLoss(LanguageIdentification):
    metrics = LOSS_METRIC
    measure = Task.measure

    def read_outputs(self, outputs, labels):
        return [dict(zip(labels.names, scores.tolist())) for scores in outputs]

    def result(self, prediction, row, **_):
        return -prediction[row[COLUMN]], 1
"""
BY_LOSS_RECIPE = """
from by_loss import ByLoss
from language_id_recipe import LanguageBrain, LanguageRecipe


class ByLossBrain(LanguageBrain):
    metrics = {}


class ByLossRecipe(LanguageRecipe):
    task = ByLoss()
    brain = ByLossBrain
"""
GRAPH = (ROOT / "tests/user_parts/my_graph.py").read_text("utf-8")  # as on the page
GRAPH_RECIPE = """
from language_id_recipe import LanguageRecipe
from my_graph import WithGraph


class WithGraphRecipe(LanguageRecipe):
    task = WithGraph()
"""


@pytest.fixture(scope="module")
def project(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of the page, and tables whose languages alternate."""
    folder = tmp_path_factory.mktemp("mine") / "project"
    shutil.copytree(ROOT / "docs/examples/language_id", folder)
    (folder / "by_loss.py").write_text(BY_LOSS)
    (folder / "by_loss_recipe.py").write_text(BY_LOSS_RECIPE)
    (folder / "my_graph.py").write_text(GRAPH)
    (folder / "my_graph_recipe.py").write_text(GRAPH_RECIPE)
    for split in SPLITS:
        write_table(folder / f"{split}.csv", workplace, ("en", "fr"))
    return folder


def write_table(file: Path, workplace: Workplace, languages: tuple[str, ...]) -> None:
    """Write a table of a split, named after it, whose languages take turns."""
    rows = rows_of(workplace.release / f"{file.stem}.tsv")
    with file.open("w", newline="") as lines:
        table = csv.writer(lines)
        table.writerow(("path", "language"))
        for number, row in enumerate(rows):
            clip = workplace.release / "clips" / row["path"]
            table.writerow((clip, languages[number % len(languages)]))


def train(workplace: Workplace, project: Path, run: Path, *options: str) -> int:
    tables = [f"--manifest={{{', '.join(f'{s}: {project / s}.csv' for s in SPLITS)}}}"]
    yaml = project / "language_id.yaml"
    return workplace.train_here(run, *tables, "--d_model=16", *options, yaml=yaml, tiny=TINY)


@pytest.fixture(scope="module")
def trained(workplace: Workplace, project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run") / "run"
    assert train(workplace, project, run, "--average_checkpoints=2") == 0
    return run


@pytest.fixture(scope="module")
def bundle(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "bundle"
    with pytest.raises(SbkitError, match=f"pass --import {MODULE}"):
        sbkit(["export", str(trained), "--out", str(out)])
    assert sbkit(["export", str(trained), "--out", str(out), *IMPORT]) == 0
    return out


def score(workplace: Workplace, bundle: Path, table: Path, out: Path, *imported: str) -> Any:
    assert workplace.sbkit("score", bundle, table, "--out", out, *imported) == 0
    return read_json(out / "summary.json")["test"]["test"]


def test_user_task_is_ranked_by_its_metric_and_tested(trained: Path) -> None:
    accuracies = [epoch["accuracy"] for epoch in records_of(trained, "epoch")]
    assert len(accuracies) == 3 and all(0 <= accuracy <= 1 for accuracy in accuracies)
    best, *_ = Checkpointer(trained / "checkpoints").find_checkpoints(max_key="accuracy")
    assert best.meta["accuracy"] == max(accuracies)
    averaged = AveragedCheckpoints.read(trained / "checkpoints")
    assert averaged is not None and len(averaged.candidates) == 2
    test = read_json(trained / "summary.json")["test"]["test"]
    assert test["utterances"] == 4 and 4 * test["accuracy"] in range(5)
    assert (trained / "languages.txt").read_text() == "en\nfr\n"


def test_stopped_run_resumes_to_the_same_weights(
    trained: Path, workplace: Workplace, project: Path, tmp_path: Path
) -> None:
    with stopped_after(5, import_module("language_id_recipe").LanguageBrain):
        assert train(workplace, project, tmp_path) == ASKED_TO_STOP
    assert train(workplace, project, tmp_path) == 0
    whole, resumed = last_parameters(trained), last_parameters(tmp_path)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_user_task_is_loaded_from_its_bundle(trained: Path, bundle: Path) -> None:
    assert "# Language identifier" in (bundle / "README.md").read_text()
    with pytest.raises(SbkitError, match=f"pass --import {MODULE}"):
        load_bundle(bundle)
    module = import_module(MODULE)
    loaded = load_bundle(bundle, user_modules=frozenset([MODULE]))
    assert type(loaded.task) is module.LanguageIdentification
    assert type(loaded.model.network) is module.LanguageModel
    clip = np.random.default_rng(0).integers(-9000, 9000, 16_000, np.int16)
    log_probs = loaded.predict([clip, clip[:9000]])
    assert (log_probs.shape, log_probs.dtype) == ((2, 2), torch.float32)
    torch.testing.assert_close(log_probs.exp().sum(1), torch.ones(2))
    torch.testing.assert_close(loaded.predict([clip[:9000]])[0], log_probs[1])
    with pytest.raises(SbkitError, match="`sbkit transcribe` cannot run this kind of bundle: lang"):
        as_recognizer(loaded)
    for command in (["transcribe", str(bundle), "talk.wav"], ["tune", str(trained), "--out=new"]):
        with pytest.raises(SbkitError, match="Use: sbkit run FOLDER identify"):
            sbkit([*command, *IMPORT])


def test_score_repeats_the_test_of_a_run(
    bundle: Path,
    trained: Path,
    workplace: Workplace,
    project: Path,
    tmp_path: Path,
    capsys: Captured,
) -> None:
    expected = read_json(trained / "summary.json")["test"]["test"]
    capsys.readouterr()
    scored = score(workplace, bundle, project / "test.csv", tmp_path / "scores", *IMPORT)
    assert scored == expected
    line = f"test: accuracy {100 * expected['accuracy']:.1f} %, 4 utterances\n"
    assert capsys.readouterr().out == line


def test_bundle_needs_no_recipes(bundle: Path, workplace: Workplace, tmp_path: Path) -> None:
    clips = sorted((workplace.release / "clips").iterdir())[:2]
    code = "import sys; sys.modules['recipes'] = None; from sbkit.commands.cli import run; run(%r)"
    words = ["run", *IMPORT, str(bundle), "identify", *map(str, clips)]
    process = run_fresh(code % words, cwd=tmp_path, PYTHONPATH=ROOT)
    assert process.returncode == 0, process.stderr
    answers = [line.split("\t") for line in process.stdout.splitlines()]
    assert [answer[0] for answer in answers] == [*map(str, clips)]
    assert all(language in ("en", "fr") for _, language, _ in answers)
    assert all(0.5 <= float(probability) <= 1 for *_, probability in answers)


def test_user_task_without_metrics_is_ranked_by_its_loss(
    workplace: Workplace, project: Path, tmp_path: Path, capsys: Captured
) -> None:
    run, out = tmp_path / "run", tmp_path / "bundle"
    options = ("--recipe=by_loss_recipe.ByLossRecipe", "--average_checkpoints=2")
    assert train(workplace, project, run, *options) == 0
    losses = [epoch["valid_loss"] for epoch in records_of(run, "epoch")]
    best, *_ = Checkpointer(run / "checkpoints").find_checkpoints(min_key="loss")
    assert best.meta["loss"] == min(losses)
    imported = (*IMPORT, "--import", "by_loss")
    assert sbkit(["export", str(run), "--out", str(out), *imported]) == 0
    expected = read_json(run / "summary.json")["test"]["test"]["loss"]
    capsys.readouterr()
    scored = score(workplace, out, project / "test.csv", tmp_path / "scores", *imported)
    assert scored["loss"] == pytest.approx(expected, rel=1e-4)
    assert capsys.readouterr().out == f"test: loss {scored['loss']:.4g}, 4 utterances\n"


def test_other_languages_change_the_run_and_unknown_ones_are_refused(
    trained: Path, workplace: Workplace, project: Path, tmp_path: Path, capsys: Captured
) -> None:
    changed = Path(shutil.copytree(project, tmp_path / "changed"))
    write_table(changed / "dev.csv", workplace, ("fr", "en"))
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    assert train(workplace, changed, run, "--average_checkpoints=2") == BAD_INPUT
    assert "language" in capsys.readouterr().err
    write_table(changed / "dev.csv", workplace, ("en", "it"))
    assert train(workplace, changed, tmp_path / "other") == BAD_INPUT
    assert "it" in capsys.readouterr().err
    assert read_description(trained).labels


def test_graph_with_a_single_output_is_exported(
    workplace: Workplace, project: Path, tmp_path: Path, capsys: Captured
) -> None:
    """It is traced by the check: one that has a constant size is refused before training."""
    options = ("--recipe=my_graph_recipe.WithGraphRecipe", "--export_formats=[onnx]")
    checked = (*options, "--check=True", "--number_of_epochs=1")
    assert train(workplace, project, tmp_path / "run", *checked) == 0
    modules = frozenset(["my_graph", "language_id"])
    torch_bundle = load_bundle(tmp_path / "run", user_modules=modules)
    onnx = load_bundle(tmp_path / "run", user_modules=modules, runtime="onnx").model
    clips = np.random.default_rng(0).standard_normal((2, 16_000)).astype(np.float32) / 10
    arrays = (clips, np.array([16_000, 9_000]))
    (expected,), (computed,) = (m.run("identify", *arrays) for m in (torch_bundle.model, onnx))
    np.testing.assert_allclose(computed, expected, atol=1e-3)
    assert onnx.settings == {"unit": "nats"}
    code = (project / "my_graph.py").read_text()
    constant = code.replace("32768 * audio,", "32768 * audio.reshape(3, 16_000),")
    (project / "own_constant.py").write_text(constant)
    recipe = (project / "my_graph_recipe.py").read_text().replace("my_graph", "own_constant")
    (project / "own_constant_recipe.py").write_text(recipe)
    refused = ("--recipe=own_constant_recipe.WithGraphRecipe", *checked[1:])
    assert train(workplace, project, tmp_path / "constant", *refused) == BAD_INPUT
    assert "torch.export cannot trace this model" in capsys.readouterr().err
