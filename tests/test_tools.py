"""tools/demo with a small model, tools.show, tools.wheels, tools.mutate, and small benchmarks."""

import importlib
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from sbkit.base.errors import SbkitError
from tests import processes
from tests.runs import ROOT, Workplace
from tools import bench_data, show

SUMS = """def double(number):
    return number + number


def twice(number):
    return number + number  # untested
"""
SUMS_TEST = """from package.sums import double


def test_the_double():
    assert double(3) == 6
"""
IN_OWN_ENVIRONMENT = Path(sys.prefix) == ROOT / ".venv"


@pytest.mark.slow(30)
@pytest.mark.skipif(not IN_OWN_ENVIRONMENT, reason="tools/demo would make .venv: run tools/test")
def test_demo_trains_scores_exports_and_transcribes(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    _, *options = workplace.arguments(tmp_path / "run", "--number_of_epochs=1", "--check=false")
    command = [ROOT / "tools/demo", *options]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "Warning" not in process.stderr
    weights = f"{tmp_path}/run/bundle/model.safetensors"
    for text in ("epoch 1/1", "test: CER", "held-out clip:", weights):
        assert text in process.stdout


@pytest.mark.slow(20)
def test_runs_start_and_resume_on_an_invented_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No clip has another length than its table states, and the last starts are in mid-epoch."""
    outputs: list[str] = []

    def launch(folder: Path, arguments: Sequence[str], ranks: int) -> list[dict[str, float]]:
        file = folder / "figures.json"
        command = ["-m", *bench_data.START, file, *arguments]
        process = processes.run(command, ranks=ranks, SBKIT_CACHE=folder / "cache")
        assert process.returncode == 0, process.stderr
        outputs.append(process.stdout + process.stderr)
        return list(json.loads(file.read_text()))

    for name, value in {"launch": launch, "MIN_CLIPS": 16, "NUM_EVALUATED": 20}.items():
        monkeypatch.setattr(bench_data, name, value)
    arguments = ["--rows=200", f"--folder={tmp_path / 'data'}", "--ranks=2"]
    monkeypatch.setattr(sys, "argv", ["bench_data", *arguments])
    bench_data.main()
    _, _, _, _, _, *table = capsys.readouterr().out.splitlines()
    assert len(table) == len(outputs) == 5
    for row in table:
        resident, private, pss = map(float, row.split("|")[4:7])
        assert 0 < private <= pss <= resident
    assert not any(" lasts " in output for output in outputs)
    resumed = [", in epoch 1" in output for output in outputs]
    assert resumed == [False, False, False, True, True]


def test_show_folder_names_output_folder_of_command() -> None:
    yaml = str(ROOT / "hparams/ctc.yaml")
    assert show.folder([yaml, "--seed=5"]) == "results/ctc/en/5"
    assert show.folder([yaml, "--output_folder=there"]) == "there"


def write_wheel(folder: Path, name: str, version: str, *metadata: str) -> Path:
    """Write a wheel without code."""
    file = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    texts = {
        "METADATA": "\n".join(
            ("Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *metadata)
        ),
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "".join(f"{info}/{part},,\n" for part in ("METADATA", "WHEEL", "RECORD")),
    }
    with zipfile.ZipFile(file, "w") as wheel:
        for part, text in texts.items():
            wheel.writestr(f"{info}/{part}", text)
    return file


@pytest.mark.slow(30)
def test_wheels_install_pinned_versions_with_hashes_and_without_an_index(tmp_path: Path) -> None:
    pins = dict(re.findall(r"(?m)^(\w+)==(\S+)", (ROOT / "constraints.txt").read_text()))
    index = tmp_path / "index"
    index.mkdir()
    for name, version in (("torch", pins["torch"]), ("six", pins["six"]), ("six", "99")):
        write_wheel(index, name, version)
    cpu_wheel = write_wheel(index, "torch", f"{pins['torch']}+cpu")
    needs = ("Requires-Dist: torch", "Provides-Extra: more", "Requires-Dist: six; extra == 'more'")
    sbkit = write_wheel(tmp_path, "sbkit", "1.0", *needs)
    environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    environment["PIP_CONFIG_FILE"] = os.devnull

    def call(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", *map(str, words)]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    def versions_in(folder: Path) -> dict[str, str]:
        lines = (folder / "requirements.txt").read_text().splitlines()
        return dict(line.split(" ")[0].split("===") for line in lines)

    def install(folder: Path) -> subprocess.CompletedProcess[str]:
        target = ("--target", tmp_path / "installed", "--no-index", "--find-links", folder)
        return call(
            "pip", "install", "--require-hashes", *target, "-r", folder / "requirements.txt"
        )

    folder = tmp_path / "wheels"
    made = call("tools.wheels", folder, "cuda", sbkit, "more")
    assert (made.returncode, made.stdout) == (0, "3 packages, 0 MB\n"), made.stderr
    assert versions_in(folder) == {"sbkit": "1.0", "six": pins["six"], "torch": pins["torch"]}
    environment["PIP_FIND_LINKS"] = ""
    installed = install(folder)
    assert installed.returncode == 0, installed.stderr
    write_wheel(folder, "six", pins["six"], "Summary: another")
    assert "DO NOT MATCH THE HASHES" in install(folder).stderr

    environment["PIP_FIND_LINKS"] = str(index)
    assert call("tools.wheels", tmp_path / "cpu", "cpu", sbkit, "").returncode == 0
    assert versions_in(tmp_path / "cpu") == {"sbkit": "1.0", "torch": f"{pins['torch']}+cpu"}
    cpu_wheel.unlink()
    refused = call("tools.wheels", folder, "cpu", sbkit, "")
    assert (refused.returncode, "PIP_EXTRA_INDEX_URL" in refused.stderr) == (1, True)
    refused = call("tools.wheels", folder, "cuda", sbkit, "more,mroe")
    assert refused.stderr.endswith("sbkit has no extra mroe. It has more.\n")


def test_mutate_prints_fault_that_no_test_notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cosmic_ray")
    mutate = importlib.import_module("tools.mutate")
    module, test = tmp_path / "package/sums.py", tmp_path / "tests/test_sums.py"
    for file, text in ((module, SUMS), (test, SUMS_TEST)):
        file.parent.mkdir()
        file.write_text(text)
    subprocess.run("git init -q && git add package tests", cwd=tmp_path, shell=True, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["mutate", "package", "--jobs=1"])
    mutate.main()
    output = capsys.readouterr().out
    assert {*output.splitlines()[:2]} == {"noticed package/sums.py:2", "MISSED  package/sums.py:6"}
    assert "1 of 2 faults were noticed" in output
    assert (
        "package/sums.py:6\n-    return number + number  # untested\n+    return number " in output
    )

    test.write_text(SUMS_TEST.replace("6", "7"))
    with pytest.raises(SbkitError, match="::test_the_double fails without a fault"):
        mutate.main()
