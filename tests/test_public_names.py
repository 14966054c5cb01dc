"""A package's public names are its modules' names; importing packages does not import torch."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from sbkit.audio import read_audio, write_wav
from sbkit.base import SbkitError
from sbkit.bundle import BundleFiles, read_bundle
from sbkit.checkpoint import AveragedCheckpoints, RunConfig, read_run_config
from sbkit.config import load_hparams, read_document, read_knobs
from sbkit.evaluate import compare_runs
from sbkit.export import export_run, exported_bundle
from sbkit.lm import read_arpa, train, write_arpa
from sbkit.lm.ngram import SPECIAL
from sbkit.runtime import audio_blocks, load_bundle
from tests.runs import ROOT
from tests.runtime.bundles import make_run

PACKAGES = {
    ".".join(file.parent.relative_to(ROOT).parts): file
    for file in sorted((ROOT / "sbkit").rglob("__init__.py"))
}


def public_names(file: Path) -> list[tuple[str, str]]:
    """Return the modules and names that an `__init__.py` imports for type checkers."""
    blocks = (node for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.If))
    imports = (node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom))
    return [(str(node.module), alias.name) for node in imports for alias in node.names]


@pytest.mark.parametrize("package", [name for name, file in PACKAGES.items() if public_names(file)])
def test_lazy_names_resolve_to_those_that_type_checkers_see(package: str) -> None:
    for module, name in public_names(PACKAGES[package]):
        assert getattr(import_module(package), name) is getattr(import_module(module), name)
        assert name in dir(import_module(package))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = import_module(package).nothing


def test_public_functions_take_paths_as_strings(tmp_path: Path) -> None:
    """Reading again what was written shows that both take a string."""
    run = str(make_run(tmp_path / "run"))
    yaml = f"{run}/hyperparams.yaml"
    bundle = f"{tmp_path}/bundle"
    export_run(run, bundle)
    with exported_bundle(bundle) as folder:
        assert folder == Path(bundle)
    assert BundleFiles(bundle).config == read_bundle(bundle).config == load_bundle(bundle).config
    assert read_document(yaml).path == Path(yaml)
    assert {*read_knobs(yaml, {})} < {*load_hparams(yaml, {})}
    config = RunConfig.from_yaml(yaml, {}, label_file=f"{run}/tokenizer.model")
    config.write(str(tmp_path))
    assert read_run_config(str(tmp_path)).labels == config.labels == read_run_config(run).labels
    assert config.check_resumable(str(tmp_path)) is None
    averaged = AveragedCheckpoints(("a",), ("a", "b"), {})
    averaged.write(str(tmp_path))
    assert AveragedCheckpoints.read(str(tmp_path)) == averaged
    model = train("call the office", order=2).model  # one sentence, not letters
    write_arpa(model, f"{tmp_path}/lm.arpa")
    assert (
        read_arpa(f"{tmp_path}/lm.arpa").words == model.words == (*SPECIAL, "call", "office", "the")
    )
    write_wav(f"{tmp_path}/tone.wav", np.ones(8000, np.int16), 8000.0)
    assert len(read_audio(f"{tmp_path}/tone.wav", 16_000.0)) == 16_000
    blocks = audio_blocks(f"{tmp_path}/tone.wav", 16_000)
    assert sum(map(len, blocks)) == 16_000
    with pytest.raises(SbkitError, match=f"no common test set: {run} has none"):
        compare_runs([run, run])


def test_importing_packages_does_not_import_torch() -> None:
    code = f"import sys, {', '.join(PACKAGES)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
