"""Hyperparameters, objects and the saved YAML agree."""

import copy
import json
import operator
import pickle
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from hyperpyyaml import load_hyperpyyaml

from sbkit.commands.cli import run
from sbkit.config.hparams import Settings, load_hparams, read_spec
from sbkit.config.keys import KEYS, REQUIRED
from sbkit.config.overrides import parse_overrides
from sbkit.train.setup import declare_run
from tests.config.conftest import YAML, refusal
from tests.processes import run_fresh
from tests.runs import ROOT


def test_settings_are_the_plain_values(path: Path) -> None:
    assert read_spec(path).settings == {
        **{"seed": 3407, "lr": 0.001, "batch_seconds": 60.0, "language": "en", "mixed": False},
        **{"precision": "fp32", "augment": {"speeds": [0.9, 1.0], "masks": {"time": 2}}},
        **{"double": 120.0, "output_folder": "results/3407", "third": 3, "limit": None, "free": {}},
        **{"betas": (0.9, 0.98), "sizes": (3, 4), "freeze": {"CNN": "always"}},
        **{"names": ["b"], "snr_db": [5, 30]},
    }


def test_reading_settings_runs_no_code_and_imports_no_torch(path: Path) -> None:
    path.write_text(YAML + f"bad: !apply:os.mkdir [{path.parent / 'made'}]\nnet: !new:torch.Nope\n")
    script = (
        "import sys; from pathlib import Path; from sbkit.config.hparams import read_spec;"
        f"read_spec(Path({str(path)!r})); assert 'torch' not in sys.modules"
    )
    assert run_fresh(script).returncode == 0
    assert not (path.parent / "made").exists()


def test_settings_objects_and_the_saved_file_agree(path: Path) -> None:
    overrides = parse_overrides(["--seed=7", "--ratio.numerator=5", "--augment.speeds=[1.1]"])
    hparams, settings = load_hparams(path, overrides), read_spec(path, overrides).settings
    assert {key: hparams[key] for key in settings} == settings
    assert hparams["ratio"] == hparams["also"] == Fraction(5, 7)
    assert "__hidden" not in hparams
    saved = path.with_name("hyperparams.yaml")
    saved.write_text(read_spec(path, overrides).one_file)
    assert read_spec(saved).settings == settings
    assert read_spec(saved, {"seed": 8}).settings["output_folder"] == "results/8"
    assert load_hparams(saved, {})["ratio"] == Fraction(5, 7)


def test_tuples_are_saved_after_hyperpyyaml_has_changed_ruamel(path: Path) -> None:
    """It teaches all of ruamel its tuples; after a failure all constructors stay deep."""
    bad = path.with_name("bad.yaml")
    bad.write_text("bad: !new:fractions.Fraction [1, 0]\n")
    refusal(bad, {})
    load_hyperpyyaml("a: 1")
    saved = path.with_name("hyperparams.yaml")
    saved.write_text(read_spec(path, parse_overrides(["--limit=(1, 2)"])).one_file)
    expected = {"betas": (0.9, 0.98), "sizes": (3, 4), "limit": (1, 2)}
    for values in (read_spec(saved).settings, load_hparams(saved, {})):
        assert {key: values[key] for key in expected} == expected


def test_keys_that_a_yaml_leaves_out_have_their_defaults_wherever_they_are_declared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    yaml = tmp_path / "own.yaml"
    text = (ROOT / "hparams/ctc.yaml").read_text("utf-8")
    yaml.write_text(re.sub(r"(?m)^(    )?label_smoothing: .*\n", "", text), "utf-8")
    optional = {name: key.default for name, key in KEYS.items() if key.default is not REQUIRED}
    optional = {name: value for name, value in optional.items() if f"\n{name}:" not in text}
    assert read_spec(yaml).settings.items() >= optional.items()
    overrides = parse_overrides(["--log_every=7", "--label_smoothing=0.2"])  # one is the recipe's
    (saved := tmp_path / "hyperparams.yaml").write_text(declare_run(yaml, overrides).one_file)
    changed = {**optional, "log_every": 7, "label_smoothing": 0.2}
    for settings in (declare_run(yaml, overrides).settings, read_spec(saved).settings):
        assert settings.items() >= changed.items()
    assert "log_everyy" in refusal(yaml, {"log_everyy": 7})
    for arguments, is_shown in (((), False), (("--all",), True), (("--stall_seconds=5",), True)):
        run(["config", str(yaml), *arguments])
        assert ("\nstall_seconds: " in capsys.readouterr().out) == is_shown
    run(["check", str(yaml), "--defaults", "--log_every=7"])
    output = capsys.readouterr().out
    assert "`stall_seconds` is 900 by default." in output and "`log_every`" not in output
    (tmp_path / "theirs.yaml").write_text("seed: 1\n")  # a YAML of SpeechBrain's
    assert read_spec(tmp_path / "theirs.yaml").settings == {"seed": 1}


@pytest.mark.parametrize("read", [lambda f: read_spec(f).settings, lambda f: load_hparams(f, {})])
def test_settings_cannot_be_changed_in_depth(
    read: Callable[[Path], Settings], tmp_path: Path
) -> None:
    """What is recorded of a run stays what it was built from."""
    file = tmp_path / "own.yaml"
    file.write_text("text: {case: lower, punctuation: [a, {b: 1}]}\n")
    settings = read(file)
    text = settings["text"]
    expected = {"case": "lower", "punctuation": ["a", {"b": 1}]}
    for change in (
        lambda: operator.setitem(text, "case", "keep"),
        lambda: operator.delitem(text, "case"),
        lambda: text.update(case="keep"),
        lambda: text.pop("case"),
        lambda: text["punctuation"].append("!"),
        lambda: operator.iadd(text["punctuation"], ["!"]),
        lambda: text["punctuation"][1].clear(),
        lambda: settings["text"].setdefault("numbers", "spell"),
    ):
        with pytest.raises(TypeError, match="The settings of a run cannot be changed. Pass over"):
            change()
    assert settings["text"] == expected and json.loads(json.dumps(text)) == expected
    for same in (copy.deepcopy(text), pickle.loads(pickle.dumps(text))):
        assert same == expected
        with pytest.raises(TypeError):
            same["punctuation"].sort()
    assert {**text, "case": "keep"} == {**expected, "case": "keep"}
