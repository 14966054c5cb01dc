"""The end of a run: what it fits in memory is what its bundle computes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sbkit.base.errors import PARTLY_DONE, BundleError
from sbkit.checkpoint.run_config import read_run_config
from sbkit.decoding.fit import FittedDecoder
from sbkit.export.export import collect_files, set_decoder, write_bundle
from sbkit.run import export_and_test
from sbkit.run.run import Run
from sbkit.runtime.runtimes import load_bundle
from sbkit.runtime.scoring import sample_validation
from tests.runs import Workplace, read_json
from tests.runtime.bundles import ROOT, make_run

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

    monkeypatch.setattr(export_and_test, "sample_validation", sample)
    monkeypatch.setattr("recipes.asr.recipe.AsrBrain._averaging_error", lambda brain: 0.0)
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


def restart(run: Path) -> None:
    """Save other weights of the same epoch, with the same metrics, in the place of the first."""
    (file,) = run.glob("checkpoints/*/model.ckpt")
    torch.save({name: value + 1 for name, value in torch.load(file).items()}, file)
    (file.parent / "checksums.json").unlink()


def declare(run: Path, **values: object) -> None:
    config = read_run_config(run)
    replace(config, values={**config.values, **values}).write(run)


CHANGES: dict[str, Callable[[Path], object]] = {
    "speed": lambda run: declare(run, num_workers=7),
    "weights": restart,
    "decoder": lambda run: declare(run, **{"decoder.beam_size": 3}),
    "language models": lambda run: (run / "lm.safetensors").write_bytes(b"others"),
    "labels": lambda run: (run / "bundle/tokenizer.model").write_bytes(b"of another run"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_bundle_is_finished_until_its_run_changes(change: str, tmp_path: Path) -> None:
    """Also with a decoder that `sbkit tune` has set: it used to be fitted again by the next test.

    Epochs used to be compared, not weights.
    """
    run = make_run(tmp_path / "run", ROOT / "hparams/ctc.yaml", average_checkpoints=1)
    bundle = run / "bundle"

    def is_finished() -> bool:
        return export_and_test.has_finished_bundle(bundle, collect_files(run), is_fitted=True)

    bundle.mkdir()
    write_bundle(bundle, collect_files(run))
    assert not is_finished()  # nothing is fitted yet
    set_decoder(bundle, bundle, FittedDecoder(None, None, {}, ["dev"]), None)
    assert is_finished()
    CHANGES[change](run)
    assert is_finished() == (change == "speed")
