"""A user's own parts and recipe, in files beside a YAML that lies outside of the checkout."""

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

import train
from recipes.asr.decoding import RunDecoding
from sbkit.base.errors import BAD_INPUT, SbkitError
from sbkit.base.process import run_main
from sbkit.decoding.decoder import BeamDecoder
from sbkit.export.export import distributions
from tests import processes
from tests.runs import ROOT, TINY, Workplace, read_json

HERE = ROOT / "tests/user_parts"
IMPORTED = ("--import", "my_parts", "--import", "my_models")
UNUSED = ("cnn_channels", "nhead", "d_ffn", "num_encoder_layers", "num_decoder_layers")
UNUSED += ("encoder_module", "kernel_size", "dropout", "gradient_checkpointing")
UNUSED += ("label_smoothing", "warmup_fraction")
UNUSED += ("time_masks", "time_width", "max_time_fraction", "freq_masks", "freq_width")
OF_FEATURES = ("CNN", "Transformer", "compute_features", "spec_augment")


def own_yaml(name: str, dropped: Sequence[str] = (), unused: Sequence[str] = ()) -> str:
    """Write ctc.yaml with the blocks of a file of own parts in place of some of its own."""
    own = (HERE / name).read_text(encoding="utf-8").strip()
    replaced = {"seq_lin", *dropped, *re.findall(r"^(\w+):", own, re.MULTILINE)}
    knobs, objects = (ROOT / "hparams/ctc.yaml").read_text(encoding="utf-8").split("# ========")
    knobs = re.sub(rf"(?m)^({'|'.join((*UNUSED, *unused))}):.*\n", "", knobs)
    knobs = knobs.replace("recipes.asr.recipe.ASR", "my_recipe.MINE")
    knobs = knobs.replace("corpus: null", "corpus: my_corpus")
    knobs = knobs.replace("inter_ctc_weight: 0.3", "inter_ctc_weight: 0.0")
    blocks = objects.split("\n\n")[1:]
    kept = [each for each in blocks if each.strip().partition(":")[0] not in replaced]
    before, after = kept[:2], kept[2:]  # the model is made of the tokenizer
    return "\n\n".join([knobs, *before, *after[:1], own, *after[1:]]) + "\n"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the user's."""
    folder = tmp_path_factory.mktemp("own")
    for file in HERE.glob("my_*.py"):
        shutil.copy(file, folder)
    (folder / "own.yaml").write_text(own_yaml("parts.yaml"))
    (folder / "waveforms.yaml").write_text(own_yaml("waveforms.yaml", OF_FEATURES, ["n_mels"]))
    return folder


def run(workplace: Workplace, cwd: Path, *command: object) -> subprocess.CompletedProcess[str]:
    return processes.run(command, cwd=cwd, timeout=200, SBKIT_CACHE=workplace.cache)


@pytest.mark.slow
@pytest.mark.parametrize("yaml", ["own.yaml", "waveforms.yaml"])
def test_user_parts_are_checked_trained_exported_and_transcribe(
    yaml: str, own: Path, workplace: Workplace, tmp_path: Path
) -> None:
    sizes = [each for each in TINY if each.split("=")[0][2:] not in (*UNUSED, "ctc_weight")]
    options = [*sizes, f"--data_folder={workplace.release}", f"--output_folder={tmp_path / 'run'}"]
    checked = run(workplace, tmp_path, "-m", "sbkit", "check", own / yaml, *options)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    trained = run(
        workplace, tmp_path, ROOT / "train.py", own / yaml, *options, "--number_of_epochs=1"
    )
    assert trained.returncode == 0, trained.stderr
    (last,) = re.findall("^test: CER.*", trained.stdout, re.MULTILINE)
    tested = read_json(tmp_path / "run/summary.json")["test"]["test"]
    assert tested["utterances"] == 4
    assert f", exact {100 * tested['exact']:.1f} %, 4 utterances" in last

    export = ("-m", "sbkit", "export", tmp_path / "run", "--out", tmp_path / "bundle")
    refused = run(workplace, own, *export)
    assert refused.returncode == BAD_INPUT
    assert "--import my_" in refused.stderr
    assert run(workplace, own, *export, *IMPORTED).returncode == 0

    bundle = tmp_path / "bundle"
    files = ("my_models.py", "my_parts.py")
    assert [(bundle / name).read_text() for name in files] == [
        (HERE / name).read_text() for name in files
    ]
    card = (bundle / "README.md").read_text()
    assert "    sbkit transcribe FOLDER talk.wav --import my_models --import my_parts\n" in card
    assert "of its author's: my_models, my_parts." in card

    clip = next((workplace.release / "clips").iterdir())
    transcribe = ("-m", "sbkit", "transcribe", tmp_path / "bundle", clip)
    refused = run(workplace, own, *transcribe)
    assert refused.returncode == BAD_INPUT
    assert "--import my_" in refused.stderr
    here, elsewhere = (run(workplace, cwd, *transcribe, *IMPORTED) for cwd in (own, tmp_path))
    assert here.returncode == elsewhere.returncode == 0, elsewhere.stderr
    assert here.stdout == elsewhere.stdout
    assert f"--import my_parts: running {own / 'my_parts.py'}" in here.stderr
    assert f"--import my_parts: running {bundle / 'my_parts.py'}" in elsewhere.stderr
    (bundle / "my_parts.py").write_text("class Encoder: ...")
    refused = run(workplace, own, *transcribe, *IMPORTED)
    assert refused.returncode == BAD_INPUT
    assert "my_parts.py is not what was written" in refused.stderr


