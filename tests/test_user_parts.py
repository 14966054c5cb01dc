"""A user's parts and recipe work from files beside a YAML outside the checkout."""

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import train
from sbkit.base.errors import BAD_INPUT, SbkitError
from sbkit.base.process import run_main
from sbkit.decoding.beam import BeamDecoder, declared_decoder
from sbkit.export.export import distributions
from tests import processes
from tests.runs import ROOT, TINY, Workplace, last_parameters, read_json, records_of

USER_PARTS = ROOT / "tests/user_parts"
UNUSED_KEYS = (
    *("subsampling", "cnn_channels", "nhead", "d_ffn", "num_encoder_layers", "num_decoder_layers"),
    *("encoder_module", "kernel_size", "dropout", "gradient_checkpointing", "label_smoothing"),
    *("warmup_fraction", "time_masks", "time_width", "max_time_fraction", "freq_masks"),
    "freq_width",
)
FEATURE_PARTS = ("CNN", "Transformer", "compute_features", "spec_augment")


def make_yaml(name: str, dropped: Sequence[str] = (), unused: Sequence[str] = ()) -> str:
    """Return ctc.yaml with the objects of a file in user_parts instead of its own."""
    user_blocks = (USER_PARTS / name).read_text(encoding="utf-8").strip()
    replaced = {"seq_lin", *dropped, *re.findall(r"^(\w+):", user_blocks, re.MULTILINE)}
    values, objects = (ROOT / "hparams/ctc.yaml").read_text(encoding="utf-8").split("# ========")
    values = re.sub(rf"(?m)^({'|'.join((*UNUSED_KEYS, *unused))}):.*\n", "", values)
    values = values.replace("recipes.asr.recipe.AsrRecipe", "my_recipe.Mine")
    values = values.replace("corpus: null", "corpus: my_corpus")
    values = values.replace("inter_ctc_weight: 0.3", "inter_ctc_weight: 0.0")
    blocks = objects.split("\n\n")[1:]
    blocks = [block for block in blocks if block.strip().partition(":")[0] not in replaced]
    return "\n\n".join([values, *blocks[:3], user_blocks, *blocks[3:]]) + "\n"


@pytest.fixture(scope="module")
def user_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    for file in USER_PARTS.glob("my_*.py"):
        shutil.copy(file, folder)
    parts = make_yaml("parts.yaml", unused=["soften_prob", "pause_prob", "pause_seconds"])
    (folder / "parts.yaml").write_text(parts)
    waveforms = make_yaml("waveforms.yaml", FEATURE_PARTS, ["n_mels", "level"])
    (folder / "waveforms.yaml").write_text(waveforms)
    return folder


def run(workplace: Workplace, cwd: Path, *command: object) -> subprocess.CompletedProcess[str]:
    return processes.run(command, cwd=cwd, timeout=200, SBKIT_CACHE=workplace.cache)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("yaml", "modules"),
    [("parts.yaml", ("my_models", "my_parts")), ("waveforms.yaml", ("my_parts",))],
)
def test_user_parts_are_checked_trained_exported_and_transcribe(
    yaml: str, modules: Sequence[str], user_folder: Path, workplace: Workplace, tmp_path: Path
) -> None:
    import_options = [option for name in modules for option in ("--import", name)]
    unused = (*UNUSED_KEYS, "ctc_weight")
    sizes = [option for option in TINY if option.split("=")[0][2:] not in unused]
    options = [*sizes, f"--data_folder={workplace.release}", f"--output_folder={tmp_path / 'run'}"]
    checked = run(workplace, tmp_path, "-m", "sbkit", "check", user_folder / yaml, *options)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    command = (ROOT / "train.py", user_folder / yaml, *options, "--number_of_epochs=1")
    trained = run(workplace, tmp_path, *command)
    assert trained.returncode == 0, trained.stderr
    (last,) = re.findall("^test: CER.*", trained.stdout, re.MULTILINE)
    tested = read_json(tmp_path / "run/summary.json")["test"]["test"]
    assert tested["utterances"] == 4
    assert f", exact {100 * tested['exact']:.1f} %, 4 utterances" in last

    export = ("-m", "sbkit", "export", tmp_path / "run", "--out", tmp_path / "bundle")
    refused = run(workplace, user_folder, *export)
    assert refused.returncode == BAD_INPUT
    assert "--import my_" in refused.stderr
    exported = run(workplace, user_folder, *export, *import_options)
    assert exported.returncode == 0, exported.stderr

    bundle = tmp_path / "bundle"
    files = [f"{name}.py" for name in modules]
    assert [(bundle / name).read_text() for name in files] == [
        (USER_PARTS / name).read_text() for name in files
    ]
    card = (bundle / "README.md").read_text()
    assert f"    sbkit transcribe FOLDER talk.wav {' '.join(import_options)}\n" in card
    assert f"code of its author: {', '.join(modules)}." in card

    clip = next((workplace.release / "clips").iterdir())
    transcribe = ("-m", "sbkit", "transcribe", tmp_path / "bundle", clip)
    refused = run(workplace, user_folder, *transcribe)
    assert refused.returncode == BAD_INPUT
    assert "--import my_" in refused.stderr
    transcript, elsewhere = (
        run(workplace, cwd, *transcribe, *import_options) for cwd in (user_folder, tmp_path)
    )
    assert transcript.returncode == elsewhere.returncode == 0, elsewhere.stderr
    assert transcript.stdout == elsewhere.stdout
    assert f"--import my_parts: running {user_folder / 'my_parts.py'}" in transcript.stderr
    assert f"--import my_parts: running {bundle / 'my_parts.py'}" in elsewhere.stderr
    (bundle / "my_parts.py").write_text("class Encoder: ...")
    refused = run(workplace, user_folder, *transcribe, *import_options)
    assert refused.returncode == BAD_INPUT
    assert f"{bundle} is damaged" in refused.stderr


