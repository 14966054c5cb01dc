"""Export of runs: an earlier bundle is replaced, and nothing else is."""

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from sbkit.base.checksums import write_checksums
from sbkit.base.errors import SbkitError
from sbkit.commands.cli import run as sbkit
from sbkit.decoding.decoder import LANGUAGE_MODELS_FILE, DecoderWeights
from sbkit.export.export import collect_files, export_run, replacing_bundle, write_bundle
from sbkit.lm.language_models import save, tokenizer_digest
from sbkit.runtime.runtimes import load_bundle
from sbkit.text.tokenizer import Tokenizer
from tests.runs import read_json
from tests.runtime.bundles import ROOT, make_run


@pytest.fixture
def run(plain_bundle: Path) -> Path:
    return plain_bundle.parent / "run"


@pytest.fixture
def bundle(plain_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain_bundle, tmp_path / "bundle"))


@pytest.fixture
def tested(tmp_path: Path) -> Path:
    """A run that was tested with a beam of 8."""
    run = make_run(tmp_path / "run")
    tokenizer = Tokenizer(model_file=run / "tokenizer.model")
    save({}, run / "lm.safetensors", metadata={"tokenizer": tokenizer_digest(tokenizer)})
    decoder = {"beam_size": 8, "attention_rescoring": False, "weights": asdict(DecoderWeights())}
    fitted: Any = SimpleNamespace(decoder_record=decoder, confidence_record=None)
    (run / "bundle").mkdir()
    write_bundle(run / "bundle", collect_files(run), fitted, run / "lm.safetensors")
    summary = {"test": {"test": {"decoder": "beam", "WER": 0.2575}}}
    (run / "summary.json").write_text(json.dumps(summary))
    return run


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_export_replaces_an_earlier_bundle(run: Path, bundle: Path) -> None:
    before = (bundle / "model.safetensors").stat().st_ino
    (bundle / "onnx").mkdir()
    (bundle / "onnx/parity.json").touch()
    write_checksums(bundle / "onnx")
    export_run(run, bundle)
    load_bundle(bundle)
    assert (bundle / "model.safetensors").stat().st_ino != before
    assert not (bundle / "onnx").exists()
    assert names(bundle.parent) == {"bundle"}


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("README.md", "in bundle, README.md is not what was written"),
        ("onnx/notes.txt", "in bundle/onnx, its checksums.json"),
    ],
)
def test_changed_bundle_is_not_replaced(run: Path, bundle: Path, file: str, words: str) -> None:
    (bundle / file).parent.mkdir(parents=True, exist_ok=True)
    (bundle / file).write_text("mine")
    with pytest.raises(SbkitError, match=f"is neither: {words}"):
        export_run(run, bundle)
    assert (bundle / file).read_text() == "mine"


def test_card_has_the_results_of_the_bundle_that_was_tested_only(tested: Path) -> None:
    bundle, file = tested.parent / "bundle", tested.parent / "soup.safetensors"
    for out in (tested / "bundle", tested):
        with pytest.raises(SbkitError, match="is the model itself or the bundle of a run"):
            export_run(tested, out)
    export_run(tested, bundle)
    assert "| test | beam | WER | 25.75 % |" in (bundle / "README.md").read_text()

    weights = {n: t + 1 for n, t in load_file(bundle / "model.safetensors").items()}
    save_file(weights, file)
    export_run(tested, bundle, weights=file)
    card = (bundle / "README.md").read_text()
    assert "25.75" not in card and "Measure it: `sbkit score FOLDER test.csv`" in card
    assert "- weights: those of soup.safetensors" in card
    assert load_bundle(bundle).decoder is None and not (bundle / "lm.safetensors").exists()
    assert read_json(bundle / "config.json")["checkpoints"] == []
    assert load_file(bundle / "model.safetensors").keys() == weights.keys()
    save_file(weights | {"0.x": torch.ones(2)}, file)
    with pytest.raises(SbkitError, match=r"soup.* of another model: .* \(0.x: 2 instead of none"):
        export_run(tested, bundle, weights=file)

    shutil.rmtree(tested / "bundle")  # its checkpoint decodes greedily
    export_run(tested, bundle)
    assert "25.75" not in (bundle / "README.md").read_text()


