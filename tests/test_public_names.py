"""`sbkit` offers the names of its files; importing it, or a folder, does not import torch."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import sbkit
from sbkit import PUBLIC
from sbkit.audio.io import read_audio, write_wav
from sbkit.base.errors import SbkitError
from sbkit.bundle.bundle import read_bundle
from sbkit.config.hparams import load_hparams, read_spec
from sbkit.evaluate.compare import compare_runs
from sbkit.export.export import export_run
from sbkit.lm.arpa import read_arpa, write_arpa
from sbkit.lm.kneser_ney import train
from sbkit.lm.ngram import SPECIAL
from sbkit.runtime.runtimes import load_bundle
from tests.processes import run_fresh
from tests.runs import ROOT
from tests.runtime.bundles import make_run

PACKAGES = [
    ".".join(file.parent.relative_to(ROOT).parts)
    for file in sorted((ROOT / "sbkit").rglob("__init__.py"))
]


def test_public_names_are_those_of_their_files() -> None:
    for name, module in PUBLIC.items():
        assert getattr(sbkit, name) is getattr(import_module(module), name)
    assert {"Run", "load_bundle"} < {*PUBLIC} < {*dir(sbkit)}
    assert "__version__" not in PUBLIC


def test_public_functions_take_paths_as_strings(tmp_path: Path) -> None:
    """Reading again what was written shows that both take a string."""
    run = str(make_run(tmp_path / "run"))
    bundle = f"{tmp_path}/bundle"
    export_run(run, bundle)
    assert read_bundle(bundle).config == load_bundle(bundle).config
    yaml = f"{run}/hyperparams.yaml"
    assert {*read_spec(yaml).settings} < {*load_hparams(yaml, {})}
    model = train("call the office", order=2).model  # one sentence, not letters
    write_arpa(model, f"{tmp_path}/lm.arpa")
    assert read_arpa(f"{tmp_path}/lm.arpa").words == (*SPECIAL, "call", "office", "the")
    write_wav(f"{tmp_path}/tone.wav", np.ones(8000, np.int16), 8000.0)
    assert len(read_audio(f"{tmp_path}/tone.wav", 16_000.0)) == 16_000
    with pytest.raises(SbkitError, match=f"{run} has no scores yet"):
        compare_runs([run, run])


HEAVY = "torch torchaudio speechbrain datasets matplotlib numpy"
IMPORTS = {  # what is run, and the packages that it must not import
    "import sbkit": HEAVY,
    "import sbkit.commands.cli": HEAVY,
    "import sbkit.config.hparams": HEAVY,
    "import sbkit.tasks.asr.live": "torch",
    "import tools.show": "torch datasets",
    "from sbkit.data.corpus import corpora; corpora()": "torch lhotse",
    f"import {', '.join(PACKAGES)}": "torch",
}


@pytest.mark.parametrize(("code", "packages"), IMPORTS.items())
def test_import_prints_nothing_and_imports_nothing_heavy(code: str, packages: str) -> None:
    heavy = {*packages.split()}
    process = run_fresh(f"{code}\nimport sys\nprint({heavy} & {{*sys.modules}})")
    assert (process.stdout, process.stderr) == ("set()\n", "")
