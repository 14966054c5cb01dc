"""Who reads a key: a reference, the code, an option; and at what depth nobody does."""

import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.asr.recipe import ASR
from sbkit.check.yaml import unread as module
from sbkit.check.yaml.unread import read_by, source_of, sources, unread
from sbkit.config.document import dotted, read_document
from sbkit.train.run import Run
from tests.runs import ROOT

CODE = '''
"""A docstring names "only_told"."""

def main(hparams, brain):
    """So does this: "only_told"."""
    print(hparams["named"], brain.hparams.attribute, hparams.get("asked"), brain.other)
    print(hparams["indexed"]["inner"], hparams["indexed"].get("deeper"))
    make(**hparams["handed_on"])
    # hparams["only_commented"]

class Part:
    RANGES: dict = {"only_ranged": 1, **dict.fromkeys(("also_ranged",), 2)}
'''


@pytest.mark.parametrize(
    ("yaml", "expected"),
    [
        ("named: 1", []),
        ("attribute: 1", []),
        ("asked: 1", []),
        ("other: 1", ["other"]),
        ("only_told: 1", ["only_told"]),
        ("only_commented: 1", ["only_commented"]),
        ("only_ranged: 1\nalso_ranged: 2", ["only_ranged", "also_ranged"]),
        ("called: !apply:os.getcwd", []),  # it had its effect when it was built
        ("max_grad_norm: 1", []),  # an option of SpeechBrain's Brain
        ("__set_seed: !apply:torch.manual_seed [3]", []),
        ("size: 1\nnamed: !ref <size> * 2", []),
        ("sizes: {first: 1, second: 2}\nnamed: !ref <sizes[first]>", ["sizes.second"]),
        ("sizes: {first: 1, second: 2}\nnamed: !ref <sizes>", []),
        ("indexed: {inner: 1, deeper: 2, iner: 3}", ["indexed.iner"]),
        ("indexed: {inner: {named: 1}, deeper: {}}", []),
        ("handed_on: {anything: 1}", []),
        ("named: !new:torch.nn.Linear {in_features: 1, out_features: 1}", []),
        ("named: 1\nspare: !new:torch.nn.Linear [1, 1]", ["spare"]),
        ("indexed: !include:inner.yaml", ["indexed.spare"]),
    ],
)
def test_a_key_that_nobody_reads_is_found(yaml: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "inner.yaml").write_text("base: 1\ninner: !ref <base>\nspare: 2\n")
    (tmp_path / "it.yaml").write_text(yaml + "\n")
    found = unread(read_document(tmp_path / "it.yaml"), source_of(tmp_path / "code.py").reading)
    assert list(map(dotted, found)) == expected


def test_the_sources_of_a_recipe_are_its_script_and_what_it_imports() -> None:
    files = {str(file.relative_to(ROOT)) for file in sources(ASR) if ROOT in file.parents}
    assert {"sbkit/train/main.py", "recipes/prepare.py", "sbkit/train/brain.py"} <= files
    assert not any(file.startswith(("tests/", "sbkit/check/", "sbkit/config/")) for file in files)
    assert all(ROOT in file.parents for file in sources(ASR))


def test_a_corpus_and_a_partial_of_the_users_read_their_knobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "corpus_of_a_test.py").write_text("def read(knobs, split):\n    knobs['dialect']\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = import_module("corpus_of_a_test")
    assert "dialect" not in read_by(ASR).named
    assert "dialect" in read_by(ASR, "corpus_of_a_test").named
    recipe = replace(ASR, prepare_splits=partial(own.read, split="train"))
    assert "dialect" in read_by(recipe, "None").named


def test_what_is_installed_reads_its_knobs_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    here = sources(ASR)
    module._own_file.cache_clear()
    monkeypatch.setattr(module, "INSTALLED", (*module.INSTALLED, ROOT.name))
    try:
        assert sources(ASR) == here
    finally:
        module._own_file.cache_clear()


def test_what_another_environment_or_a_compiler_made_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A venv may build on the packages of the system, as in a container."""
    packages = tmp_path / "system/site-packages"
    packages.mkdir(parents=True)
    (packages / "package_of_a_test.py").touch()
    (tmp_path / "compiled_of_a_test.so").write_bytes(b"\x7fELF\0")
    compiled = SimpleNamespace(__file__=str(tmp_path / "compiled_of_a_test.so"))
    monkeypatch.setitem(sys.modules, "compiled_of_a_test", compiled)  # type: ignore[misc]
    (tmp_path / "own_of_a_test.py").write_text(
        "import compiled_of_a_test\nimport package_of_a_test\n"
    )
    monkeypatch.syspath_prepend(packages)
    monkeypatch.syspath_prepend(tmp_path)
    import_module("own_of_a_test")
    assert sources(ASR, "own_of_a_test") == {*sources(ASR), tmp_path / "own_of_a_test.py"}


@pytest.mark.parametrize(
    "yaml", sorted((ROOT / "hparams").glob("*.yaml")), ids=lambda yaml: yaml.stem
)
def test_every_knob_is_read(yaml: Path, tmp_path: Path) -> None:
    reading = read_by(Run(yaml, {"data_folder": None}).recipe)
    assert list(unread(read_document(yaml), reading)) == []
    odd = tmp_path / "odd.yaml"
    odd.write_text(yaml.read_text(encoding="utf-8") + "\nforgotten_knob: 3\n", encoding="utf-8")
    assert list(unread(read_document(odd), reading)) == [("forgotten_knob",)]