def test_export_without_language_models_says_what_that_costs(tested: Path) -> None:
    bundle = tested.parent / "bundle"
    figures = {"decoder": "beam", "WER": 0.2575, "CER": 0.1, "greedy": {"WER": 0.395, "CER": 0.2}}
    figures["normalized"] = {"normalizer": "Whisper's", "WER": 0.2}
    (tested / "summary.json").write_text(json.dumps({"test": {"test": figures, "own": figures}}))
    assert (tested / "bundle/lm.safetensors").exists()
    assert sbkit(["export", str(tested), "--out", str(bundle), "--no-lm"]) == 0
    loaded = load_bundle(bundle)
    assert not (bundle / "lm.safetensors").exists()
    assert loaded.decoder is None and not loaded.config.confidence
    card = (bundle / "README.md").read_text()
    assert (
        "so it decodes greedily: CER on test is 20.00 % instead of 10.00 %; WER on test is "
        "39.50 % instead of 25.75 %; CER on own is" in card
    )
    assert "| test | greedy | WER | 39.50 % |" in card and "| beam" not in card
    head = yaml.safe_load(card.split("---\n")[1])
    rates = [result["metrics"][0]["value"] for result in head["model-index"][0]["results"]]
    assert rates == [0.2, 0.395] * 2
    checkpoints = read_json(bundle / "config.json")["checkpoints"]
    assert checkpoints == read_json(tested / "bundle/config.json")["checkpoints"] != []

    (tested / "summary.json").unlink()
    export_run(tested, bundle, language_models=False)
    assert "greedily: what that costs was not measured.\n" in (bundle / "README.md").read_text()
    export_run(tested, bundle)
    assert (bundle / "lm.safetensors").exists()
    shutil.rmtree(tested / "bundle")  # a greedy bundle has none to leave out
    export_run(tested, bundle, language_models=False)
    assert "are left out" not in (bundle / "README.md").read_text()


def test_replacing_bundle_keeps_an_earlier_bundle_that_is_changed_meanwhile(bundle: Path) -> None:
    """`sbkit tune` writes its bundle in this way, too."""
    with pytest.raises(SbkitError, match="not what was written"), replacing_bundle(bundle):
        (bundle / "README.md").write_text("mine")
    assert (bundle / "README.md").read_text() == "mine"
    assert names(bundle.parent) == {"bundle"}


def test_export_into_an_unwritable_folder_names_the_option(run: Path) -> None:
    with pytest.raises(SbkitError, match="`out`: /proc "):
        export_run(run, Path("/proc/bundle"))


def test_export_warns_of_a_decoder_without_weights(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unfinished = Path(shutil.copytree(run, tmp_path / "run"))
    (unfinished / LANGUAGE_MODELS_FILE).touch()
    export_run(unfinished, tmp_path / "bundle")
    assert "greedily. Finish the run, or fit the weights: sbkit tune" in caplog.text


def test_export_of_a_foreign_run_builds_only_allowed_classes(run: Path, tmp_path: Path) -> None:
    foreign = Path(shutil.copytree(run, tmp_path / "run"))
    yaml = foreign / "hyperparams.yaml"
    text = yaml.read_text()
    assert "sbkit.audio.fbank.Fbank" in text
    yaml.write_text(text.replace("sbkit.audio.fbank.Fbank", "torch.nn.ParameterDict.get"))
    with pytest.raises(SbkitError, match=r"ParameterDict\.get"):
        export_run(foreign, tmp_path / "out")
    assert names(tmp_path) == {"run"}


def test_class_of_a_notebook_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = type("Head", (torch.nn.Linear,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Head", head, raising=False)
    yaml = tmp_path / "mine.yaml"
    text = (ROOT / "hparams" / "ctc.yaml").read_text()
    yaml.write_text(text.replace("ctc_lin: !new:torch.nn.Linear", "ctc_lin: !new:__main__.Head"))
    run = make_run(tmp_path / "run", yaml)
    with pytest.raises(SbkitError, match="ctc_lin cannot .* into a file, such as my_parts.py"):
        export_run(run, tmp_path / "bundle")
