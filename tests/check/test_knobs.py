"""Who reads a key: a reference, the code of the recipe or of sbkit, an option."""

from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

from recipes.asr.recipe import ASR
from sbkit.check.knobs import names_read_by, unread
from sbkit.config.document import read_document
from sbkit.config.hparams import read_knobs
from sbkit.train.recipe import load_recipe
from tests.runs import ROOT

CODE = """
def main(hparams, brain):
    print(hparams["named"], brain.hparams.attribute, hparams.get("asked"), brain.unasked)
    RANGES = {"only_ranged": 1}
"""


@pytest.mark.parametrize(
    ("yaml", "expected"),
    [
        ("named: 1\nattribute: 1\nasked: 1", []),
        ("unasked: 1\nonly_ranged: 1", ["unasked", "only_ranged"]),
        ("called: !apply:os.getcwd", []),  # it had its effect when it was built
        ("max_grad_norm: 1", []),  # an option of SpeechBrain's Brain
        ("size: 1\nsizes: {a: 1}\nnamed: !ref <size> * <sizes[a]>", []),
        ("named: 1\nspare: !new:torch.nn.Linear [1, 1]", ["spare"]),
    ],
)
def test_a_key_that_nobody_reads_is_found(
    yaml: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{tmp_path.name}.py").write_text(CODE)
    (tmp_path / "it.yaml").write_text(yaml + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    import_module(tmp_path.name)
    names = names_read_by(ASR, tmp_path.name)
    assert list(unread(read_document(tmp_path / "it.yaml"), names)) == expected


def test_a_file_beside_the_users_recipe_reads_its_knobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "helper_of_a_test.py").write_text("def read(knobs, split):\n    knobs['dialect']\n")
    (tmp_path / "recipe_of_a_test.py").write_text("from helper_of_a_test import read\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = import_module("recipe_of_a_test")
    assert "dialect" not in names_read_by(ASR)
    recipe = replace(ASR, prepare_splits=partial(own.read, split="train"))
    assert "dialect" in names_read_by(recipe)


@pytest.mark.parametrize(
    "yaml", sorted((ROOT / "hparams").glob("*.yaml")), ids=lambda yaml: yaml.stem
)
def test_every_knob_is_read(yaml: Path, tmp_path: Path) -> None:
    names = names_read_by(load_recipe(read_knobs(yaml, {"data_folder": None}), yaml))
    assert list(unread(read_document(yaml), names)) == []
    odd = tmp_path / "odd.yaml"
    odd.write_text(f"base: {yaml}\nforgotten_knob: 3\n", encoding="utf-8")
    assert list(unread(read_document(odd), names)) == ["forgotten_knob"]
