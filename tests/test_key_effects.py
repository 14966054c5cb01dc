"""What `tools.key_effects` sees is compared with what each key declares."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from docs.reference import declared_keys
from sbkit.config.keys import KEYS, Key
from sbkit.data import batch
from sbkit.data.sampler import TrainSampler
from tests.runs import ROOT
from tools import key_effects
from tools.key_effects import BASES, Trial, try_all, verdict

RESUMED = {"when resumed": True, "after training": False}
KEY = Key(affects={"weights"}, may_change="when resumed")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        ({"seen": frozenset({"rows", "weights"})}, "changes rows"),
        ({"seen": frozenset({"results"})}, "does not change weights, without a word"),
        ({"seen": frozenset()}, "does not change weights, without a word"),
        ({"seen": frozenset(), "message": "`lr` has no effect"}, ""),
        ({"key": "nonfinite_patience", "seen": frozenset()}, ""),  # the tool says why
        ({"went_on": dict.fromkeys(RESUMED, True)}, "a run goes on after training"),
        ({"went_on": dict.fromkeys(RESUMED, False)}, "a run is refused when resumed"),
        ({"declared": replace(KEY, affects=set())}, "changes results, weights; a run is refused"),
    ],
)
def test_verdict_names_what_is_not_declared(changes: Mapping[str, Any], expected: str) -> None:
    trial = Trial("ctc", "lr", KEY, "", frozenset({"weights", "results"}), "", RESUMED)
    said = verdict(replace(trial, **changes))
    assert said.startswith(expected) and bool(said) is bool(expected)


def test_each_yaml_is_tried() -> None:
    assert {*BASES} == {file.stem for file in (ROOT / "hparams").glob("*.yaml")}


@pytest.mark.release
@pytest.mark.slow(120)
def test_keys_do_what_they_declare_and_planted_faults_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "lr,beam_size,log_every,seed,concat_prob,text"
    (tmp_path / "right").mkdir()
    right = try_all([f"ctc:{names}"], tmp_path / "right", lambda row: None)
    assert [trial.key for trial in right if verdict(trial)] == []

    changes: dict[str, Key] = {
        "lr": replace(KEYS["lr"], affects={"results"}, may_change="never"),
        "beam_size": Key(affects={"weights"}, may_change="after training"),
        "log_every": replace(KEYS["log_every"], affects={"results"}),
        "seed": replace(KEYS["seed"], may_change="when resumed"),
    }
    monkeypatch.setattr(key_effects, "declared_keys", lambda file: declared_keys(file) | changes)
    monkeypatch.setattr(  # an ignored key
        batch, "TrainSampler", lambda **options: TrainSampler(**options | {"concat_prob": 0.5})
    )
    (tmp_path / "wrong").mkdir()
    wrong = try_all([f"ctc:{names}"], tmp_path / "wrong", lambda row: None)
    assert {trial.key: verdict(trial) for trial in wrong if verdict(trial)} == {
        "lr": "changes weights; a run goes on when resumed",
        "beam_size": "does not change weights, without a word",
        "log_every": "does not change results, without a word",
        "seed": "a run is refused when resumed",
        "concat_prob": "does not change weights, without a word",
    }
