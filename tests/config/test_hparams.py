"""Hyperparameters, objects and the saved YAML agree; building leaves ruamel as it was."""

import subprocess
import sys
from datetime import date
from fractions import Fraction
from pathlib import Path

import ruamel.yaml
from ruamel.yaml.constructor import BaseConstructor

from sbkit.config.document import clean_ruamel
from sbkit.config.hparams import load_hparams, read_knobs, save_yaml
from sbkit.config.overrides import parse_overrides
from tests.config.conftest import YAML, refusal


def test_knobs_are_the_plain_values(path: Path) -> None:
    assert read_knobs(path, {}) == {
        **{"seed": 3407, "lr": 0.001, "batch_seconds": 60.0, "language": "en", "mixed": False},
        **{"precision": "fp32", "augment": {"speeds": [0.9, 1.0], "masks": {"time": 2}}},
        **{"double": 120.0, "output_folder": "results/3407", "third": 3, "limit": None, "free": {}},
        **{"betas": (0.9, 0.98), "sizes": (3, 4), "freeze": {"CNN": "always"}},
        **{"names": ["b"], "since": date(2024, 1, 1)},
    }


def test_reading_knobs_runs_no_code_and_imports_no_torch(path: Path) -> None:
    path.write_text(YAML + f"bad: !apply:os.mkdir [{path.parent / 'made'}]\nnet: !new:torch.Nope\n")
    script = (
        "import sys; from pathlib import Path; from sbkit.config.hparams import read_knobs;"
        f"read_knobs(Path({str(path)!r}), {{}}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert not (path.parent / "made").exists()


def test_knobs_objects_and_the_saved_file_agree(path: Path) -> None:
    overrides = parse_overrides(["--seed=7", "--ratio.numerator=5", "--augment[speeds]=[1.1]"])
    hparams, knobs = load_hparams(path, overrides), read_knobs(path, overrides)
    assert {key: hparams[key] for key in knobs} == knobs
    assert hparams["ratio"] == hparams["also"] == Fraction(5, 7)
    assert "__hidden" not in hparams
    saved = path.with_name("hyperparams.yaml")
    save_yaml(saved, path, overrides)
    assert read_knobs(saved, {}) == knobs
    assert read_knobs(saved, {"seed": 8})["output_folder"] == "results/8"
    assert load_hparams(saved, {})["ratio"] == Fraction(5, 7)


def test_ruamel_stays_as_it_was(path: Path) -> None:
    """HyperPyYAML teaches all of ruamel its tuples, and after a failure its deep constructors."""
    path.write_text(YAML + "bad: !new:fractions.Fraction [1, 0]\n")
    with clean_ruamel():  # other tests, SpeechBrain's recipes among them, leave rules behind
        refusal(path, {})
        assert BaseConstructor.construct_object.__defaults__ == (False,)
        assert ruamel.yaml.YAML(typ="safe", pure=True).load("a: (1, 2)") == {"a": "(1, 2)"}
