"""What runs a model imports no SpeechBrain, unless the model's own parts are SpeechBrain's."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from sbkit.serve.app import TRANSCRIPTION_ROUTE
from tests.processes import ROOT
from tests.runs import prompts
from tests.runtime.bundles import WITHOUT_DATA, make_bundle, make_run
from tests.serve.server import wait_for

COMMAND = (sys.executable, "-m", "sbkit")


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment in which SpeechBrain cannot be imported."""
    folder = tmp_path_factory.mktemp("without")
    (folder / "speechbrain.py").write_text("raise AssertionError('SpeechBrain is imported')")
    return {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}


@pytest.fixture(scope="module")
def table(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("table") / "test.csv"
    rows = [*prompts(asterisk_english, "test")][:2]
    with file.open("w", newline="") as stream:
        csv.writer(stream).writerows([("path", "sentence"), *rows])
    return file


@pytest.mark.slow
def test_inference_imports_no_speechbrain(
    table: Path, variables: dict[str, str], tmp_path: Path
) -> None:
    run, bundle = make_run(tmp_path / "run", **WITHOUT_DATA), tmp_path / "bundle"
    clip = table.read_text().splitlines()[1].partition(",")[0]
    for words in (
        ["--help"],
        ["export", run, "--out", bundle],
        ["score", bundle, table],
        ["transcribe", bundle, clip],
    ):
        command = [*COMMAND, *map(str, words)]
        process = subprocess.run(command, env=variables, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
    log = tmp_path / "log"
    with log.open("w") as stderr:
        command = [*COMMAND, "serve", str(bundle), "--port", "0", "--device", "cpu"]
        server = subprocess.Popen(command, env=variables, stdout=stderr, stderr=stderr)
    try:
        wait_for(lambda: "running on" in log.read_text())
        (url,) = re.findall(r"serving \w+.* at (\S+)", log.read_text())
        wait_for(lambda: httpx2.get(f"{url}/health/ready").status_code == 200)
        files = {"file": Path(clip).read_bytes()}
        answer = httpx2.post(f"{url}{TRANSCRIPTION_ROUTE}", files=files, timeout=120.0)
        assert answer.status_code == 200
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_model_of_speechbrains_parts_imports_it(
    table: Path, variables: dict[str, str], tmp_path: Path
) -> None:
    bundle = make_bundle(tmp_path, yaml=ROOT / "hparams/ctc_speechbrain.yaml", **WITHOUT_DATA)
    command = [*COMMAND, "score", str(bundle), str(table)]
    blocked = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert "SpeechBrain is imported" in blocked.stderr
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