@pytest.mark.slow
def test_own_step_follows_the_schedule_and_draws_alike(
    workplace: Workplace, tmp_path: Path
) -> None:
    shutil.copy(USER_PARTS / "my_step.py", tmp_path)
    yaml = tmp_path / "a.yaml"
    yaml.write_text(f"base: {ROOT}/hparams/ctc.yaml\nrecipe: my_step.TwoPasses\n")
    for run in (tmp_path / "1", tmp_path / "2"):
        assert workplace.train_here(run, "--log_every=1", "--check=False", yaml=yaml) == 0
        assert len({record["learning_rate"] for record in records_of(run, "step")}) > 2
    first, second = (last_parameters(tmp_path / run) for run in "12")
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_distributions_of_user_modules_are_found() -> None:
    source = b"import os, yaml.nodes\nfrom numpy import array\nfrom . import other\nimport mine\n"
    assert distributions(["torch.nn"], {"mine.py": source}) == ["PyYAML", "numpy", "torch"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("null", "of a recipe, but is None"),
        ("nothing.there.X", "cannot be imported: it raised ModuleNotFoundError"),
        ("raising_recipe_of_a_test.X", "it raised ZeroDivisionError (division by zero)"),
        ("recipes.asr.recipe.NONE", "is not there"),
        ("recipes.asr.brain.AsrBrain", "is none"),
    ],
)
def test_unsuitable_recipe_is_an_error_of_one_line(
    name: str, message: str, user_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    yaml = tmp_path / "parts.yaml"
    (tmp_path / "raising_recipe_of_a_test.py").write_text("1 / 0\n")
    yaml.write_text((user_folder / "parts.yaml").read_text().replace("my_recipe.Mine", name))
    with patch.object(sys, "argv", ["train.py", str(yaml)]), pytest.raises(SystemExit) as exit:
        run_main(train.main)
    assert exit.value.code == BAD_INPUT
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_decoder_of_a_user_class_is_refused_since_no_bundle_can_hold_it() -> None:
    class Mine(BeamDecoder):
        """A user's decoder."""

    decoder = Mine(tokenizer=None, language_models="lm.safetensors")  # type: ignore[arg-type]
    with pytest.raises(SbkitError, match="`decoder` must be a .*, but is a Mine"):
        declared_decoder({"decoder": decoder, "ctc_weight": 1.0})


def test_page_has_a_tested_example_of_every_kind_of_part() -> None:
    """The examples are in YAMLs of hparams and in files that the tests train."""
    text = (ROOT / "docs/guide/own-parts.md").read_text("utf-8").partition("## Signatures")[2]
    rows = [row.strip("| ").split(" | ") for row in text.splitlines() if row.startswith("| `")]
    examples = {row[0]: row[-1] for row in rows if len(row) == 3}
    tested = {f"tests/user_parts/{file.name}" for file in USER_PARTS.iterdir() if file.is_file()}
    tested |= {f"hparams/{file.name}" for file in (ROOT / "hparams").glob("*.yaml")}
    for keys, files in examples.items():
        paths = re.findall(r"`([^`]+)`", files)
        assert paths and {*paths} <= tested
        for key in re.findall(r"`(\w+)`", keys):
            pattern = re.compile("def read" if key == "corpus" else rf"\b{key}\b")
            assert any(pattern.search((ROOT / path).read_text("utf-8")) for path in paths), key
    kinds = "corpus CNN Transformer encoder wave_augment spec_augment opt_class optimizers"
    assert {*kinds.split(), "lr_schedule"} <= {*re.findall(r"`(\w+)`", " ".join(examples))}
