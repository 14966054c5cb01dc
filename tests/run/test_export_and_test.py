"""The end of a run: what it fits in memory is what its bundle computes."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest
from torch import nn

from sbkit.base.errors import PARTLY_DONE, BundleError, ConfigError, SbkitError
from sbkit.export.formats import PARITY_FILE
from sbkit.lm.language_models import save, tokenizer_digest
from sbkit.run import export_and_test
from sbkit.run.export_and_test import write_declared_formats
from sbkit.run.run import Run
from sbkit.runtime.runtimes import load_bundle
from sbkit.tasks.asr import fitting
from sbkit.tasks.asr.fitting import make_decoder, sample_validation
from tests.decoding.spoken import char_tokenizer
from tests.runs import Workplace, read_json

Captured = pytest.CaptureFixture[str]
OPTIONS = ("--number_of_epochs=2", "--eval_precision=bf16", "--attention_rescoring=True")


@pytest.mark.slow
def test_decoder_is_fitted_to_what_the_loaded_bundle_computes(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities in memory, with the mean of two checkpoints, equal those of the bundle."""
    samples: list[Any] = []

    def sample(bundle: Any, sets: Any, **options: Any) -> Any:
        assert not (tmp_path / "bundle").exists()
        samples.append(sample_validation(bundle, sets, **options))
        return samples[0]

    monkeypatch.setattr(fitting, "sample_validation", sample)
    monkeypatch.setattr("sbkit.train.brain.averaging_error", lambda brain: 0.0)
    assert workplace.train_here(tmp_path, *OPTIONS) == 0
    assert len(read_json(tmp_path / "bundle/config.json")["checkpoints"]) == 2
    bundle = load_bundle(tmp_path / "bundle", precision="bf16")
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    valid = Run.open(tmp_path).prepare_splits().valid
    loaded = sample_validation(bundle, valid, with_attention=True)
    (in_memory,) = samples
    assert [utterance.id for utterance in in_memory] == [utterance.id for utterance in loaded]
    assert len(loaded) == 4
    for before, after in zip(in_memory, loaded, strict=True):
        np.testing.assert_array_equal(before.log_probs, after.log_probs)
        assert before.attention is not None and after.attention is not None
        assert before.attention.score([(3, 4, 5)]) == after.attention.score([(3, 4, 5)])


@pytest.mark.slow
def test_bundle_that_does_not_load_gets_no_name_and_the_checkpoint_is_tested(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BundleError("Its parts do not fit.")

    monkeypatch.setattr(export_and_test, "load_bundle", refuse)
    assert workplace.train_here(tmp_path, "--number_of_epochs=1") == PARTLY_DONE
    output, error = capsys.readouterr()
    assert "because no bundle can hold it. Its parts do not fit." in error
    assert "no bundle can hold its model: train.log says why" in error.splitlines()[-1]
    assert "next: " not in output
    assert not [*tmp_path.glob("*bundle*")]
    assert "CER" in read_json(tmp_path / "summary.json")["test"]["test"]


@pytest.mark.parametrize(
    ("has_decoder", "ctc_weight", "rescores"),
    [(True, 0.8, True), (True, 1.0, False), (False, 0.8, False)],  # `seq_lin` may be the middle's
)
def test_decoder_is_tuned_to_rescore_if_an_attention_decoder_was_trained(
    has_decoder: bool, ctc_weight: float, rescores: bool, tmp_path: Path
) -> None:
    tokenizer = char_tokenizer(tmp_path, ["a fox"])
    save({}, tmp_path / "lm", metadata={"tokenizer": tokenizer_digest(tokenizer)})
    network = SimpleNamespace(has_decoder=has_decoder, seq_lin=nn.Linear(1, 1))
    model = SimpleNamespace(network=network)
    bundle: Any = SimpleNamespace(model=model, tokenizer=tokenizer, decoder=None)
    settings = {"ctc_weight": ctc_weight, "attention_rescoring": True}
    decoder = make_decoder(bundle, settings, tmp_path / "lm", None, None)
    assert decoder.attention_rescoring == rescores
    refused = pytest.raises(ConfigError, match="needs a trained attention decoder")
    with nullcontext() if rescores else refused:
        make_decoder(bundle, settings, tmp_path / "lm", None, True)


def test_only_missing_formats_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    formats, modules = ["onnx", "sherpa-onnx"], ("mine",)
    reports = {"onnx": {"fp32": {"reasons": ["It differs"]}}}
    add_formats = Mock(side_effect=[reports, SbkitError("No clips.")])
    monkeypatch.setattr(export_and_test, "declared_formats", lambda *_: formats)
    monkeypatch.setattr(export_and_test, "add_formats", add_formats)
    monkeypatch.setattr(export_and_test, "user_modules_of", lambda _: modules)
    spec = SimpleNamespace(folder=tmp_path, settings={})
    run: Any = SimpleNamespace(spec=spec, recipe=SimpleNamespace(task=None))
    for name in formats:
        write_declared_formats(run)
        (tmp_path / "bundle" / name).mkdir(parents=True)
        (tmp_path / "bundle" / name / PARITY_FILE).touch()
    write_declared_formats(run)
    expected = [call(tmp_path, names, modules) for names in (formats, ["sherpa-onnx"])]
    assert add_formats.call_args_list == expected
    assert caplog.messages == [
        "onnx (fp32) is not written: It differs.",
        "No format is written: No clips.",
    ]
