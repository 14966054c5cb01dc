"""The command line: quick to answer, quiet about its own code, and a sentence for bad input."""

import argparse
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from sbkit.base.errors import BAD_INPUT, SbkitError
from sbkit.base.versions import __version__
from sbkit.commands.cli import main, run
from tests.processes import ROOT


def test_package_runs_as_module() -> None:
    command = [sys.executable, "-m", "sbkit", "--version"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0
    python_version = platform.python_version()
    assert process.stdout.startswith(f"sbkit {__version__} (python {python_version}, torch 2.")


def test_option_accepts_underscores(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["score", "x", "--report_by"])
    assert "argument --report-by: expected one argument" in capsys.readouterr().err


def test_override_may_begin_like_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[argparse.Namespace] = []
    monkeypatch.setattr("sbkit.commands.check.check", parsed.append)
    run(["check", "own.yaml", "--s=5", "--json", "--tar=x"])
    (options,) = parsed
    assert (options.yaml, options.overrides) == (Path("own.yaml"), ["--s=5", "--tar=x"])
    assert (options.json, options.strict, options.target) == (True, False, None)


@pytest.mark.parametrize(("missing", "is_required"), [("torch.nn", True), ("own_parts", False)])
def test_only_a_missing_package_of_sbkit_gets_install_advice(
    missing: str, is_required: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def print_entries(folder: Path) -> None:
        raise ModuleNotFoundError("No module", name=missing)

    monkeypatch.setattr("sbkit.data.cache.print_entries", print_entries)
    with pytest.raises(SbkitError if is_required else ModuleNotFoundError) as error:
        run(["cache"])
    assert ("needs the package torch.nn" in str(error.value)) is is_required


def test_command_exits_with_sentence_and_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sbkit", "transcribe", "a", "b.wav", "--pace=1"])
    with pytest.raises(SystemExit) as exited:
        main()
    assert exited.value.code == BAD_INPUT
    assert capsys.readouterr().err == "`--pace` needs --live.\n"


def test_closed_pipe_exits_without_error_message() -> None:
    code = "from sbkit.base.process import run_main; run_main(lambda: print('x\\n' * 100_000))"
    shell = ["bash", "-o", "pipefail", "-c", f'"{sys.executable}" -c "{code}" | head -n 1']
    process = subprocess.run(shell, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (process.returncode, process.stdout, process.stderr) == (141, "x\n", "")