def test_the_packages_that_own_modules_import_are_named_for_their_versions() -> None:
    source = b"import os, yaml.nodes\nfrom numpy import array\nfrom . import other\nimport mine\n"
    assert distributions(["torch.nn"], {"mine.py": source}) == ["PyYAML", "numpy", "torch"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("null", "must name the recipe to run, but is None"),
        ("nothing.there.X", "must name something importable, but nothing.there raised ModuleNotF"),
        (
            "raising_recipe_of_a_test.X",
            "raising_recipe_of_a_test raised ZeroDivisionError (division",
        ),
        ("recipes.asr.recipe.NONE", "is not there"),
        ("recipes.asr.recipe.AsrBrain", "is type"),
    ],
)
def test_a_recipe_that_is_none_is_one_sentence(
    name: str,
    words: str,
    own: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    yaml = tmp_path / "own.yaml"
    (tmp_path / "raising_recipe_of_a_test.py").write_text("1 / 0\n")
    yaml.write_text((own / "own.yaml").read_text().replace("my_recipe.MINE", name))
    with patch.object(sys, "argv", ["train.py", str(yaml)]), pytest.raises(SystemExit) as left:
        run_main(train.main)
    assert left.value.code == BAD_INPUT
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


def test_a_decoder_of_another_class_which_no_bundle_could_hold_is_refused() -> None:
    class Mine(BeamDecoder):
        """A decoder of the user's own."""

    decoder = Mine(tokenizer=None, language_models="lm.safetensors")  # type: ignore[arg-type]
    with pytest.raises(SbkitError, match="`decoder` must be .*BeamDecoder, .*; got a Mine"):
        RunDecoding(SimpleNamespace(decoder=decoder, ctc_weight=1.0), None)  # type: ignore[arg-type]


def test_the_table_of_parts_has_every_kind_with_a_tested_example() -> None:
    """The examples lie in YAMLs of hparams and in files that this test and its neighbors train."""
    text = (ROOT / "hparams/README.md").read_text("utf-8").partition("## Parts")[2]
    rows = [each.strip("| ").split(" | ") for each in text.splitlines() if each.startswith("| `")]
    examples = {row[0]: row[-1] for row in rows if len(row) == 3}
    tested = {f"tests/user_parts/{file.name}" for file in HERE.iterdir() if file.is_file()}
    tested |= {f"hparams/{file.name}" for file in (ROOT / "hparams").glob("*.yaml")}
    tested.add("tests/train/adversarial.py")
    for keys, files in examples.items():
        named = re.findall(r"`([^`]+)`", files)
        assert named and {*named} <= tested
        for key in re.findall(r"`(\w+)`", keys):
            kinds = {"recipe": "Recipe|replace", "corpus": "def read"}
            found = re.compile(kinds.get(key, rf"\b{key}\b"))
            assert any(found.search((ROOT / file).read_text("utf-8")) for file in named), key
    kinds = "recipe metrics corpus decoder Transformer encoder wave_augment spec_augment opt_class"
    assert {*kinds.split(), "lr_schedule"} <= {*re.findall(r"`(\w+)`", " ".join(examples))}
