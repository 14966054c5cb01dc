"""A torchaudio that does not fit torch is explained in a sentence, wherever it is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sbkit.base.imports import explain_torchaudio
from tests.runs import ROOT

CUDA = (
    'raise RuntimeError("Detected that PyTorch and TorchAudio were compiled with different CUDA '
    'versions. PyTorch has CUDA version 13.2 whereas TorchAudio has CUDA version 13.0.")'
)
LIBRARY = 'raise OSError("Could not load this library: /x/torchaudio/lib/_torchaudio.abi3.so")'
MISSING = "raise ModuleNotFoundError(\"No module named 'torchaudio'\")"
COMMANDS = {"train.py": ["train.py", "hparams/ctc.yaml"], "doctor": ["-m", "sbkit", "doctor"]}


@pytest.mark.parametrize(
    ("command", "code"),
    [("train.py", CUDA), ("train.py", LIBRARY), ("train.py", MISSING), ("doctor", CUDA)],
    ids=["cuda", "library", "missing", "doctor"],
)
def test_torchaudio_of_another_torch_is_explained(command: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "torchaudio").mkdir()
    (tmp_path / "torchaudio/__init__.py").write_text(code + "\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    words, variables = [sys.executable, *COMMANDS[command]], {**os.environ, "PYTHONPATH": path}
    process = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=variables)
    lines = [line for line in (process.stdout + process.stderr).splitlines() if "INDEX" in line]
    assert process.returncode == (2 if command == "train.py" else 0)
    assert len(lines) == 1 and "cannot be used with torch" in lines[0]
    assert "Traceback" not in process.stderr


def test_missing_torchaudio_is_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.11.0", "torchaudio": None}
    monkeypatch.setattr("sbkit.base.versions.versions", lambda: installed)
    sentence = explain_torchaudio(ImportError())
    assert sentence.startswith("torchaudio is not installed, and torch is 2.11.0. To keep")
