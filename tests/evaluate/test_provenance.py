"""A score is shown only for the weights and the decoder that it was measured with."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sbkit.base.errors import BundleError, SbkitError
from sbkit.commands.cli import run as sbkit
from sbkit.decoding.decoder import DecoderWeights
from sbkit.evaluate.compare import compare_runs
from sbkit.evaluate.provenance import FIELD_PHRASES, describe_provenance, make_provenance
from sbkit.export.export import collect_files, set_decoder, write_bundle
from sbkit.lm.language_models import digest_of, save
from sbkit.run.run import Run
from sbkit.runtime.runtimes import load_bundle
from sbkit.text.tokenizer import Tokenizer
from tests.runs import read_json
from tests.runtime.bundles import make_run

DECODER = {
    **{"beam_size": 8, "attention_rescoring": False, "weights": asdict(DecoderWeights())},
    **{"chosen_on": ["dev"], "WER": 0.5},
}


def write_decoder(run: Path, confidence: object = None, **settings: Any) -> None:
    """Write a decoder into the bundle as the end of a training does, and as `sbkit tune` does."""
    fitted = SimpleNamespace(decoder_record=DECODER | settings, confidence_record=confidence)
    set_decoder(run / "bundle", run / "bundle", fitted, run / "lm.safetensors")  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was tested with a beam of 8."""
    run = make_run(tmp_path / "run")
    tokenizer = Tokenizer(model_file=run / "tokenizer.model")
    save({}, run / "lm.safetensors", metadata={"tokenizer": digest_of(tokenizer)})
    (run / "bundle").mkdir()
    write_bundle(run / "bundle", collect_files(run))
    write_decoder(run)
    summary = {"test": {"test": {"decoder": "beam", "WER": 0.2575}}}
    summary["provenance"] = read_json(run / "bundle/config.json")["provenance"]
    (run / "summary.json").write_text(json.dumps(summary))
    return run


def export(run: Path, *options: str) -> str:
    assert sbkit(["export", str(run), "--out", str(run.parent / "bundle"), *options]) == 0
    return (run.parent / "bundle/README.md").read_text()


def test_bundle_of_other_weights_has_no_decoder_and_no_figures(run: Path) -> None:
    bundle, file = run.parent / "bundle", run.parent / "soup.safetensors"
    weights = {n: t + 1 for n, t in load_file(run / "bundle/model.safetensors").items()}
    save_file(weights, file)
    card = export(run, "--weights", str(file))
    assert "25.75" not in card and "sbkit score FOLDER test.csv" in card
    assert "- weights: those of soup.safetensors" in card
    assert load_bundle(bundle).decoder is None and not (bundle / "lm.safetensors").exists()
    assert read_json(bundle / "config.json")["checkpoints"] == []
    assert load_file(bundle / "model.safetensors").keys() == weights.keys()
    save_file(weights | {"0.x": torch.ones(2)}, file)
    with pytest.raises(SbkitError, match=r"soup.* of another model: .* \(0.x: 2 instead of none"):
        export(run, "--weights", str(file))


def test_bundle_contains_provenance_of_its_run(run: Path) -> None:
    write_decoder(run, chosen_on=["other"])  # where it was fitted is no setting
    assert "| test | beam | WER | 25.75 % |" in export(run)
    record = read_json(run / "summary.json")["provenance"]
    assert read_json(run.parent / "bundle/config.json")["provenance"] == record
    assert ", decoder beam, beam 8, word 0.6" in describe_provenance(record)


def test_other_decoder_has_no_scores_until_measured(run: Path) -> None:
    write_decoder(run, beam_size=4, confidence={"beam": {"weights": None}})
    card = export(run)
    assert "not measured with this decoder or these confidences. Measure the model: `sbkit" in card
    assert "25.75" not in card and "0.2575" not in card
    for tell in (
        lambda: sbkit(["compare", str(run), str(run)]),
        lambda: compare_runs([run, run]),
        lambda: Run.open(run).scores,
    ):
        with pytest.raises(BundleError, match="those of another decoder .*this decoder"):
            tell()
    write_decoder(run)  # as one puts `earlier_bundle` in its place
    assert Run.open(run).scores["test"]["WER"] == 0.2575


def test_another_value_of_the_test_has_no_scores_until_measured(run: Path) -> None:
    for change in ({"beam_size": 4}, {"decoder.beam_size": 4}, {"report_by": ["gender"]}):
        with pytest.raises(BundleError, match="has no scores yet"):
            print(Run.open(run, change).scores)
    assert Run.open(run, {"num_workers": 7}).scores


def test_provenance_describes_only_what_the_decoder_uses() -> None:
    decoder = DECODER | {"attention_rescoring": True, "weights": None}
    record = make_provenance(weights=b"", decoder=decoder, language_models=b"")
    assert record.keys() == FIELD_PHRASES.keys()
    assert describe_provenance(record).endswith("decoder beam, beam 8, attention rescoring")
